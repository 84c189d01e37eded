# SPDX-License-Identifier: Apache-2.0
"""The pages that waiting sequences fetch: found, brought into slots, verified, and then loaded.

A sequence is new, finding, fetching, ready, loading, over. It waits until its tickets are done, at
most for `fetch_timeout_s`, and not at all if the tier is down; others run meanwhile. A find
promises nothing. Which pages are loaded is decided when the load begins: the contiguous ready pages
behind the hit of that moment, under the names of that moment.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from functools import partial

import attrs

from kvcore import Hit, Refused
from kvcore.far.engine import Clock, FarEngine, FarSequence
from kvcore.far.known import KnownNames
from kvcore.far.link import Ended, Ticket, TierLink
from kvcore.far.options import FarOptions
from kvcore.far.page import PageOwner
from kvcore.far.slots import Slots
from kvcore.far.tier import FarStatus
from kvcore.types.groups import skipped_blocks

BATCH_PAGES = 32
"""The greatest number of names in one ticket."""
Keys = tuple[tuple[bytes, ...], ...]


class FetchState(enum.Enum):
    """The state of a sequence's fetch."""

    FINDING = "finding"
    FETCHING = "fetching"
    READY = "ready"
    LOADING = "loading"
    OVER = "over"


@attrs.define(eq=False)
class Fetch:
    """The fetch of a sequence.

    found: names that the tier says it has. pages: verified slots by name. operations: loads that
    have not ended.
    """

    sequence: FarSequence
    deadline: float
    state: FetchState = FetchState.FINDING
    tickets: set[Ticket] = attrs.field(factory=set)
    found: set[str] = attrs.field(factory=set)
    pages: dict[str, int] = attrs.field(factory=dict)
    operations: set[int] = attrs.field(factory=set)


@attrs.define
class Load:
    """A load of a batch. slot: which it reads. fetch: None if its sequence goes on without it."""

    name: str
    slot: int | None
    batch: int
    place: PageOwner
    fetch: Fetch | None


