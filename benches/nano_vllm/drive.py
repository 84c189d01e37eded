# SPDX-License-Identifier: Apache-2.0
"""Drive nano-vllm's scheduler over a block manager, with a model that samples by a rule.

A token depends on the last tokens and on the length, so a sequence gets the same tokens however
it is scheduled. The blocks of a table hold what the sequence's steps wrote, so a hit on a block
with other content is found at once.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import attrs

VOCABULARY = 997


@attrs.frozen
class Load:
    """The sizes of an engine, the prompts and how many tokens each gets."""

    block_size: int
    num_blocks: int
    max_num_seqs: int
    max_num_batched_tokens: int
    prompts: Sequence[Sequence[int]]
    num_new: Sequence[int]


Step = tuple[bool, list[tuple[int, int, int, list[int]]]]
"""Whether the step prefills; per sequence its number, computed tokens, new tokens and blocks."""


def random_load(seed: int) -> Load:
    """Make prompts that share prefixes, for pools from just large enough to roomy."""
    draw = random.Random(seed)
    size = draw.choice((4, 8, 16))
    systems = [tokens(draw, draw.randrange(1, 12 * size)) for _ in range(3)]
    prompts = [
        draw.choice(systems)[: draw.randrange(1, 12 * size)]
        + tokens(draw, draw.randrange(1, 3 * size))
        for _ in range(20)
    ]
    num_new = [draw.randrange(1, 3 * size) for _ in prompts]
    pairs = zip(prompts, num_new, strict=True)
    least = max(-(-(len(prompt) + new) // size) for prompt, new in pairs)
    return Load(
        block_size=size,
        num_blocks=least + draw.randrange(30),
        max_num_seqs=draw.randrange(1, 9),
        max_num_batched_tokens=draw.choice((2 * size, 64, 300)),
        prompts=prompts,
        num_new=num_new,
    )


def tokens(draw: random.Random, number: int) -> list[int]:
    """Draw random tokens."""
    return [draw.randrange(VOCABULARY) for _ in range(number)]


class Pool:
    """The content of all slots, as on a device."""

    def __init__(self, load: Load) -> None:
        self.size = load.block_size
        self.blocks = [[-1] * load.block_size for _ in range(load.num_blocks)]

    def run(self, seq: Any, is_prefill: bool) -> int:
        """Write the tokens of a step, read all tokens up to them, and sample."""
        start = seq.num_cached_tokens if is_prefill else seq.num_tokens - 1
        end = start + seq.num_scheduled_tokens
        for position in range(start, end):
            block = self.blocks[seq.block_table[position // self.size]]
            block[position % self.size] = seq.token_ids[position]
        held = [token for block in seq.block_table for token in self.blocks[block]]
        if held[:end] != seq.token_ids[:end]:
            raise AssertionError(f"slots hold {held[:end]} in place of {seq.token_ids[:end]}")
        sampled: int = sum(seq.token_ids[-3:]) * 31 + seq.num_tokens
        return sampled % VOCABULARY


def make_engine(scheduler: Any, load: Load) -> tuple[Any, list[Any]]:
    """Make nano-vllm's scheduler with the sequences of a load; returns both."""
    sequence = scheduler.Sequence
    sequence.block_size = load.block_size
    params = type(sequence.__init__.__defaults__[0])  # of sampling
    engine = scheduler.Scheduler(
        SimpleNamespace(
            max_num_seqs=load.max_num_seqs,
            max_num_batched_tokens=load.max_num_batched_tokens,
            eos=-1,
            kvcache_block_size=load.block_size,
            num_kvcache_blocks=load.num_blocks,
        )
    )
    seqs = [
        sequence(prompt, params(max_tokens=new, ignore_eos=True))
        for prompt, new in zip(load.prompts, load.num_new, strict=True)
    ]
    for seq in seqs:
        engine.add(seq)
    return engine, seqs


def drive(
    scheduler: Any, load: Load, *, seconds: list[float] | None = None
) -> tuple[list[list[int]], list[Step], Any]:
    """Serve a load by nano-vllm's module `scheduler`; returns outputs, steps and its manager.

    Checks the content of every slot that a step reads. If `seconds` is given, it does not check,
    but appends the scheduler's CPU time of each step to `seconds`.
    """
    engine, seqs = make_engine(scheduler, load)
    numbers = {seq.seq_id: number for number, seq in enumerate(seqs)}
    pool, clock = Pool(load), time.thread_time
    steps: list[Step] = []
    while not engine.is_finished():
        start = clock()
        batch, is_prefill = engine.schedule()
        scheduled = clock()
        if seconds is None:
            steps.append((is_prefill, [seen(numbers[seq.seq_id], seq) for seq in batch]))
            sampled = [pool.run(seq, is_prefill) for seq in batch]
        else:
            sampled = [(seq.last_token * 31 + len(seq)) % VOCABULARY for seq in batch]
        sampling = clock() - scheduled
        engine.postprocess(batch, sampled, is_prefill)
        if seconds is not None:
            seconds.append(clock() - start - sampling)
    return [seq.completion_token_ids for seq in seqs], steps, engine.block_manager


def seen(number: int, seq: Any) -> tuple[int, int, int, list[int]]:
    """Return a sequence's part of a step: number, computed tokens, new tokens and blocks."""
    return number, seq.num_cached_tokens, seq.num_scheduled_tokens, [*seq.block_table]
