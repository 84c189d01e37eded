# SPDX-License-Identifier: Apache-2.0
"""A state with batches in flight: the batches that were taken and not executed, and the contents of
memory meanwhile.

A node is plain data. What a batch uses is derived from its commands and the tables when it was
taken, not from the core's own records. The name of a node contains all that can still make a
difference: commands and writes to come, contents of every block, and the worker's tables if these
differ from the state's.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import attrs

from kvcore.check.names.canonical import LOST, Name, Renaming
from kvcore.check.world.ghost import Ghost
from kvcore.oracle.content_oracle import FORGOTTEN, FORGOTTEN_REST, Tables, set_entry
from kvcore.oracle.contents import Content, Contents, TierBlock
from kvcore.oracle.schedule import Schedule, Write
from kvcore.state.state import RequestState, State
from kvcore.types.commands import (
    FIELDS,
    Command,
    CopyOnWrite,
    CutTable,
    Evict,
    EvictAll,
    Free,
    Load,
    SetTable,
    Store,
    SwapIn,
    SwapOut,
    Touch,
)
from kvcore.types.errors import InvariantViolation

OF_OWNERS = (Touch, Free, Evict, EvictAll)
"""Commands that change owners and findable blocks, but no memory."""
OF_TABLES = (SetTable, CutTable)
"""Commands that change the worker's tables."""
COPIES = (CopyOnWrite, SwapOut, SwapIn, Store, Load)
NUM_SPECIALS = 50
"""Exclusive bound of the numbers of contents that are not prefixes."""


Unreported = tuple[int, int, int]
"""An executed load that failed: its batch, the row of the request that loads (no other has it
before the batch completes), the first token missing."""


@attrs.frozen
class Output:
    """Tokens that a batch samples for a request and that the engine has yet to hand in.

    text: the request's tokens on the device up to the last new one; empty before the batch is
    executed. num_new: how many tokens it adds. num_rejected: how many drafts it rejected. spoilt:
    the pass read what a failed load left. stale: the request was cut or scheduled anew since, or
    that load was reported; the output must not be taken.
    """

    request_id: str
    batch: int
    text: tuple[int, ...] = ()
    num_new: int = 0
    num_rejected: int = 0
    spoilt: bool = False
    stale: bool = False


@attrs.frozen
class Pending:
    """A taken batch that is not finished.

    requests: those that it schedules, as they were when it was taken. used: the places that its
    copies and its forward pass read or write. before: the counts of its requests before it. texts:
    those of the node before it was executed. feeds: for those of its requests whose last batch was
    executed, what they feed from. epoch: that of the weights that it runs with.
    """

    number: int
    commands: tuple[Command, ...]
    writes: tuple[Write, ...]
    requests: Mapping[str, RequestState]
    used: frozenset[TierBlock]
    before: Mapping[str, int]
    executed: bool = False
    texts: Mapping[str, tuple[int, ...]] = attrs.field(factory=dict)
    feeds: Mapping[str, tuple[int, ...]] = attrs.field(factory=dict)
    epoch: int = 0


@attrs.frozen
class Node:
    """A state, the batches in flight, and what the executed ones left in memory.

    loads: contents that executed loads will bring. started: operations whose command was executed.
    loading, failed: the position at which the unfinished load of a request begins, and its first
    failed block. before, writes: what the open batch schedules, as in `Pending`. filled: whether
    moves have filled it. unreported: external loads that failed, which the engine has yet to
    report. outputs: those that it has yet to hand in, oldest first. texts: the tokens of requests
    on the device, with the last that it sampled, if a batch to come feeds from them.
    """

    state: State
    pending: tuple[Pending, ...] = ()
    contents: Contents = attrs.field(factory=dict)
    tables: Tables = attrs.field(factory=dict)
    loads: Mapping[int, tuple[bytes, int, int]] = attrs.field(factory=dict)
    loading: Mapping[str, int] = attrs.field(factory=dict)
    failed: Mapping[str, int] = attrs.field(factory=dict)
    started: frozenset[int] = frozenset()
    before: Mapping[str, int] = attrs.field(factory=dict)
    writes: tuple[Write, ...] = ()
    filled: bool = False
    unreported: tuple[Unreported, ...] = ()
    outputs: tuple[Output, ...] = ()
    texts: Mapping[str, tuple[int, ...]] = attrs.field(factory=dict)

    @property
    def waiting(self) -> tuple[Pending, ...]:
        """Return the batches that are not executed, oldest first."""
        return tuple(each for each in self.pending if not each.executed)

    def recall(self, ghost: Ghost) -> None:
        """Load the contents of memory in this node into a ghost."""
        ghost.contents, ghost.tables = dict(self.contents), dict(self.tables)
        ghost.loads, ghost.loading = dict(self.loads), dict(self.loading)


