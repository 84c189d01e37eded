# SPDX-License-Identifier: Apache-2.0
"""The batches of a real manager, applied: tables equal the state's, and contents follow the
tokens.

The forward pass is played by writing, at each slot, a number made of all tokens up to it: so a
block that is shared, copied, swapped or hit wrongly holds another number than the request expects.
A state holds the number of the whole prefix.
"""

from __future__ import annotations

import random
from collections import Counter
from typing import Literal

import pytest
from kvcore_runtime.attention.visibility import FULL, STATE, Visibility
from kvcore_runtime.cache.apply import Runtime
from kvcore_runtime.cache.cache import Cache
from kvcore_runtime.cache.guard import Reads
from kvcore_runtime.cache.layout import CacheLayout, StatePart
from kvcore_runtime.cache.tables import BlockTables

from kvcore import Config, Group, KVCacheManager, Refused, Request, Status
from tests.runtime.backends import python_once

BLOCK_SIZE, NUM_BLOCKS, NUM_HOST_BLOCKS, MAX_LEN = 2, 9, 8, 12
ONE_GROUP = (FULL,)
THREE_GROUPS = (
    FULL,
    Visibility(kind="sliding_window", window=3),
    Visibility(kind="chunked_local", window=4),
)
WITH_STATES = (FULL, STATE, Visibility(kind="sliding_window", window=3))
KINDS_SEEN = {1, 2, 3, 5, 7, 8, 9, 12, 13}


