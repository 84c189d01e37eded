# SPDX-License-Identifier: Apache-2.0
"""An index of what many workers have cached, built from their events, for a router.

Batches are numbered. If one is missing, the index changes nothing until it has arrived, so the
blocks of a worker are those that its manager had when it sent the batch applied last. A batch that
begins with `AllBlocksCleared` does not need the batches before it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import attrs

from kvcore.codec.event_msgpack import EventMap
from kvcore.event_index.wire import Name, decode_events, is_cleared, short_name
from kvcore.event_index.worker_index import Changed, WorkerIndex

Worker = tuple[str, int]
"""The name of an engine, and its data-parallel rank."""

HELD_MAX = 10_000


@attrs.frozen
class Applied:
    """The batch was applied, and so were the held ones that follow it. last: number of the last
    one.
    """

    last: int


@attrs.frozen
class Gap:
    """Batches from `start` on are missing, and this one is held. Request a replay from `start`."""

    start: int


@attrs.frozen
class Stale:
    """The batch's number is below `expected`; it was ignored."""

    expected: int


class _Feed:
    """One worker: the next number, its blocks, and the batches that arrived too early."""

    def __init__(self, bit: int) -> None:
        self.bit = bit
        self.expected = 0
        self.index = WorkerIndex()
        self.held: dict[int, tuple[EventMap, ...]] = {}


