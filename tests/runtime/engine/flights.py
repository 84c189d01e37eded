# SPDX-License-Identifier: Apache-2.0
"""A simulated engine whose batches run late, fail and are cancelled, beside a small real cache.

The manager is called at random. Batches are taken, executed on the cache (stamped_cache.py),
completed and cancelled at random moments; stores and loads end some time after their batch has run,
done or failed, or when it was cancelled. Every read finds what its request wrote, and after every
batch the tables are those that the manager had when the batch was taken.
"""

from __future__ import annotations

import collections
import contextlib
import random
from collections import Counter

import attrs
from kvcore_runtime.cache.stamped_cache import StampedCache

from kvcore import Batch, Config, Hit, KVCacheManager, KvcoreError, Refused, Request, Status
from kvcore.oracle.content_oracle import Pass
from kvcore.replay.applied import Prefix
from tests.conftest import Backend

MAX_LEN = 14
NUM_REQUESTS = 5


@attrs.frozen(kw_only=True)
class Taken:
    """A batch, what its forward pass computes, and the tables by row once it is applied."""

    batch: Batch
    steps: list[Pass]
    tables: dict[int, list[list[int]]]


@attrs.define
class Transfer:
    """A store or load. request_id: the loading request. done: how it ended, None for not yet."""

    batch: int
    request_id: str | None = None
    done: bool | None = None