class Play:
    """An engine without a model: random calls, then batch, writes and checks, step after step."""

    def __init__(
        self,
        seed: int,
        backend: Literal["python", "rust"],
        guard: bool,
        kept: tuple[Visibility, ...],
    ) -> None:
        self.pick = random.Random(seed)
        self.kept = kept
        num_blocks, num_host_blocks = NUM_BLOCKS * len(kept), NUM_HOST_BLOCKS * len(kept)
        config = Config(
            num_blocks,
            groups=tuple(Group(BLOCK_SIZE, kind=each.kind, window=each.window) for each in kept),
            num_host_blocks=num_host_blocks,
            max_model_len=MAX_LEN,
            duplicates=self.pick.choice(["keep", "merge"]),
            eviction=self.pick.choice(["lru", "uncached_first"]),
            hash_seed=b"play",
        )
        self.manager = KVCacheManager(config, backend=backend)
        layout = CacheLayout(num_layers=1, num_kv_heads=1, head_dim=1, block_size=BLOCK_SIZE)
        shapes = [(1, BLOCK_SIZE)] * len(kept)
        states = {index: (1, [StatePart((1,))]) for index, each in enumerate(kept) if each is STATE}
        cache = Cache(
            layout, num_blocks, num_host_blocks, guard=guard, groups=shapes, states=states
        )
        tables = BlockTables(16, MAX_LEN // BLOCK_SIZE, 64, BLOCK_SIZE, num_groups=len(kept))
        self.runtime = Runtime(cache, tables, kept=kept)
        self.tokens: dict[str, list[int]] = {}
        self.rows: dict[str, int] = {}
        self.writes: dict[str, tuple[int, int]] = {}
        self.kinds: Counter[int] = Counter()
        self.num_nulls = 0
        self.made = 0

    def step(self) -> None:
        """Make some calls of an engine, then run a batch and its forward pass."""
        self.writes.clear()
        for name in list(self.tokens):
            if name in self.tokens:
                self._advance(name)
        if len(self.tokens) < 5:
            self._admit()
        # Before the batch is taken: taking it may merge blocks, which the next batch tells.
        expected = {name: self._tables(name) for name in self.rows}
        batch = self.manager.take_batch()
        self.kinds.update(batch.column("kind").tolist())
        self.runtime.apply(batch)
        for name, tables in expected.items():
            for group_id, table in enumerate(tables):
                assert self.runtime.tables.row_blocks(self.rows[name], group_id) == table, name
                self.num_nulls += table.count(0)
        self._forward()

    def _admit(self) -> None:
        name = f"r{self.made}"
        self.made += 1
        tokens = [7] * self.pick.randint(0, 5) + [self.pick.randint(1, 2)]
        self.rows[name] = self.manager.add_request(Request(name, tokens))
        self.tokens[name] = tokens
        self._start(name)

    def _start(self, name: str) -> None:
        hit = self.manager.get_computed_blocks(name)
        missing = len(self.tokens[name]) - hit.num_tokens
        got = self.manager.allocate_slots(name, self.pick.randint(1, missing), hit)
        if not isinstance(got, Refused):
            self._note(name, hit.num_tokens)

    def _advance(self, name: str) -> None:
        status, chance = self.manager.status(name), self.pick.random()
        computed = self.manager.num_computed_tokens(name)
        if status is Status.SWAPPED:
            self.manager.swap_in([name])
        elif status is Status.WAITING:
            self._start(name)
        elif chance < 0.1:
            self.manager.free(name)
            if chance < 0.06:
                self._forget(name)
        elif chance < 0.25:
            self.manager.swap_out([name])
        elif chance < 0.4 and len(self.tokens) < 5:
            child = f"r{self.made}"
            self.made += 1
            self.rows[child] = self.manager.fork(name, child)
            self.tokens[child] = list(self.tokens[name])
        else:
            if computed == len(self.tokens[name]):
                if computed >= MAX_LEN - 1:
                    self.manager.free(name)
                    self._forget(name)
                    return
                token = self.pick.randint(1, 2)
                self.tokens[name].append(token)
                self.manager.add_tokens(name, [token])
            if not isinstance(self.manager.allocate_slots(name, 1), Refused):
                self._note(name, computed)

    def _forget(self, name: str) -> None:
        self.manager.remove_request(name)
        del self.tokens[name], self.rows[name]

    def _note(self, name: str, start: int) -> None:
        self.writes[name] = (start, self.manager.num_computed_tokens(name) - start)

    def _tables(self, name: str) -> list[list[int]]:
        if self.manager.status(name) is Status.SWAPPED:
            return [[] for _ in self.kept]
        return [list(table) for table in self.manager.get_block_ids(name)]

    def _content(self, name: str, position: int) -> float:
        return float(hash(tuple(self.tokens[name][: position + 1])) % 99991)

    def _forward(self) -> None:
        names = list(self.writes)
        rows = [self.rows[name] for name in names]
        starts, counts = zip(*self.writes.values(), strict=True) if names else ((), ())
        lengths = [start + count for start, count in self.writes.values()]
        reads = Reads(rows, starts, lengths, names)
        self.runtime.check_reads(reads)
        for group_id in self.runtime.cache.states:
            self._advance_states(group_id)
        for group_id in self._attention():
            keys, values = self.runtime.cache.layer(0, group_id)
            slots = self.runtime.tables.slot_mapping(
                rows, starts, counts, group_id=group_id
            ).tolist()
            written = [
                self._content(name, position)
                for name, (start, count) in self.writes.items()
                for position in range(start, start + count)
            ]
            for slot, number in zip(slots, written, strict=True):
                keys[slot // BLOCK_SIZE, slot % BLOCK_SIZE] = number
                values[slot // BLOCK_SIZE, slot % BLOCK_SIZE] = -number
        self.runtime.check_content(reads)
        for group_id in self._attention():
            kept = self.kept[group_id]
            keys, _ = self.runtime.cache.layer(0, group_id)
            for name, row, start, length in zip(names, rows, starts, lengths, strict=True):
                every = self.runtime.tables.blocks[group_id, row].long()
                seen = range(kept.first_seen(start), length)
                held = keys[every].flatten()[seen.start : length].tolist()
                assert held == [self._content(name, position) for position in seen], name

    def _attention(self) -> list[int]:
        return [index for index, each in enumerate(self.kept) if each is not STATE]

    def _advance_states(self, group_id: int) -> None:
        """Find the state before the step, zero at first, where the state after it is written."""
        (states,) = self.runtime.cache.states[group_id]
        for name, (start, count) in self.writes.items():
            last = start + count - 1
            block = self.runtime.tables.row_blocks(self.rows[name], group_id)[last // BLOCK_SIZE]
            assert states[block].item() == (self._content(name, start - 1) if start else 0), name
            states[block] = self._content(name, last)


@pytest.mark.parametrize(
    "kept", [ONE_GROUP, THREE_GROUPS, WITH_STATES], ids=["one group", "three groups", "states"]
)
@python_once("guard", [True, False])
def test_requests_read_their_own_tokens_whatever_the_manager_does(
    backend: Literal["python", "rust"], guard: bool, kept: tuple[Visibility, ...]
) -> None:
    kinds: Counter[int] = Counter()
    num_nulls = 0
    for seed in range(5):
        play = Play(seed, backend, guard, kept)
        for _ in range(25):
            play.step()
        kinds += play.kinds
        num_nulls += play.num_nulls
    assert set(kinds) >= KINDS_SEEN, kinds
    assert (num_nulls > 0) == (kept is not ONE_GROUP)