class EventIndex:
    """An index of the blocks that each worker has. Not thread-safe.

    held_max: batches kept per worker while earlier ones are missing. Further ones are dropped,
    since a replay brings them again.
    """

    def __init__(self, held_max: int = HELD_MAX) -> None:
        self._held_max = held_max
        self._feeds: dict[Worker, _Feed] = {}
        self._by_bit: dict[int, Worker] = {}
        self._owners: dict[int, dict[Name, int]] = {}
        self._all = 0
        self._windowed = 0  # the bits of workers with a sliding window, or with several groups
        self.unknown_events = 0
        """Number of ignored events, those of unknown types."""

    def apply(self, worker: str, rank: int, number: int, payload: bytes) -> Applied | Gap | Stale:
        """Apply one batch of a worker.

        number: of the batch. Raises DamagedEvents, and changes nothing then.
        """
        events = decode_events(payload).events
        feed = self._feed((worker, rank))
        if number < feed.expected:
            return Stale(feed.expected)
        if number > feed.expected and not (events and is_cleared(events[0])):
            if number in feed.held or len(feed.held) < self._held_max:
                feed.held[number] = events
            return Gap(feed.expected)
        self._follow(feed, events)
        feed.expected = number + 1
        feed.held = {at: held for at, held in feed.held.items() if at > number}
        return self._go_on(feed)

    def skip(self, worker: str, rank: int) -> None:
        """Forget a worker's blocks, and go on with the first batch that is held.

        For batches that are lost for good: the index then has none of the worker's blocks that it
        does not have, but not all that it has.
        """
        feed = self._feeds.get((worker, rank))
        if feed is not None and feed.held:
            self.drop(worker, rank)
            held, feed = feed.held, self._feed((worker, rank))
            feed.expected, feed.held = min(held), held
            self._go_on(feed)

    def find(self, hashes: Sequence[Name]) -> dict[Worker, int]:
        """Return how many leading blocks each worker can hit, without workers that have none.

        hashes: of a prompt's full blocks, in order, whole or as 64 bits. If a worker has several
        groups, all of them must allow the hit: full attention needs every block, a window only
        those at the end of the hit. Groups whose block size differs from the first group's are
        ignored. Does not change the index.
        """
        names = [short_name(each) for each in hashes]
        found = {}
        for bit, depth in self._leading(names).items():
            worker = self._by_bit[bit]
            if bit & self._windowed:
                windows = self._feeds[worker].index.comparable_groups()
                depth = self._with_windows(names, bit, windows)
            if depth:
                found[worker] = depth
        return found

    def is_partial(self, worker: str, rank: int) -> bool:
        """Return whether batches of this worker are missing. True for an unknown worker."""
        feed = self._feeds.get((worker, rank))
        return feed is None or bool(feed.held) or feed.expected == 0

    def expected(self, worker: str, rank: int) -> int:
        """Return the number of the next batch; 0 for an unknown worker."""
        feed = self._feeds.get((worker, rank))
        return feed.expected if feed else 0

    def keys(self, worker: str, rank: int) -> set[tuple[int, Name]]:
        """Return group and hash, as 64 bits, of each block of a worker."""
        feed = self._feeds.get((worker, rank))
        return feed.index.keys() if feed else set()

    def drop(self, worker: str, rank: int | None = None) -> None:
        """Forget one rank of an engine, or all. If it sends again, it starts from nothing."""
        for each in [each for each in self._feeds if each[0] == worker and rank in (None, each[1])]:
            feed = self._feeds.pop(each)
            self._change(feed, [], list(feed.index.keys()))
            del self._by_bit[feed.bit]
            self._all &= ~feed.bit
            self._windowed &= ~feed.bit

    def _feed(self, worker: Worker) -> _Feed:
        if worker not in self._feeds:
            bit = ~self._all & (self._all + 1)
            self._all |= bit
            self._by_bit[bit] = worker
            self._feeds[worker] = _Feed(bit)
        return self._feeds[worker]

    def _go_on(self, feed: _Feed) -> Applied | Gap:
        """Apply the held batches that are next."""
        while feed.expected in feed.held:
            self._follow(feed, feed.held.pop(feed.expected))
            feed.expected += 1
        return Gap(feed.expected) if feed.held else Applied(feed.expected - 1)

    def _follow(self, feed: _Feed, events: Iterable[EventMap]) -> None:
        for event in events:
            if event["type"] in ("BlockStored", "BlockRemoved"):
                # One block may be named in both ways, by its events of different media.
                event = event | {"block_hashes": [*map(short_name, event["block_hashes"])]}
            elif not is_cleared(event):
                self.unknown_events += 1
            self._change(feed, *feed.index.apply(event))
        windows = feed.index.comparable_groups()
        full_attention = len(windows) <= 1 and windows.get(0) is None
        self._windowed = self._windowed & ~feed.bit | (0 if full_attention else feed.bit)

    def _change(self, feed: _Feed, appeared: Changed, gone: Changed) -> None:
        for group, name in appeared:
            owners = self._owners.setdefault(group, {})
            owners[name] = owners.get(name, 0) | feed.bit
        for group, name in gone:
            owners = self._owners[group]
            owners[name] &= ~feed.bit
            if not owners[name]:
                del owners[name]

    def _leading(self, names: Sequence[int]) -> dict[int, int]:
        """Return how many leading blocks of the first group each worker has, by the worker's bit.

        A worker that has none is included only if it has windows.
        """
        if not names:
            return {}
        owners = self._owners.get(0, {})
        depths = {}
        alive = owners.get(names[0], 0) | self._windowed
        for depth, name in enumerate(names):
            here = alive & owners.get(name, 0)
            for bit in _bits(alive & ~here):
                depths[bit] = depth
            alive = here
            if not alive:
                break
        return depths | dict.fromkeys(_bits(alive), len(names))

    def _with_windows(self, names: Sequence[int], bit: int, windows: dict[int, int | None]) -> int:
        """Return the longest prefix, in blocks, that all groups of a worker allow."""
        runs = {}  # per group, the length of the run of blocks that ends at each block
        for group in windows:
            owners = self._owners.get(group, {})
            run, lengths = 0, []
            for name in names:
                run = run + 1 if owners.get(name, 0) & bit else 0
                lengths.append(run)
            runs[group] = lengths
        for depth in range(len(names), 0, -1):
            if all(
                runs[group][depth - 1] >= (depth if window is None else min(window, depth))
                for group, window in windows.items()
            ):
                return depth
        return 0


def _bits(mask: int) -> Iterable[int]:
    """Yield the bits of a mask, each as a number, from the lowest."""
    while mask:
        bit = mask & -mask
        yield bit
        mask ^= bit