def taken(opened: State, schedule: Schedule) -> Pending:
    """Return the batch that is about to be taken."""
    before = schedule.scheduled()
    writes = tuple(schedule.take())
    commands = tuple(opened.batch.commands)
    used = set(copied(commands))
    for name in before:
        for table in opened.requests[name].tables:
            used.update(("device", block) for block in table if block >= opened.device.first_block)
    names = {write.request_id for write in writes}
    requests = {name: opened.requests[name] for name in sorted(names)}
    number = opened.batch.number
    epoch = opened.epoch
    return Pending(number, commands, writes, requests, frozenset(used), before, epoch=epoch)


def copied(commands: Iterable[Command]) -> Iterator[TierBlock]:
    """Yield the places that copying commands read or write."""
    for command in commands:
        if isinstance(command, COPIES):
            yield from (place for place in (command.reads(), command.writes()) if place)


def unused_wait(node: Node) -> Iterator[str]:
    """CMD-INFLIGHT: no block that a batch in flight reads or writes is free, and quarantine holds
    only such blocks.
    """
    used = {place for each in node.pending for place in each.used}
    opened = {*used, *copied(node.state.batch.commands)}
    for tier, pool in (("device", node.state.device), ("host", node.state.host)):
        if pool is None:
            continue
        for block in pool.queue:
            if (tier, block) in used:
                yield f"{tier} block {block} is free, and a batch in flight uses it"
        for block in pool.quarantine or ():
            if (tier, block) not in opened:
                yield f"{tier} block {block} waits, and no batch in flight uses it"


def check_fall(counts: Iterable[Mapping[str, int]], state: State) -> None:
    """Raise InvariantViolation (COMPUTED-RULE) if a cancel leaves a request with more than it
    counted before. counts: those of the requests before each cancelled batch.
    """
    for name, before in (pair for each in counts for pair in each.items()):
        request = state.requests.get(name)
        if request is not None and request.num_computed > before:
            detail = f"{name!r} counts {request.num_computed}, cancelled from {before} on"
            raise InvariantViolation("COMPUTED-RULE", detail)


def still_loading(known: Mapping[str, int], state: State) -> dict[str, int]:
    """Return the entries of `known` whose requests still wait for a load in a state."""
    loading = {name for name, request in state.requests.items() if request.num_loading}
    return {name: start for name, start in known.items() if name in loading}


def live(node: Node, wanted: Contents) -> Contents:
    """Return the contents that can still be read: those of wanted slots, of places that later
    batches use, and of loads that have not ended.
    """
    state = node.state
    to_come = {place for each in node.waiting for place in each.used}
    to_come.update(copied(state.batch.commands))
    for name in (*node.before, *(each.request_id for each in node.outputs)):
        tables = state.requests[name].tables if name in state.requests else ()
        to_come.update(("device", block) for table in tables for block in table)
    awaited = {each.block for each in state.operations.values() if each.request_id is not None}
    for name in node.loading.keys() & state.requests.keys():
        came = {block for table in state.requests[name].tables for block in table} - awaited
        to_come.update(("device", block) for block in came)
    kept: Contents = {}
    for place, slots in node.contents.items():
        if place in to_come:
            kept[place] = slots
        elif place in wanted:
            pairs = zip(slots, wanted[place], strict=True)
            kept[place] = tuple(None if content is None else held for held, content in pairs)
    return kept


