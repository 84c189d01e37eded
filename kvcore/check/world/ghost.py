# SPDX-License-Identifier: Apache-2.0
"""The ghost: the true contents of every slot, compared with what a state of the core counts on.

Contents follow the commands and the forward passes alone (`kvcore.oracle`); a state is right if its
batch, executed, leaves everything that the state counts on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import attrs

from kvcore.check.world.keyed import found_by_tails
from kvcore.oracle.content_oracle import ContentOracle, Pass, Tables
from kvcore.oracle.contents import Content, Contents, TierBlock, WrongSlot, block_at, group_of
from kvcore.oracle.prefixes import Prefixes
from kvcore.oracle.schedule import Encoder, Write
from kvcore.state.state import NO_HOST_BLOCK, RequestState, State
from kvcore.types.commands import Tier
from kvcore.types.config import Config
from kvcore.types.errors import InvariantViolation
from kvcore.types.groups import skipped_tokens

Expected = tuple[str, TierBlock, int, Content]


@attrs.frozen
class Counted:
    """The contents that a state counts on: those of its computed and cached slots, undefined if it
    counts on nothing there, its tables (row, group) and its owners.
    """

    contents: Contents
    tables: Tables
    owned: frozenset[int]
    cached: frozenset[int]


class Ghost(ContentOracle):
    """An oracle of contents that knows what states count on.

    loading: the position at which the unfinished load of a request begins; what it brings is not
    there yet.
    """

    def __init__(
        self,
        config: Config,
        counts: Callable[[str], bool] = lambda _: True,
        prefixes: Prefixes | None = None,
    ) -> None:
        self.prefixes = prefixes or Prefixes(config)
        super().__init__(config, self.prefixes.block, counts, late_reports=True)
        self.loading: Mapping[str, int] = {}

    def counted(self, state: State, encoders: Mapping[str, Encoder]) -> Counted:
        """Return what a state counts on. Raises InvariantViolation for two contents in one slot."""
        filled: dict[TierBlock, list[Content]] = {}
        for name, place, slot, content in self.expected(state, encoders):
            slots = filled.get(place)
            if slots is None:
                slots = filled[place] = list(self._nothing)
            if slots[slot] not in (None, content) and self._counts(name):
                raise InvariantViolation(name, f"{place} slot {slot} is to hold two contents")
            slots[slot] = content
        contents = {place: tuple(slots) for place, slots in filled.items()}
        return Counted(contents, tables_of(state), *map(frozenset, owners(state)))

    def assume(self, counted: Counted) -> None:
        """Hold exactly what a state counts on, and its tables and owners."""
        self.contents = dict(counted.contents)
        self.tables = dict(counted.tables)
        self.owned, self.cached = set(counted.owned), set(counted.cached)
        self.evicted = set()
        self._unfilled = set()
        self.loads = {}

    def expected(self, state: State, encoders: Mapping[str, Encoder]) -> Iterator[Expected]:
        """Yield the contents that a state counts on: (property, place, slot, content) of all
        computed and cached slots, scheduled drafts included.
        """
        for request in state.requests.values():
            nodes = self.prefixes.nodes(request, request.epoch)
            for tier, tables in tiers(request):
                for index, table in enumerate(tables):
                    if not table:
                        continue
                    group = self._config.groups[index]
                    held = nodes[: self.loading.get(request.request_id, request.num_computed)]
                    if group.is_state:
                        yield from self._states(state, request, (tier, index, table), held)
                        continue
                    if group.is_cross:
                        held = _encoded(encoders.get(request.request_id))
                    seen = skipped_tokens(group, request.num_accepted)
                    for position, node in enumerate(held):
                        block = block_at(table, position // group.block_size)
                        if position >= seen or not self._is_null(tier, block):
                            slot = position % group.block_size
                            yield "KV-READ", (tier, block), slot, (node, index)
        for key, blocks in state.device.index.items():
            index = group_of(key)
            name = "STATE-KEY" if self._config.groups[index].is_state else "CACHE-KV"
            for block in blocks:
                for slot, node in enumerate(self.prefixes.block(key, state.epoch)):
                    yield name, ("device", block), slot, (node, index)
        for key, blocks in found_by_tails(state.device).items():
            nodes, index = self.prefixes.tail(key, state.epoch), group_of(key)
            for block in blocks:
                for slot, node in enumerate(nodes):
                    yield "CACHE-KV", ("device", block), slot, (node, index)
        for batch in state.in_flight:
            for owed in batch.owed:
                (node,) = self.prefixes.block(owed.key, state.epoch)
                yield "STATE-KEY", ("device", owed.block), 0, (node, group_of(owed.key))

    def _states(
        self,
        state: State,
        request: RequestState,
        place: tuple[Tier, int, Sequence[int]],
        held: Sequence[int],
    ) -> Iterator[Expected]:
        """Yield the state at a request's count, unless a load still brings it, and those to which a
        cancel takes it back, and those after scheduled drafts. held: the prefixes of the tokens
        that it holds.
        """
        tier, index, table = place
        least = request.state_count
        counts = {least}
        for entries in (state.batch.entries, *(each.entries for each in state.in_flight[::-1])):
            known = entries.get(request.request_id)
            least = least if known is None else min(least, known.restore)
            counts.add(least)
        for count in sorted(counts - {0}):
            if count > len(held):
                continue
            block = block_at(table, (count - 1) // self._config.groups[index].block_size)
            yield "STATE-READ", (tier, block), 0, (held[count - 1], index)
        count, num_drafts = request.state_count, request.num_scheduled_drafts
        for at, node in enumerate(held[count : count + num_drafts], len(table) - num_drafts):
            yield "STATE-READ", (tier, table[at]), 0, (node, index)

    def compute(
        self,
        requests: Mapping[str, RequestState],
        writes: Sequence[Write],
        encoders: Mapping[str, Encoder],
        epochs: Mapping[str, int] | None = None,
    ) -> None:
        """Play the forward pass of what a batch schedules. requests: as taken. epochs: those in
        which they began, if that is not what they say.
        """
        if epochs is None:
            epochs = {name: each.epoch for name, each in requests.items()}
        self.forward(
            [
                Pass(
                    request_id=each.request_id,
                    row=requests[each.request_id].row,
                    start=each.start,
                    loaded=each.loaded,
                    end=each.end,
                    num_slots=each.num_slots,
                    nodes=self.prefixes.nodes(requests[each.request_id], epochs[each.request_id]),
                    failed=each.failed,
                    encoder=_encoded(each.encoder or encoders.get(each.request_id)),
                    encodes=each.encoder is not None,
                    num_drafts=_num_drafts(requests[each.request_id], each.end),
                )
                for each in writes
            ]
        )

    def check(
        self, state: State, encoders: Mapping[str, Encoder], counted: Counted | None = None
    ) -> None:
        """Raise InvariantViolation unless a state finds what it counts on once its batch is
        executed. counted: those contents, if known.
        """
        if counted is None:
            counted = self.counted(state, encoders)
        if not _holds(self.contents, counted.contents):
            for name, place, slot, content in self.expected(state, encoders):
                held = self.get(place)[slot]
                if held != content:
                    self._complain(name, WrongSlot(place, slot, held, content))
        mirrored = {place: table for place, table in self.tables.items() if table}
        if mirrored != counted.tables and self._counts("TABLE-MIRROR"):
            detail = f"{mirrored} after the deltas, not {counted.tables}"
            raise InvariantViolation("TABLE-MIRROR", detail)
        self._settle_evicted(counted)
        owners = (set(counted.owned), set(counted.cached))
        if (self.owned, self.cached) != owners and self._counts("OWNER-MIRROR"):
            detail = f"{self.owned} owned, {self.cached} cached by the commands: {owners}"
            raise InvariantViolation("OWNER-MIRROR", detail)

    def _settle_evicted(self, counted: Counted) -> None:
        """Forget the blocks that lost the last of their keys."""
        for block in self.evicted - counted.cached - self.owned:
            self.cached.discard(block)
            self.forget(block)
        self.evicted = set()

    def _is_null(self, tier: Tier, block: int) -> bool:
        return block < self._num_null if tier == "device" else block == NO_HOST_BLOCK


def tiers(request: RequestState) -> tuple[tuple[Tier, Sequence[Sequence[int]]], ...]:
    """Return a request's tables with their tiers."""
    return (("device", request.tables), ("host", request.host_tables))


def _num_drafts(request: RequestState, end: int) -> int:
    """Count the drafts among a request's first positions."""
    return max(0, end - len(request.tokens)) if request.drafts else 0


def _encoded(encoder: Encoder | None) -> tuple[int, ...]:
    return () if encoder is None else (encoder.number,) * encoder.num_tokens


def tables_of(state: State) -> Tables:
    """Return the block tables of a state that are not empty."""
    return {
        (request.row, group_id): tuple(table)
        for request in state.requests.values()
        for group_id, table in enumerate(request.tables)
        if table
    }


def owners(state: State) -> tuple[set[int], set[int]]:
    """Return the device blocks with an owner, and those without that can be hit."""
    counts = list(enumerate(state.device.ref_counts))
    owned = {block for block, count in counts if count}
    return owned, {b for b, count in counts if not count and state.device.has_key(b)}


def _holds(contents: Contents, wanted: Contents) -> bool:
    """Return whether each slot that is counted on holds its expected content."""
    for place, slots in wanted.items():
        held = contents.get(place)
        if held == slots:
            continue
        if held is None or any(a not in (None, b) for a, b in zip(slots, held, strict=True)):
            return False
    return True
