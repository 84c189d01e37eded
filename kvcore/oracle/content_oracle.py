# SPDX-License-Identifier: Apache-2.0
"""The oracle: contents, block tables and owners, derived from batches and forward passes alone.

A forward pass fills the slots of external tokens, writes the scheduled tokens, and writes rubbish
into lookahead slots; then every query must find what its group lets it see. In a state group it
finds the state before the step in the block to which it then writes the state after it; all passes
of a request are one step. A failed load leaves spoilt slots, and so does everything computed from
them. The null block is neither written nor read.
The content of a block is undefined as soon as the block is handed out, or loses both owner and key;
this is stricter than real memory and finds a use after free in the smallest pool.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import copy

import attrs

from kvcore.oracle.contents import (
    RUBBISH,
    SPOILT,
    ZEROS,
    Content,
    SlotStore,
    TierBlock,
    WrongSlot,
    block_at,
    group_of,
    run_of,
)
from kvcore.types.commands import (
    COPIES,
    Allocate,
    Command,
    CutTable,
    Evict,
    EvictAll,
    Free,
    Load,
    SetTable,
    Store,
    Touch,
)
from kvcore.types.config import Config
from kvcore.types.errors import InvariantViolation
from kvcore.types.groups import Group, skipped_tokens

Tables = dict[tuple[int, int], tuple[int, ...]]
"""The blocks of a row, for each group."""
FORGOTTEN = -1
"""In the place of a table's entry that counts as unknown."""
FORGOTTEN_REST = -2
"""In the place of all entries from there on, of which not even the number is known."""
Nodes = Sequence[int]
Layer = tuple[int, Group, list[TierBlock]]


@attrs.frozen(kw_only=True)
class Pass:
    """One forward pass's work for one request: positions [start, end) are written.

    row: row of the block tables. nodes: identities of the prefixes, for at least `end` positions.
    loaded: slots before it are filled by a load, and queries start there; default: start.
    num_slots: rubbish is written up to there; default: end. num_drafts: how many positions at the
    end are drafts, each with a state of its own. num_rejected: how many behind the end are drafts
    that were not accepted, which the state after the step includes. ahead: whether it was planned
    behind positions to come: if drafts among these are not accepted, its state is worth nothing.
    failed: the first position that was not loaded, None if all were. encoder: content of the
    cross-attention tables; encodes: whether this pass fills them.
    """

    request_id: str
    row: int
    start: int
    end: int
    nodes: Nodes
    loaded: int = attrs.Factory(lambda self: self.start, takes_self=True)
    num_slots: int = attrs.Factory(lambda self: self.end, takes_self=True)
    failed: int | None = None
    encoder: Nodes = ()
    encodes: bool = False
    num_drafts: int = 0
    num_rejected: int = 0
    ahead: bool = False

    @property
    def num_in_state(self) -> int:
        """The tokens of the state after the step, without drafts that have states of their own."""
        return self.end + self.num_rejected - self.num_drafts


