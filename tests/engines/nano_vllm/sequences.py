# SPDX-License-Identifier: Apache-2.0
"""Sequences with what nano-vllm's have, and random schedules that serve them.

A schedule follows from its seed and the answers of the manager. It prefills in chunks, sometimes
asks without allocating, decodes, and takes blocks from any running sequence if a slot is missing.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import attrs


@attrs.define
class Sequence:
    """The attributes that a block manager reads and writes."""

    seq_id: int
    token_ids: list[int]
    block_size: int
    num_tokens: int = attrs.field(init=False)
    num_cached_tokens: int = 0
    num_scheduled_tokens: int = 0
    is_prefill: bool = True
    block_table: list[int] = attrs.field(factory=list)

    def __attrs_post_init__(self) -> None:
        self.num_tokens = len(self.token_ids)

    @property
    def num_blocks(self) -> int:
        """Count the blocks that its tokens take."""
        return -(-self.num_tokens // self.block_size)

    def append_token(self, token: int) -> None:
        """Append a token."""
        self.token_ids.append(token)
        self.num_tokens += 1


@attrs.frozen
class World:
    """Sizes of a run, and its sequences with the length at which each is finished."""

    block_size: int
    num_blocks: int
    prompts: list[list[int]]
    lengths: list[int]


def world_of(seed: int) -> World:
    """Draw prompts that share prefixes, and a pool that holds the longest, or a few of them."""
    draw = random.Random(seed)
    size = draw.choice((2, 3, 4, 8))
    systems = [draw.choices(range(5), k=draw.randrange(1, 8 * size)) for _ in range(3)]
    prompts = []
    for _ in range(14):
        start = draw.choice(systems)
        start = start[: draw.randrange(1, len(start) + 1)]
        prompts.append(start + draw.choices(range(5), k=draw.randrange(2 * size)))
    lengths = [len(prompt) + draw.randrange(1, 4 * size) for prompt in prompts]
    least = -(-max(lengths) // size)
    return World(size, least + draw.randrange(2 * least), prompts, lengths)


class Schedule:
    """One run of a world over a manager; `log` has all answers of the manager."""

    def __init__(self, make: Callable[[int, int], Any], seed: int) -> None:
        self.world = world = world_of(seed)
        self.draw = random.Random(-1 - seed)
        self.manager = make(world.num_blocks, world.block_size)
        self.waiting = [
            Sequence(number, list(prompt), world.block_size)
            for number, prompt in enumerate(world.prompts)
        ]
        self.running: list[Sequence] = []
        self.log: list[Any] = []
        self.num_preempted = self.num_hits = 0

    def run(self) -> list[Any]:
        """Serve all sequences; returns the log."""
        while self.waiting or self.running:
            batch = self.prefill() if self.draw.random() < 0.7 or not self.running else []
            batch = batch or self.decode()
            self.log.append([(seq.seq_id, [*seq.block_table]) for seq in batch])
            for seq in batch:
                self.finish_step(seq)
        return self.log

    def prefill(self) -> list[Sequence]:
        """Begin a prefill step. Returns its sequences; only the last one may stop in mid-prompt."""
        batch: list[Sequence] = []
        budget = self.draw.randrange(1, 12 * self.world.block_size)
        while self.waiting and budget:
            seq = self.waiting[0]
            if not seq.block_table:
                num_cached = self.manager.can_allocate(seq)
                self.log.append(("can_allocate", seq.seq_id, num_cached))
                if num_cached == -1 or (batch and self.draw.random() < 0.2):
                    break
                self.manager.allocate(seq, num_cached)
                self.num_hits += num_cached
                self.log.append(("allocate", seq.num_cached_tokens, [*seq.block_table]))
            seq.is_prefill = True
            seq.num_scheduled_tokens = min(budget, seq.num_tokens - seq.num_cached_tokens)
            budget -= seq.num_scheduled_tokens
            batch.append(seq)
            if seq.num_cached_tokens + seq.num_scheduled_tokens < seq.num_tokens:
                break
            self.running.append(self.waiting.pop(0))
        return batch

    def decode(self) -> list[Sequence]:
        """Begin a decode step. Returns its sequences; one without a slot takes another's blocks."""
        batch: list[Sequence] = []
        idle = [*self.running]
        self.draw.shuffle(idle)
        while idle:
            seq = idle.pop()
            while not self.manager.can_append(seq):
                victim = idle.pop() if idle else seq
                self.preempt(victim)
                if victim is seq:
                    break
            else:
                seq.is_prefill = False
                seq.num_scheduled_tokens = 1
                self.manager.may_append(seq)
                batch.append(seq)
        return batch

    def preempt(self, seq: Sequence) -> None:
        """Take all blocks of a sequence, which waits in front again, after any that has blocks."""
        self.log.append(("preempt", seq.seq_id))
        self.num_preempted += 1
        self.manager.deallocate(seq)
        self.running.remove(seq)
        self.waiting.insert(bool(self.waiting and self.waiting[0].block_table), seq)

    def finish_step(self, seq: Sequence) -> None:
        """Finish the step for a sequence: sample a token, if all others are computed."""
        self.manager.hash_blocks(seq)
        seq.num_cached_tokens += seq.num_scheduled_tokens
        seq.num_scheduled_tokens = 0
        if seq.num_cached_tokens == seq.num_tokens:
            seq.append_token(sum(seq.token_ids[-3:]) % 5)
            if seq.num_tokens >= self.world.lengths[seq.seq_id]:
                self.running.remove(seq)
                self.manager.deallocate(seq)