class Fetches:
    """The fetches of an engine's sequences, by name."""

    def __init__(
        self,
        engine: FarEngine,
        link: TierLink,
        staging: Slots,
        options: FarOptions,
        clock: Clock,
        known: KnownNames,
    ) -> None:
        self._engine = engine
        self._link = link
        self._staging = staging
        self._options = options
        self._clock = clock
        self._known = known
        self._fetches: dict[str, Fetch] = {}
        self._by_ticket: dict[Ticket, Fetch] = {}
        self._loads: dict[int, Load] = {}  # by operation
        self._loaded: list[FarSequence] = []

    @property
    def is_waiting(self) -> bool:
        """Whether a sequence waits for the tier."""
        return bool(self._by_ticket)

    @property
    def is_loading(self) -> bool:
        """Whether a load has not ended."""
        return bool(self._loads or self._loaded)

    @property
    def held(self) -> list[int]:
        """The slots of pages that are ready, or are being loaded."""
        pages = [slot for each in self._fetches.values() for slot in each.pages.values()]
        return pages + self.loading

    @property
    def loading(self) -> list[int]:
        """The slots that batches have yet to load."""
        return [each.slot for each in self._loads.values() if each.slot is not None]

    def is_fetching(self, sequence: FarSequence) -> bool:
        """Return whether a sequence must keep waiting; for a new one, the fetch begins."""
        name = sequence.sequence_id
        if name not in self._fetches:
            self._fetches[name] = self._begin(sequence)
        return self._fetches[name].state in (FetchState.FINDING, FetchState.FETCHING)

    def begin(self, sequence: FarSequence, hit: Hit) -> int | Refused:
        """See `Exchange`: load the ready pages behind a hit."""
        fetch = self._fetches.get(sequence.sequence_id)
        if fetch is None or fetch.state is not FetchState.READY:
            return 0
        start, place = hit.num_tokens, self._link.place
        keys = self._engine.manager.get_block_keys(sequence.sequence_id)
        # A slot's mark names a key but no place, so the loads of two places cannot be told apart.
        if place is None or any(each.place != place for each in self._loads.values()):
            self._leave(fetch, FetchState.OVER)
            return 0
        end = self._reach(sequence, keys, start, lambda key: place.name(key) in fetch.pages)
        if end <= start:
            self._leave(fetch, FetchState.OVER)
            return 0
        got = self._engine.manager.load(
            sequence.sequence_id, end - start, hit, full_sequence_must_fit=True
        )
        if isinstance(got, Refused):
            return got
        for operation, key in zip(got, self._needed(keys, start, end), strict=True):
            name = place.name(key)
            slot = fetch.pages.pop(name)
            self._staging.mark(slot, key, place.identity)
            self._loads[operation] = Load(name, slot, self._engine.open_number, place, fetch)
            fetch.operations.add(operation)
        self._link.counts.num_hits += end - start
        self._leave(fetch, FetchState.LOADING)
        if not got:  # no query sees any block of these tokens
            self._loaded.append(sequence)
        return end - start

    def end(self, operation: int, done: bool) -> None:
        """Note that a batch carried out a load, or failed to."""
        load = self._loads.pop(operation)
        self._give_back(load.slot)
        fetch = load.fetch
        if fetch is not None:
            self._link.counts.num_loaded += done
            fetch.operations.discard(operation)
            if not fetch.operations:
                fetch.state = FetchState.OVER
                self._loaded.append(fetch.sequence)

    def owns(self, operation: int) -> bool:
        """Return whether an operation is a load."""
        return operation in self._loads

    def take_loaded(self) -> list[FarSequence]:
        """Take the sequences whose loads have ended."""
        loaded, self._loaded = self._loaded, []
        return [each for each in loaded if not each.is_gone]

    def answered(self, ended: Ended) -> None:
        """Process the end of a find or load."""
        ticket, statuses = ended.ticket, ended.statuses
        fetch = self._by_ticket.pop(ticket)
        fetch.tickets.discard(ticket)
        if statuses is None:
            return
        if ticket.operation == "find":
            for name, status in zip(ticket.names, statuses, strict=True):
                if status is FarStatus.OK:
                    fetch.found.add(name)
                    self._known.add(name)
                else:
                    self._known.discard(name)
            self._fetch(fetch)
            return
        for name, slot, status in zip(ticket.names, ticket.slots, statuses, strict=True):
            place = self._link.place
            if (
                status is FarStatus.OK
                and place is not None
                and place.owns(self._staging.views[slot])
            ):
                fetch.pages[name] = slot
            else:
                self._give_back(slot)
                self._known.discard(name)

    def settle(self) -> None:
        """Mark fetches as ready if their tickets are done, time is up, or the tier is down."""
        now = self._clock.monotonic()
        for fetch in {id(each): each for each in self._by_ticket.values()}.values():
            if now >= fetch.deadline:
                self._give_up(fetch, partial(self._link.expire, now=now))
            elif not self._link.is_up:
                self._give_up(fetch, self._link.give_up)
        for fetch in self._fetches.values():
            if fetch.state in (FetchState.FINDING, FetchState.FETCHING) and not fetch.tickets:
                fetch.state = FetchState.READY

    def cancelled(self, number: int, reported: set[int]) -> tuple[list[FarSequence], list[int]]:
        """Give up the loads of the batches from this number on: their pages are ready again.

        reported: operations whose end will still be reported. Returns the sequences of the loads,
        and the operations that are not in `reported`, which failed.
        """
        lost, self._loaded = self._loaded, []
        failed: list[int] = []
        for operation, load in list(self._loads.items()):
            if load.batch < number:
                continue
            fetch, load.fetch = load.fetch, None
            if fetch is not None and load.slot is not None:
                self._staging.unmark(load.slot)
                fetch.pages[load.name], load.slot = load.slot, None
                fetch.operations.discard(operation)
                fetch.state = FetchState.READY
                if fetch.sequence not in lost:
                    lost.append(fetch.sequence)
            if operation not in reported:
                self._give_back(load.slot)
                del self._loads[operation]
                failed.append(operation)
        return lost, failed

    def forget(self, sequence: FarSequence) -> None:
        """Forget a sequence; slots that a load still reads are given back when it ends."""
        fetch = self._fetches.pop(sequence.sequence_id, None)
        if fetch is None:
            return
        self._give_up(fetch, self._link.give_up)
        for operation in fetch.operations:
            self._loads[operation].fetch = None
        self._leave(fetch, FetchState.OVER)

    def _begin(self, sequence: FarSequence) -> Fetch:
        """Ask the tier which pages of a sequence it has."""
        now, place = self._clock.monotonic(), self._link.place
        fetch = Fetch(sequence, now + self._options.fetch_timeout_s, FetchState.OVER)
        if place is None or not self._link.is_up:
            return fetch
        manager = self._engine.manager
        start = manager.get_computed_blocks(sequence.sequence_id).num_tokens
        keys = manager.get_block_keys(sequence.sequence_id)
        end = self._reach(sequence, keys, start, lambda _: True)
        if end - start < self._options.min_fetch_tokens:
            return fetch
        self._link.counts.num_queried += end - start
        groups = zip(manager.config.groups, keys, strict=True)
        names = [
            place.name(key)
            for group, own in groups
            for key in own[start // group.block_size : end // group.block_size]
        ]
        self._add(
            fetch, self._link.find(names, self._options.lease_s, self._options.fetch_timeout_s)
        )
        fetch.state = FetchState.FINDING if fetch.tickets else FetchState.OVER
        return fetch

    def _fetch(self, fetch: Fetch) -> None:
        """Fetch the pages that were found: the longest prefix for which there are slots."""
        place, manager = self._link.place, self._engine.manager
        name, alignment = fetch.sequence.sequence_id, manager.config.block_alignment
        fetch.state = FetchState.FETCHING
        if place is None:
            return
        start = manager.get_computed_blocks(name).num_tokens
        keys = manager.get_block_keys(name)
        end = self._reach(fetch.sequence, keys, start, lambda key: place.name(key) in fetch.found)
        needed, free = self._needed(keys, start, end), self._staging.num_free("load")
        while len(needed) > free:
            self._link.counts.dropped["no slot to load"] += 1
            end -= alignment
            needed = self._needed(keys, start, end)
        if end - start < self._options.min_fetch_tokens:
            return
        timeout_s = max(0.0, fetch.deadline - self._clock.monotonic())
        for first in range(0, len(needed), BATCH_PAGES):
            names = [place.name(key) for key in needed[first : first + BATCH_PAGES]]
            slots = self._staging.take("load", len(names))
            ticket = self._link.load(names, slots, timeout_s)
            self._add(fetch, ticket)
            if ticket is None:
                for slot in slots:
                    self._give_back(slot)
                self._link.counts.dropped["busy"] += len(needed) - first
                return

    def _add(self, fetch: Fetch, ticket: Ticket | None) -> None:
        if ticket is not None:
            fetch.tickets.add(ticket)
            self._by_ticket[ticket] = fetch

    def _give_up(self, fetch: Fetch, give_up: Callable[[Ticket], None]) -> None:
        """Stop waiting for the tickets of a fetch."""
        for ticket in fetch.tickets:
            del self._by_ticket[ticket]
            give_up(ticket)
        fetch.tickets.clear()

    def _leave(self, fetch: Fetch, state: FetchState) -> None:
        """Give back the slots of a fetch's ready pages, and set its state."""
        for slot in fetch.pages.values():
            self._give_back(slot)
        fetch.pages.clear()
        fetch.state = state

    def _give_back(self, slot: int | None) -> None:
        if slot is not None:
            self._staging.give_back(slot)

    def _reach(
        self, sequence: FarSequence, keys: Keys, start: int, has: Callable[[bytes], bool]
    ) -> int:
        """Return the greatest end behind start for which no page is missing, or start, behind which
        no block begins if it lies inside one.
        """
        config = self._engine.manager.config
        if start % config.block_alignment:
            return start
        sizes = (group.block_size for group in config.groups)
        full = min(len(own) * size for own, size in zip(keys, sizes, strict=True))
        end = min(sequence.num_tokens - 1, full) // config.block_alignment * config.block_alignment
        while end > start:
            missing = self._first_missing(keys, start, end, has)
            if missing is None:
                return end
            # Every end behind the first missing page needs that page, even with a window.
            end = missing // config.block_alignment * config.block_alignment
        return start

    def _first_missing(
        self, keys: Keys, start: int, end: int, has: Callable[[bytes], bool]
    ) -> int | None:
        """Return the start of the first missing block that a query at end needs, or None."""
        for group, own in zip(self._engine.manager.config.groups, keys, strict=True):
            first = max(start // group.block_size, skipped_blocks(group, end))
            for position in range(first, end // group.block_size):
                if not has(own[position]):
                    return position * group.block_size
        return None

    def _needed(self, keys: Keys, start: int, end: int) -> list[bytes]:
        """Return the keys of the blocks in [start, end) that a query at end needs, by group."""
        needed: list[bytes] = []
        for group, own in zip(self._engine.manager.config.groups, keys, strict=True):
            first = max(start // group.block_size, skipped_blocks(group, end))
            needed += own[first : max(first, end // group.block_size)]
        return needed