class ContentOracle(SlotStore):
    """Tracks contents, tables and owners of all blocks by the commands, and checks properties.

    block_of: content of a block under a key of an epoch. counts: whether a property is checked.
    late_reports: whether a failed load may be reported after later batches; until then, spoilt
    slots may be read. loads: content and slots of each executed load, and the epoch of its batch.
    epoch: of the weights. evicted: cached blocks that lost a key and may have another, if a block
    can have several.
    """

    def __init__(
        self,
        config: Config,
        block_of: Callable[[bytes, int], Nodes],
        counts: Callable[[str], bool] = lambda _: True,
        *,
        late_reports: bool = False,
    ) -> None:
        sizes = [group.block_size for group in config.groups]
        super().__init__(sizes, num_null=int(config.null_block))
        self._config = config
        self._block_of = block_of
        self._counts = counts
        self._late_reports = late_reports
        self._cancels = config.max_in_flight > 0
        self.loads: dict[int, tuple[bytes, int, int]] = {}
        self.epoch = 0
        self.tables: Tables = {}
        self.owned: set[int] = set()
        self.cached: set[int] = set()
        self.evicted: set[int] = set()
        self._unfilled: set[int] = set()

    def copied(self) -> ContentOracle:
        """Return an independent copy."""
        other = copy(self)
        other.contents, other.tables = dict(self.contents), dict(self.tables)
        other.loads, other._unfilled = dict(self.loads), set(self._unfilled)
        other.owned, other.cached = set(self.owned), set(self.cached)
        other.evicted = set(self.evicted)
        return other

    def apply(self, commands: Iterable[Command]) -> None:
        """Execute the commands of a batch in order."""
        for command in commands:
            self._follow(command)
            if type(command) in COPIES:
                self.copy(command)
                target = command.writes()
                if target is not None and target[0] == "device":
                    self._unfilled.discard(target[1])

    def arrive(self, operation: int, nodes: Nodes | None) -> None:
        """Fill or spoil the block of an executed load; a store changes no content."""
        if operation not in self.loads:
            return
        key, block, _ = self.loads.pop(operation)
        group_id = group_of(key)
        size = self.sizes[group_id]
        run = (SPOILT,) * size if nodes is None else run_of(nodes[:size], group_id)
        self.put([("device", block)], group_id, 0, run)

    def complete(self, operation: int, done: bool) -> None:
        """Fill the block of a load with the content of its key, or spoil it."""
        if operation in self.loads:
            key, _, epoch = self.loads[operation]
            self.arrive(operation, self._block_of(key, epoch) if done else None)

    def forward(self, passes: Sequence[Pass]) -> None:
        """Write the slots that a batch schedules, then read what its queries see. Raises
        InvariantViolation (KV-READ, LOAD-FAILED, ZEROED).
        """
        for each in passes if self._unfilled and self._counts("ZEROED") else ():
            self._check_zeroed(each)
        self._unfilled = set()
        if not passes:
            return
        step = self._step_states(passes)
        for each in passes:
            self._write(each)
        failing = any(each.failed is not None for each in passes)
        late = self._late_reports and self._cancels
        if failing or (late and any(SPOILT in slots for slots in self.contents.values())):
            self._spread(passes, step)
        forgiving = failing or self._late_reports
        for each in passes:
            if each.loaded < each.end:
                tables = [table for _, _, table in self._layers(each.row)]
                self.check_request(tables, each, each.loaded, forgiving=forgiving)

    def check_request(
        self,
        tables: Sequence[Sequence[TierBlock]],
        each: Pass,
        query: int,
        *,
        forgiving: bool = False,
    ) -> None:
        """Raise InvariantViolation (KV-READ) unless the queries from `query` to the end of a pass
        find everything that they see. forgiving: they may also find slots that a failed load
        spoilt.
        """
        for index, group in enumerate(self._config.groups):
            nodes, first, end = each.nodes, skipped_tokens(group, query), each.end
            if group.is_state:
                continue
            if group.is_cross:
                nodes, first, end = each.encoder, 0, len(each.encoder) if each.end else 0
            for wrong in self.wrong(tables[index], index, nodes, first, min(end, len(nodes))):
                if not (forgiving and wrong.held == SPOILT):
                    self._complain("KV-READ", wrong, f": request {each.request_id!r} reads it")

    def check_key(self, block: int, key: bytes) -> None:
        """Raise InvariantViolation (CACHE-KV, STATE-KEY) unless a block holds the content of its
        key.
        """
        nodes, group_id = self._block_of(key, self.epoch), group_of(key)
        name = "STATE-KEY" if self._config.groups[group_id].is_state else "CACHE-KV"
        for wrong in self.wrong([("device", block)], group_id, nodes, 0, len(nodes)):
            self._complain(name, wrong)

    def _complain(self, name: str, wrong: WrongSlot, behind: str = "") -> None:
        """Raise InvariantViolation if the property is checked. behind: appended to the message."""
        spoilt = wrong.held == SPOILT and self._late_reports
        if spoilt and self._counts("LOAD-FAILED"):
            name = "LOAD-FAILED"
        if self._counts(name):
            tier, block = wrong.place
            detail = f"{tier} block {block} slot {wrong.slot} holds {wrong.held}"
            raise InvariantViolation(name, f"{detail}, not {wrong.wanted}{behind}")

    def _check_zeroed(self, each: Pass) -> None:
        for index, group in enumerate(self._config.groups):
            for block in self.tables.get((each.row, index), ()) if group.zero_new_blocks else ():
                if block in self._unfilled:
                    detail = f"block {block} of group {index} is read and was neither zeroed"
                    raise InvariantViolation("ZEROED", f"{detail} nor filled")

    def _step_states(self, passes: Sequence[Pass]) -> set[int]:
        """Read the states before the steps, and write those after them; return the rows whose state
        a failed load spoilt. Raises InvariantViolation (STATE-READ).
        """
        spoilt = set[int]()
        if not self._config.has_states:
            return spoilt
        writes: list[tuple[TierBlock, Content]] = []
        rows: dict[int, list[Pass]] = {}
        for each in passes:
            rows.setdefault(each.row, []).append(each)
        for row, mine in rows.items():
            brought = [each for each in mine if each.loaded > each.start]
            nodes, start, end = mine[-1].nodes, mine[0].start, mine[-1].end
            if start == end:
                continue
            count, num_drafts = mine[-1].num_in_state, mine[-1].num_drafts
            for index, group, table in self._layers(row):
                if not group.is_state:
                    continue
                last = (count - 1) // group.block_size
                place = block_at(table, last)
                wanted: Content = (nodes[start - 1], index) if start else ZEROS
                held = wanted
                if not brought:
                    held = self.get(place)[0]
                elif brought[-1].failed is not None:
                    held = SPOILT
                if held == SPOILT and (brought or self._late_reports):
                    spoilt.add(row)
                elif held != wanted and not (mine[0].ahead and held == RUBBISH):
                    wrong = WrongSlot(place, 0, held, wanted)
                    behind = f": request {mine[0].request_id!r} reads it"
                    self._complain("STATE-READ", wrong, behind)
                for at in range(num_drafts + 1):
                    is_lost = mine[-1].num_rejected or held == RUBBISH
                    after = RUBBISH if is_lost else (nodes[count - 1 + at], index)
                    writes.append((block_at(table, last + at), after))
        for place, after in writes:
            self.contents[place] = (after, *self._nothing[1:])
        return spoilt

    def _write(self, each: Pass) -> None:
        nodes, bad = each.nodes, each.loaded if each.failed is None else each.failed
        bad = max(each.start, min(bad, each.loaded))
        for index, group, table in self._layers(each.row):
            if group.is_state:
                continue
            if group.is_cross:
                if each.encodes:
                    self.put(table, index, 0, run_of(each.encoder, index))
                continue
            run = run_of(nodes[each.start : each.end], index)
            if bad < each.loaded:
                before, behind = run[: bad - each.start], run[each.loaded - each.start :]
                run = (*before, *(SPOILT,) * (each.loaded - bad), *behind)
            if each.num_slots > each.end:
                run += (RUBBISH,) * (each.num_slots - each.end)
            self.put(table, index, each.start, run)

    def _spread(self, passes: Sequence[Pass], spoilt: set[int]) -> None:
        """Spoil everything that is computed from spoilt slots, in the order of the calls, or from
        spoilt states. spoilt: the rows with these.
        """
        for each in passes:
            layers = [layer for layer in self._layers(each.row) if not layer[1].is_cross]
            seen = [layer for layer in layers if not layer[1].is_state]
            for query in range(each.loaded, each.end):
                if each.row in spoilt or any(
                    self._sees_spoilt(group, table, query) for _, group, table in seen
                ):
                    spoilt.add(each.row)
                    for index, _, table in seen:
                        self.put(table, index, query, (SPOILT,))
            for _, group, table in layers if each.row in spoilt else ():
                if group.is_state:
                    last = (each.num_in_state - 1) // group.block_size
                    for place in table[last : last + each.num_drafts + 1]:
                        self.contents[place] = (SPOILT, *self._nothing[1:])

    def _sees_spoilt(self, group: Group, table: Sequence[TierBlock], query: int) -> bool:
        size, first = group.block_size, skipped_tokens(group, query)
        for at in range(first // size, -(-query // size)):
            start = at * size
            if SPOILT in self.get(table[at])[max(0, first - start) : query - start]:
                return True
        return False

    def holds_spoilt(self, row: int, position: int) -> bool:
        """Return whether a position of a row was computed from a failed load."""
        return any(
            self.get(table[position // group.block_size])[position % group.block_size] == SPOILT
            for _, group, table in self._layers(row)
            if not (group.is_cross or group.is_state)
        )

    def _layers(self, row: int) -> Iterator[Layer]:
        for index, group in enumerate(self._config.groups):
            yield index, group, [("device", each) for each in self.tables.get((row, index), ())]

    def _follow(self, command: Command) -> None:
        """Apply a command to owners, keys, loads and tables."""
        match command:
            case Allocate(block):
                self._unfilled.add(block)
                self._own(block)
                self.forget(block)
            case Touch(block):
                self._own(block)
            case Free(block, cached):
                self.owned.discard(block)
                self.evicted.discard(block)
                if cached:
                    self.cached.add(block)
                else:
                    self.forget(block)
            case Evict(block) if self._config.has_tails:
                self.evicted.add(block)  # perhaps found under another key
            case Evict(block):
                self.cached.discard(block)
                if block not in self.owned:
                    self.forget(block)
            case EvictAll():
                for block in self.cached:
                    self.forget(block)
                self.cached.clear()
                self.evicted.clear()
            case Store(_, block, key):
                self.check_key(block, key)
            case Load(operation, key, block):
                self.loads[operation] = (key, block, self.epoch)
            case SetTable(_, _, _, block):
                set_entry(self.tables, command)
                if self._cancels and block >= self._num_null:  # possibly by a cancelled batch
                    self._own(block)
            case CutTable():
                set_entry(self.tables, command)

    def _own(self, block: int) -> None:
        self.owned.add(block)
        self.cached.discard(block)
        self.evicted.discard(block)


def set_entry(tables: Tables, command: SetTable | CutTable) -> None:
    """Apply a command to block tables."""
    place = (command.row, command.group_id)
    table = tables.get(place, ())
    if isinstance(command, CutTable):
        tables[place] = table[: command.length]
    else:
        at = command.position
        if table[at : at + 1] != (FORGOTTEN_REST,):
            tables[place] = (*table[:at], command.block, *table[at + 1 :])