class Flights:
    """Batches taken and not executed yet, in order; what the requests' tokens are."""

    def __init__(self, config: Config, backend: Backend, seed: int) -> None:
        self.pick = random.Random(seed)
        self.manager = KVCacheManager(config, backend)
        self.stamped = StampedCache(config, max_rows=16, max_len=MAX_LEN + 2, max_tokens=64)
        self.tokens: dict[str, list[int]] = {}
        self.rows: dict[str, int] = {}
        self.starts: dict[str, int] = {}
        self.drafted: dict[str, int] = {}
        self.taken: collections.deque[Taken] = collections.deque()
        self.transfers: dict[int, Transfer] = {}
        self.pinned: list[int] = []
        self.executed = -1
        self.number = 0
        self.made = 0
        self.seen: Counter[str] = Counter()

    def move(self) -> None:
        """Make one possible move, by chance."""
        in_flight = self.manager.in_flight
        chance = self.pick.random()
        self._end_transfers()
        if in_flight and chance < 0.06:
            self.cancel(self.pick.choice(in_flight))
        elif self.taken and chance < 0.4:
            self.execute()
        elif in_flight and in_flight[0] <= self.executed:
            self.seen["completed late"] += in_flight[0] < self.executed
            self.manager.complete(in_flight[0])
        elif len(in_flight) < self.manager.config.max_in_flight:
            self.plan()
        else:
            self.execute()

    def plan(self) -> None:
        """Make some calls of an engine, then take a batch."""
        self.starts.clear()
        self.drafted.clear()
        for name in list(self.tokens):
            self._advance(name)
        if len(self.tokens) < NUM_REQUESTS:
            self._admit()
        self._disturb()
        # Before the batch is taken: taking it may merge blocks, which the next batch tells.
        tables = {row: self._tables(name) for name, row in self.rows.items()}
        steps = [self._step(name, start) for name, start in self.starts.items()]
        batch = self.manager.take_batch()
        self.number = batch.number + 1
        for name, num_drafts in self.drafted.items():
            self._accept(name, self.pick.randint(0, num_drafts))
        self.taken.append(Taken(batch=batch, steps=steps, tables=tables))

    def execute(self) -> None:
        """Apply the oldest batch that was not applied, run its forward pass, compare the tables."""
        if not self.taken:
            return
        taken = self.taken.popleft()
        self.stamped.skip(taken.batch.number)
        for each in self.stamped.run(taken.batch, taken.steps):
            self.transfers[each.operation].done = each.done
            self.seen["transfers run"] += each.done
            self.seen["transfers failed"] += not each.done
        self.stamped.check_tables(taken.tables)
        self.executed = taken.batch.number

    def cancel(self, number: int) -> None:
        """Take back a batch, executed or not, and all later ones."""
        done = "executed" if number <= self.executed else "not executed"
        self.seen[f"cancelled, {done}"] += 1
        self.manager.cancel(number)
        self.number += 1
        for each in self.transfers.values():
            if each.batch >= number:
                self.seen["loads cancelled"] += each.request_id is not None
                each.request_id = None
                each.done = bool(each.done)
        while self.taken and self.taken[-1].batch.number >= number:
            self.taken.pop()
        self.seen["cancelled, earlier ones still to run"] += bool(self.taken)

    def _admit(self) -> None:
        name = f"r{self.made}"
        self.made += 1
        tokens = [7] * self.pick.randint(0, 5) + [self.pick.randint(1, 2)]
        self.rows[name] = self.manager.add_request(Request(name, tokens))
        self.tokens[name] = tokens
        self._start(name)

    def _start(self, name: str) -> None:
        hit = self.manager.get_computed_blocks(name)
        if self.pick.random() < 0.5 and self._load(name, hit):
            return
        missing = len(self.tokens[name]) - hit.num_tokens
        got = self.manager.allocate_slots(name, self.pick.randint(1, missing), hit)
        if isinstance(got, Refused):
            self.seen["pending"] += got.pending > 0
        else:
            self.starts[name] = hit.num_tokens

    def _advance(self, name: str) -> None:
        status, chance = self.manager.status(name), self.pick.random()
        if any(each.request_id == name for each in self.transfers.values()):
            if chance < 0.1:
                self._forget(name)
        elif status is Status.SWAPPED:
            self.seen["swapped in"] += bool(self.manager.swap_in([name]))
        elif status is Status.WAITING:
            self._start(name)
        elif chance < 0.1:
            self.manager.free(name)
            if chance < 0.06:
                self._forget(name)
        elif chance < 0.14:
            keep = self.pick.randint(1, len(self.tokens[name]))
            self.manager.truncate(name, keep)
            del self.tokens[name][keep:]
        elif chance < 0.25:
            self.seen["swapped out"] += bool(self.manager.swap_out([name]))
        elif chance < 0.4 and len(self.tokens) < NUM_REQUESTS:
            child = f"r{self.made}"
            self.made += 1
            self.rows[child] = self.manager.fork(name, child)
            self.tokens[child] = list(self.tokens[name])
        else:
            self._compute(name)

    def _compute(self, name: str) -> None:
        computed = self.manager.num_computed_tokens(name)
        if computed == len(self.tokens[name]):
            if computed >= MAX_LEN - 1:
                self._forget(name)
                return
            token = self.pick.randint(1, 2)
            self.tokens[name].append(token)
            self.manager.add_tokens(name, [token])
            drafts = [self.pick.randint(1, 2) for _ in range(self.pick.choice([0, 0, 1, 3]))]
            drafts = drafts[: MAX_LEN - len(self.tokens[name])]
            self.manager.add_drafts(name, drafts)
            if drafts and self.manager.allocate_slots(name, 1 + len(drafts)):
                self.starts[name], self.drafted[name] = computed, len(drafts)
                self.tokens[name] += drafts
                return
            self.manager.add_drafts(name, [])
        got = self.manager.allocate_slots(name, 1, num_lookahead_tokens=self.pick.choice([0, 0, 1]))
        if isinstance(got, Refused):
            self.seen["pending"] += got.pending > 0
        else:
            self.starts[name] = computed

    def _accept(self, name: str, num_accepted: int) -> None:
        """Settle drafts: those that are not accepted do not become tokens."""
        self.manager.accept(name, num_accepted)
        dropped = self.drafted[name] - num_accepted
        if dropped:
            del self.tokens[name][-dropped:]
        self.seen["drafts"] += 1

    def _load(self, name: str, hit: Hit) -> bool:
        """Load what the tier has of a request after its hit; some of it may fail."""
        config, pages = self.manager.config, self.stamped.tier.pages
        keys, end = self.manager.get_block_keys(name), hit.num_tokens
        step = config.block_alignment
        while end + step < len(self.tokens[name]) and all(
            own[position] in pages
            for own, group in zip(keys, config.groups, strict=True)
            for position in range(end // group.block_size, (end + step) // group.block_size)
        ):
            end += step
        if end == hit.num_tokens:
            return False
        got = self.manager.load(name, end - hit.num_tokens, hit)
        if isinstance(got, Refused):
            return True
        self.transfers |= {each: Transfer(self.number, name) for each in got}
        if self.pick.random() < 0.2:
            self.stamped.tier.failing.add(self.pick.choice(keys[0]))
        return True

    def _disturb(self) -> None:
        """Store, pin and evict some blocks, without the calls that are not allowed."""
        for name in self.rows:
            blocks = [block for table in self._tables(name) for block in table if block]
            some = [each for each in blocks if self.manager.has_key(each)][:4]
            chance = self.pick.random()
            with contextlib.suppress(KvcoreError):
                if some and chance < 0.15:
                    got = self.manager.store(some)
                    self.transfers |= {each: Transfer(self.number) for each in got}
                elif some and chance < 0.18:
                    self.manager.evict_blocks(some[:1])
                elif some and chance < 0.21:
                    self.manager.pin(some[:1])
                    self.pinned += some[:1]
        if self.pinned and self.pick.random() < 0.3:
            self.manager.unpin([self.pinned.pop()])

    def _end_transfers(self) -> None:
        """Report some stores and loads that are over."""
        for operation, each in list(self.transfers.items()):
            if each.done is not None and self.pick.random() < 0.5:
                del self.transfers[operation]
                self.manager.complete_operation(operation, each.done)

    def _forget(self, name: str) -> None:
        self.manager.free(name)
        self.manager.remove_request(name)
        for each in self.transfers.values():
            if each.request_id == name:
                each.request_id = None
        del self.tokens[name], self.rows[name]

    def _tables(self, name: str) -> list[list[int]]:
        if self.manager.status(name) is Status.SWAPPED:
            return [[] for _ in self.manager.config.groups]
        return [list(table) for table in self.manager.get_block_ids(name)]

    def _step(self, name: str, start: int) -> Pass:
        return Pass(
            request_id=name,
            row=self.rows[name],
            start=start,
            end=self.manager.num_computed_tokens(name),
            nodes=Prefix().nodes(self.tokens[name], len(self.tokens[name])),
        )