def name_of(node: Node, names: Renaming, *, folds: bool = False) -> Name:
    """Return the part of a node's name that its state's name lacks.

    folds: name the tables that commands lead to, instead of the commands that change tables.
    """
    name: Name = [len(node.pending), len(node.waiting), node.filled]
    for batch in node.waiting:
        name += [len(batch.writes), *_commands(batch.commands, names, folds)]
        name += [batch.epoch] if node.state.epoch else []
        for write in batch.writes:
            name += _write(batch.requests[write.request_id], write, names)
    for batch in node.pending:
        name += sorted(_place(place, names) for place in batch.used)
        name.append(len(batch.before))
    name += _open_batch(node, names, folds)
    for tier, blocks in (("device", names.device), ("host", names.host)):
        for block in blocks.order():
            slots = node.contents.get((tier, block))  # type: ignore[arg-type] # a tier
            name += [0] if slots is None or not any(slots) else _slots(slots, names)
    if folds:
        name += _stages(node, names)
    elif node.waiting or len(node.state.batch.commands):
        name += _tables(node.tables, node.waiting, names)
    for request in names.order if node.loading or node.failed else ():
        for known in (node.loading, node.failed):
            name.append(1 + known.get(request.request_id, -1))
    name += [number in node.started for number in sorted(node.state.operations)]
    numbers = [batch.number for batch in node.pending]
    for number, row, first in node.unreported:
        place = names.places.get(node.state.rows[row] or "", LOST)
        name += [numbers.index(number), place, first]
    return name + _outputs(node, numbers, names)


def _outputs(node: Node, numbers: list[int], names: Renaming) -> Name:
    """Return the outputs that the engine has yet to hand in, and those that feed the device."""
    name: Name = []
    for output in node.outputs:
        place = numbers.index(output.batch) if output.batch in numbers else LOST
        name += [place, names.places.get(output.request_id, LOST), output.stale, output.spoilt]
        name += [output.num_new, output.num_rejected, *_text(output.text, names)]
    for request in names.order if node.texts else ():
        name += _text(node.texts.get(request.request_id, ()), names)
    for batch in node.pending:
        for request in names.order if batch.texts else ():
            name += _text(batch.texts.get(request.request_id, ()), names)
        for write in batch.writes if batch.feeds else ():
            name += _text(batch.feeds.get(write.request_id, ()), names)
    return name


def _text(text: tuple[int, ...], names: Renaming) -> Name:
    """Return the prefix that some tokens make."""
    letters = tuple((token,) for token in text)
    return [len(text), *names.tree.names(letters)[-names.tree.width :]]


def _open_batch(node: Node, names: Renaming, folds: bool) -> Name:
    """Return the content of the open batch. folds: only which requests' tables it changes."""
    state, batch = node.state, node.state.batch
    name = [len(node.writes), sum(map(bool, batch.scheduled)), len(batch.merges)]
    name += _commands(batch.commands, names, folds)
    if folds:
        rows = {each.row for each in batch.commands if isinstance(each, OF_TABLES)}
        name += [request.row in rows for request in names.order]
    for write in node.writes:
        name += _write(state.requests[write.request_id], write, names)
    for request in names.order if any(batch.scheduled) else ():
        record = batch.scheduled[request.row]
        name += [0, 0] if record is None else [1 + record.num_computed_before, record.num_kept]
        name += [1] if request.request_id in batch.delayed else []
        for item in () if record is None else record.unwritten:
            name += [item.group_id, item.position, *names.device.names([item.block])]
    for request_id in batch.ends:
        marked = request_id in batch.marked
        name += [1 + marked, names.places.get(request_id, LOST)]
    for merge in batch.merges:
        place = names.places.get(merge.request_id, LOST)
        name += [place, merge.group_id, merge.position, *names.device.names([merge.block])]
    for request_id, entry in sorted(batch.entries.items(), key=lambda item: item[1].order):
        place = names.places.get(request_id, LOST)
        name += [1 + place, entry.before, entry.restore, entry.publishes]
    return name


