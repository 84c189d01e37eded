# SPDX-License-Identifier: Apache-2.0
"""An engine around any manager: its knowledge of requests, and the true contents of memory.

The engine makes only legal calls and trusts the manager's answers. Memory changes as in a runtime:
by the copying commands of a batch, then by the forward pass, which writes the scheduled tokens at
the places in the block tables and reads everything that its queries see. Contents are numbers of
prefixes (`prefixes.py`). Nothing is forgotten when a block is freed, so an error here is an error
in real memory too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import attrs
from immutables import Map

from kvcore.check.extend.manager_protocol import batch, block_ids, make_call
from kvcore.check.stories.calls import name_of
from kvcore.check.stories.scenes import REQUEST_HEADS, Row, Scene, SceneNames
from kvcore.oracle.contents import Contents, Slots, SlotStore, TierBlock, WrongSlot, run_of
from kvcore.oracle.prefixes import Prefixes
from kvcore.trace.calls import Call
from kvcore.trace.text import write_tokens
from kvcore.types.config import Config
from kvcore.types.errors import InvariantViolation
from kvcore.types.extra_inputs import NO_EXTRA_KEYS, ExtraKeys
from kvcore.types.groups import skipped_tokens
from kvcore.types.values import Appended, Outcome, Refused

Tables = tuple[tuple[int, ...], ...]
VIEW_HEADS = ("block", "held by", "slots hold")


@attrs.frozen
class RequestView:
    """A request as the engine knows it: its tokens and its computed count."""

    request_id: str
    tokens: tuple[int, ...]
    num_computed: int = 0
    is_running: bool = False
    drafts: tuple[int, ...] = ()
    extra_keys: ExtraKeys = NO_EXTRA_KEYS


@attrs.frozen
class View:
    """The state of the engine and the memory.

    writes: the first and last position of each request that the open batch will write. rings: the
    groups whose blocks are read before they are written.
    """

    config: Config
    numbers: Prefixes = attrs.field(eq=False, repr=False)
    requests: Map[str, RequestView] = attrs.field(factory=Map)
    contents: Contents = attrs.field(factory=dict)
    writes: Map[str, tuple[int, int]] = attrs.field(factory=Map)
    tables: Map[str, Tables] = attrs.field(factory=Map)
    rings: frozenset[int] = frozenset()

    def key(self, *, with_contents: bool = True) -> bytes:
        """Return bytes that are equal for equal views."""
        known = sorted(attrs.astuple(each, recurse=False)[:4] for each in self.requests.values())
        contents = sorted(self.contents.items()) if with_contents else ()
        return repr((known, contents)).encode()

    def slots(self, block: int) -> Slots:
        """Return the contents of a device block's slots."""
        return self.contents.get(("device", block), ())

    @property
    def scene(self) -> Scene:
        """Return the view as a story shows it."""
        names = SceneNames(self.numbers)
        requests = tuple(self._request(each) for _, each in sorted(self.requests.items()))
        first = self.config.num_blocks - self.config.num_usable_blocks
        blocks: tuple[TierBlock, ...] = tuple(
            ("device", block) for block in range(first, self.config.num_blocks)
        )
        others = sorted(place for place in self.contents if place not in blocks)
        rows = tuple(self._block(place, names) for place in (*blocks, *others))
        return Scene(requests, rows, REQUEST_HEADS, VIEW_HEADS)

    def _request(self, request: RequestView) -> Row:
        tables = self.tables.get(request.request_id, ())
        blocks = " | ".join(" ".join(map(str, table)) or "-" for table in tables) or "-"
        tokens = write_tokens(request.tokens)
        return (name_of(request.request_id), tokens, str(request.num_computed), blocks)

    def _block(self, place: TierBlock, names: SceneNames) -> Row:
        held = [
            f"{name_of(name)}[{position}]"
            for name, tables in sorted(self.tables.items())
            for table in tables
            for position, block in enumerate(table)
            if place == ("device", block)
        ]
        slots = self.contents.get(place, ())
        mark = "h" if place[0] == "host" else ""
        contents = " | ".join(map(names.content, slots)) if any(slots) else "-"
        return (f"{mark}{place[1]}", " ".join(held) or "-", contents)


class WrongRead(InvariantViolation):
    """A query found wrong content; holds the view at the read."""

    def __init__(self, detail: str, view: View) -> None:
        self.view = view
        super().__init__("KV-READ", detail)


def made(manager: Any, view: View, call: Call) -> tuple[View, Outcome[View, Any]]:
    """Make a call of the engine; return its value, None if refused, and the view after it.

    Raises InvariantViolation (NOCRASH, MANAGER, KV-READ).
    """
    name, args = call.name, call.args
    if name == "take_batch":
        commands = batch(manager)
        after = execute(view_tables(manager, view), commands)
        if hasattr(manager, "end_step"):
            make_call(manager, Call("end_step"))
            after = view_tables(manager, after)
        return after, Outcome(after, commands, None)
    value = make_call(manager, call)
    if value is False or (refused(value) and name in ("allocate_slots", "append")):
        return view, Outcome(view, (), None)
    after = view_tables(manager, _after_call(view, name, args))
    return after, Outcome(after, (), value)