def _commands(commands: Iterable[Command], names: Renaming, folds: bool) -> Name:
    """Return the commands that change memory, or tables of requests. folds: memory alone."""
    changing = [each for each in commands if not (folds and isinstance(each, OF_TABLES))]
    counted = [_command(each, names) for each in changing if _counts(each, names)]
    return [len(counted), *(number for each in counted for number in each)]


def _counts(command: Command, names: Renaming) -> bool:
    """Return whether a command changes memory, or a table of a request or of a writing batch."""
    if isinstance(command, CutTable) and command.length == 0:
        return names.has_request(command.row)
    return not isinstance(command, OF_OWNERS)


def _command(command: Command, names: Renaming) -> Name:
    name = [command.kind]
    for field in FIELDS[command.kind]:
        value = getattr(command, field)
        if isinstance(value, bytes):
            name += names.key(value)
        elif field == "row":
            name.append(names.row(value))
        elif field == "host_block":
            name += names.host.names([value])
        elif field in ("block", "source", "target"):
            name += names.device.names([value])
        elif field != "operation":
            name.append(int(value))
    return name


def _write(request: RequestState, write: Write, names: Renaming) -> Name:
    letters = names.prefixes.letters(request)[: write.end]
    prefix = names.tree.names(letters)[-names.tree.width :]
    return [names.row(request.row), write.start, write.loaded, write.end, write.num_slots, *prefix]


def _place(place: TierBlock, names: Renaming) -> int:
    tier, block = place
    (number,) = (names.device if tier == "device" else names.host).names([block])
    return 2 * number + (tier == "host")


def _slots(slots: tuple[Content, ...], names: Renaming) -> Name:
    name = [len(slots)]
    for content in slots:
        if content is None:
            name.append(0)
        elif content[0] <= 0:
            name += [-content[0], content[1]]
        else:
            letters = names.prefixes.path(content[0])
            width = names.tree.width
            prefix = [NUM_SPECIALS + each for each in names.tree.names(letters)[-width:]]
            name += [*prefix, content[1]]
    return name


def _stages(node: Node, names: Renaming) -> Name:
    """Return the worker's tables now, after the commands of each batch that waits, and after those
    of the open one; nothing if all are those of the state.
    """
    waiting, tables = node.waiting, dict(node.tables)
    stages = [_tables(tables, waiting, names)]
    commands: list[Iterable[Command]] = [batch.commands for batch in waiting]
    for at, of_batch in enumerate([*commands, node.state.batch.commands]):
        for command in of_batch:
            if isinstance(command, OF_TABLES):
                set_entry(tables, command)
        stages.append(_tables(tables, waiting[at:], names))
    if not waiting and stages[0] == stages[1] == _tables(own_tables(node.state), (), names):
        return []
    return [each for stage in stages for each in stage]


def own_tables(state: State) -> Tables:
    """Return the tables of a state's requests, by their rows."""
    requests = state.requests.values()
    return {
        (each.row, at): tuple(table) for each in requests for at, table in enumerate(each.tables)
    }


def _tables(tables: Tables, batches: Sequence[Pending], names: Renaming) -> Name:
    """Return the worker's tables of requests and of the rows by which these batches write."""
    written = {b.requests[each.request_id].row for b in batches for each in b.writes}
    known = sorted(
        (names.row(row), group_id, _table(table, names))
        for (row, group_id), table in tables.items()
        if table and (row in written or names.has_request(row))
    )
    name = [len(known)]
    for row, group_id, table in known:
        name += [row, group_id, len(table), *table]
    return name


def _table(table: tuple[int, ...], names: Renaming) -> Name:
    forgotten = {FORGOTTEN: LOST, FORGOTTEN_REST: LOST + 1}
    return [
        forgotten[each] if each in forgotten else names.device.names([each])[0] for each in table
    ]