def refused(value: Any) -> bool:
    """Return whether a value is a manager's refusal."""
    if isinstance(value, Appended):
        return value.done == 0
    return value is None or value is False or isinstance(value, Refused)


def execute(view: View, commands: Sequence[Any]) -> View:
    """Run a batch: its copies in order, the writes of the forward pass, then its reads.

    Raises InvariantViolation (KV-READ).
    """
    sizes = [group.block_size for group in view.config.groups]
    store = SlotStore(sizes, dict(view.contents), num_null=int(view.config.null_block))
    for command in commands:
        store.copy(command)
    for name, (first, _) in view.writes.items():
        for index, table, _ in _layers(view, name):
            _check_length(view, name, index, table, first)
    after = attrs.evolve(view, contents=store.contents, writes=Map())
    _check_reads(after, view.writes, store, rings=True)
    for name, (first, last) in view.writes.items():
        for index, table, nodes in _layers(view, name):
            kept = view.config.groups[index].window if index in view.rings else None
            start = first if kept is None else max(first, last - kept)
            store.put(table, index, start, run_of(nodes[start:last], index))
    _check_reads(after, view.writes, store, rings=False)
    return after


def view_tables(manager: Any, view: View) -> View:
    """Return the view with the manager's current block tables."""
    tables: dict[str, Tables] = {}
    for name, request in view.requests.items():
        if request.is_running:
            tables[name] = block_ids(manager, name, view.config)
    return attrs.evolve(view, tables=Map(tables))


def _check_reads(
    view: View, writes: Map[str, tuple[int, int]], store: SlotStore, *, rings: bool
) -> None:
    """Raise InvariantViolation (KV-READ) if a query of a batch finds wrong content. rings: check
    the groups that are read before the batch writes; else those that are read after.
    """
    for name, (first, last) in writes.items():
        for index, table, nodes in _layers(view, name):
            if (index in view.rings) == rings:
                seen = skipped_tokens(view.config.groups[index], first)
                for wrong in store.wrong(table, index, nodes, seen, first if rings else last):
                    raise _wrong_read(view, name, wrong)


def _after_call(view: View, name: str, args: tuple[Any, ...]) -> View:
    """Return the view after a successful call."""
    requests, writes = view.requests, view.writes
    match name:
        case "add_request":
            tokens = tuple(args[0].tokens)
            requests = requests.set(args[0].request_id, RequestView(args[0].request_id, tokens))
        case "allocate_slots":
            request = requests[args[0]]
            last = len(request.tokens)
            writes = writes.set(args[0], (last - args[1], last))
            running = attrs.evolve(request, num_computed=last, is_running=True)
            requests = requests.set(args[0], running)
        case "append":
            (request_id,), (token,) = args
            request = requests[request_id]
            tokens, last = (*request.tokens, token), len(request.tokens) + 1
            writes = writes.set(request_id, (last - 1, last))
            longer = attrs.evolve(request, tokens=tokens, num_computed=last)
            requests = requests.set(request_id, longer)
        case "fork":
            child = attrs.evolve(requests[args[0]], request_id=args[1])
            requests = requests.set(args[1], child)
        case "free":
            idle = attrs.evolve(requests[args[0]], num_computed=0, is_running=False)
            requests = requests.set(args[0], idle)
            writes = writes.delete(args[0]) if args[0] in writes else writes
        case "remove_request":
            requests = requests.delete(args[0])
    return attrs.evolve(view, requests=requests, writes=writes)


def _layers(view: View, name: str) -> Iterator[tuple[int, list[TierBlock], Sequence[int]]]:
    """Yield each group with a request's table and the prefixes of its tokens."""
    nodes = view.numbers.nodes(view.requests[name])
    tables = view.tables.get(name, ())
    for index in range(len(view.config.groups)):
        table = tables[index] if index < len(tables) else ()
        yield index, [("device", block) for block in table], nodes


def _check_length(view: View, name: str, index: int, table: list[TierBlock], first: int) -> None:
    """Raise InvariantViolation (KV-READ) if a table lacks a block for a token from `first` on."""
    size, last = view.config.groups[index].block_size, view.writes[name][1]
    if len(table) * size < last:
        token = max(first, len(table) * size)
        detail = f"the table of {name_of(name)} has {len(table)} blocks, none for token {token}"
        raise WrongRead(detail, view)


def _wrong_read(view: View, name: str, wrong: WrongSlot) -> WrongRead:
    names = SceneNames(view.numbers)
    detail = f"{name_of(name)} reads block {wrong.place[1]} slot {wrong.slot}: it holds "
    return WrongRead(
        f"{detail}{names.content(wrong.held)}, not {names.content(wrong.wanted)}", view
    )
