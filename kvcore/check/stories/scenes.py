# SPDX-License-Identifier: Apache-2.0
"""A scene of a story: a state's requests, and each block with the true contents of its slots.

The ghost follows contents from the first step on, as a runtime would change them: by the commands
and the forward pass of a batch when it is executed, not when it is planned. A slot is shown as the
tokens of the prefix that it holds: `0-2` is "token 2 after 0 and 1". `?` is undefined content, `~`
rubbish (a rejected draft, a lookahead slot), `!` what a failed load left.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence

import attrs

from kvcore.check.names.in_flight import Pending, check_fall, still_loading, taken
from kvcore.check.stories.calls import name_of
from kvcore.check.world.ghost import Ghost, owners
from kvcore.check.world.model import CheckedCall
from kvcore.check.world.world import by_row
from kvcore.oracle.contents import RUBBISH, SPOILT, ZEROS, Content
from kvcore.oracle.prefixes import Prefixes
from kvcore.oracle.schedule import Failing, Schedule, failed
from kvcore.pool.block_pool import BlockPool
from kvcore.state.state import NO_HOST_BLOCK, RequestState, State
from kvcore.trace.calls import Misuse
from kvcore.trace.text import TraceNames, write_ids, write_tokens
from kvcore.types.commands import Tier
from kvcore.types.config import Config
from kvcore.types.errors import InvariantViolation

Row = tuple[str, ...]
REQUEST_HEADS: Row = ("request", "tokens", "computed", "blocks")
BLOCK_HEADS: Row = ("block", "held by", "key", "queue", "slots hold")
CONTENT = re.compile(r"\((-?\d+), (\d+)\)")
SCHEDULING = ("allocate_slots", "append")
SIGNS = {RUBBISH: "~", ZEROS: "zeros", SPOILT: "!"}


@attrs.frozen
class Scene:
    """The tables of one moment: the rows of each begin with a name."""

    requests: tuple[Row, ...] = ()
    blocks: tuple[Row, ...] = ()
    request_heads: Row = REQUEST_HEADS
    block_heads: Row = BLOCK_HEADS


@attrs.frozen
class Taken:
    """A batch that was taken, and the state that it was taken from."""

    state: State
    batch: Pending

    @property
    def number(self) -> int:
        """Return the number of the batch."""
        return self.batch.number


class Follower:
    """Follows contents along the steps of a run, and makes the scene after each.

    wrong: errors that the ghost found, newest last.
    """

    def __init__(self, config: Config) -> None:
        self._config = config
        self.ghost = Ghost(config)
        self._schedule = Schedule()
        self._taken: list[Taken] = []
        self._unfinished: list[Taken] = []
        self.wrong: list[InvariantViolation] = []

    def follow(self, step: CheckedCall, following: CheckedCall | None) -> None:
        """Follow a step. following: the next one, which reveals whether a load failed."""
        call, value = step.call, step.outcome.value
        if isinstance(value, Misuse):
            return
        if call.name == "execute":
            self._execute(call.args[0], None)
            return
        if call.name in ("complete", "cancel"):
            self._finish(call.name, call.args[0])
        self._hear(self._schedule.follow, step.before, call.name, call.args, call.options, value)
        if call.name == "cancel":
            gone = [each.batch.before for each in self._unfinished if each.number >= call.args[0]]
            after, schedule = step.outcome.state, self._schedule
            self._hear(check_fall, [*gone, schedule.scheduled()], after)
            schedule.assume(after)
            schedule.loading = still_loading(schedule.loading, after)
        self._hear(self.ghost.prefixes.learn, step.outcome.state)
        if call.name != "take_batch":
            self._hear(self._schedule.check, step.outcome.state)
        if call.name in SCHEDULING:
            self._hear(self._schedule.check_caps, step.outcome.state)
        self.ghost.loading = self._schedule.loading
        numbers = {each.number for each in step.outcome.state.in_flight}
        self._unfinished = [each for each in self._unfinished if each.number in numbers]
        self._hear(self._check_in_flight, step.outcome.state)
        if call.name == "complete_operation":
            self.ghost.complete(*call.args)
        if call.name == "take_batch":
            self._taken.append(Taken(step.before, taken(step.before, self._schedule)))
            self._unfinished.append(self._taken[-1])
            if not self._config.max_in_flight:
                self._execute(self._taken[-1].number, _failing(following))

    def finish(self, state: State) -> None:
        """Execute the batch that the run left open: it is not taken, but its effect shows."""
        self._finish("complete", state.batch.number)
        commands = state.batch.commands
        if len(commands) or any(state.batch.scheduled):
            self._hear(self.ghost.prefixes.learn, state)
            self._taken.append(Taken(state, taken(state, self._schedule)))
            self._execute(state.batch.number, None)
        if self._config.max_in_flight:
            self._hear(self._check_contents, state)

    def scene(self, state: State) -> Scene:
        """Return the scene of the current state."""
        names = SceneNames(self.ghost.prefixes)
        names.learn(state)
        return scene_of(state, self.ghost, names)

    def _check_in_flight(self, state: State) -> None:
        """Raise InvariantViolation (CMD-INFLIGHT) if a block used by a batch in flight is free."""
        used = {place for each in self._unfinished for place in each.batch.used}
        for tier, pool in (("device", state.device), ("host", state.host)):
            for block in () if pool is None else pool.queue:
                if (tier, block) in used:
                    detail = f"{tier} block {block} is free, and a batch in flight uses it"
                    raise InvariantViolation("CMD-INFLIGHT", detail)

    def _check_contents(self, state: State) -> None:
        """Check the contents that a state counts on after everything is executed. Owners are not
        checked, since a cancel drops the commands that changed them.
        """
        self.ghost.owned, self.ghost.cached = owners(state)
        self.ghost.check(state, self._schedule.encoders)

    def _finish(self, name: str, number: int) -> None:
        for batch in [each.number for each in self._taken]:
            if name == "complete" and batch <= number:
                self._execute(batch, None)
        if name == "cancel":
            self._taken = [each for each in self._taken if each.number < number]

    def _execute(self, number: int, failing: tuple[str, int] | None) -> None:
        for batch in [each for each in self._taken if each.number <= number]:
            self._taken.remove(batch)
            writes = [failed(write, failing) for write in batch.batch.writes]
            self._hear(self.ghost.apply, batch.batch.commands)
            requests = batch.batch.requests
            self._hear(self.ghost.compute, requests, writes, self._schedule.encoders)
            if failing is None and not self._config.max_in_flight:
                self._hear(self.ghost.check, batch.state, self._schedule.encoders)

    def _hear(self, made: object, *args: object) -> None:
        """Make a call that may find an error, after which the story goes on."""
        try:
            made(*args)  # type: ignore[operator] # one of the ghost's methods
        except InvariantViolation as error:
            self.wrong.append(error)
        except (KeyError, IndexError, AttributeError):
            pass  # the state is too broken to be followed: the story shows it as it is


class SceneNames(TraceNames):
    """The prefixes of keys and of contents, in tokens."""

    def __init__(self, prefixes: Prefixes) -> None:
        super().__init__()
        self._tokens = prefixes.tokens_of_nodes()
        self._prefixes_of = prefixes

    def key(self, key: bytes) -> str:
        """Return the prefix of a key, for any request that it was seen with."""
        try:
            return super().key(key)
        except KeyError:
            return self._known(key)

    def _known(self, key: bytes) -> str:
        try:
            group_id = int.from_bytes(key[-4:], "big")
            tokens = write_tokens(self._prefixes_of.tokens(key))
        except KeyError:
            return f"(hash {key.hex()[:8]})"
        return f"({tokens})" + (f"@{group_id}" if group_id else "")

    def content(self, content: Content) -> str:
        """Return the content of a slot, in the scene's names."""
        if content is None:
            return "?"
        if content in SIGNS:
            return SIGNS[content]
        node, group_id = content
        tokens = self._tokens.get(node)
        said = write_tokens(tokens) if tokens is not None else ("encoder" if node < 0 else "?")
        return said + (f"@{group_id}" if group_id else "")

    def detail(self, text: str) -> str:
        """Return the detail of a broken property, with contents in tokens."""
        text = text.replace("holds None", "holds nothing that is defined")
        return CONTENT.sub(lambda found: self.content((int(found[1]), int(found[2]))), text)


def scene_of(state: State, ghost: Ghost, names: SceneNames) -> Scene:
    """Return the tables of a state with the contents that a ghost followed."""
    requests = by_row(state)
    blocks = list(_pool("device", state.device, requests, ghost, names))
    if state.host is not None:
        blocks += _pool("host", state.host, requests, ghost, names)
    return Scene(tuple(map(_request, requests)), tuple(blocks))


def _request(request: RequestState) -> Row:
    tokens = write_tokens(list(request.tokens))
    if len(request.drafts):
        tokens += f" drafts {write_tokens(list(request.drafts))}"
    tables = request.host_tables or request.tables
    blocks = " | ".join(write_ids(table) if len(table) else "-" for table in tables)
    said = f"host {blocks}" if request.host_tables else blocks
    return (name_of(request.request_id), tokens, str(request.num_computed), said)


def _pool(
    tier: Tier, pool: BlockPool, requests: Sequence[RequestState], ghost: Ghost, names: SceneNames
) -> Iterator[Row]:
    places = {block: f"free {place}" for place, block in enumerate(pool.queue, 1)}
    if pool.quarantine is not None:
        for block in pool.quarantine:
            batches = ",".join(map(str, sorted(pool.quarantine.busy.get(block, ()))))
            places[block] = f"waits for {batches}"
    mark = "h" if tier == "host" else ""
    for block in range(pool.num_blocks):
        key = pool.keys[block]
        if block < pool.first_block and not (key or pool.ref_counts[block] or block in places):
            continue
        held = " ".join(_holders(tier, block, requests, pool)) or "-"
        slots: Sequence[Content] = ghost.contents.get((tier, block), [])
        contents = " | ".join(map(names.content, slots)) if any(slots) else "-"
        said = "-" if key is None else names.key(key)
        yield (f"{mark}{block}", held, said, places.get(block, "-"), contents)


def _holders(
    tier: Tier, block: int, requests: Iterable[RequestState], pool: BlockPool
) -> Iterator[str]:
    """Yield the holders of a block: request[position], then the group, or a pin."""
    for request in requests:
        for group_id, table in enumerate(request.host_tables if tier == "host" else request.tables):
            for position, each in enumerate(table):
                if each == block and each != NO_HOST_BLOCK:
                    behind = f"@{group_id}" if group_id else ""
                    yield f"{name_of(request.request_id)}[{position}]{behind}"
    if block in pool.pins:
        yield "pinned" if pool.pins[block] == 1 else f"{pool.pins[block]} pins"


def _failing(following: CheckedCall | None) -> Failing:
    """Return the load that failed, if the engine takes it back next."""
    if following is None or following.call.name != "rewind":
        return None
    names, count = following.call.args
    return (names[0], count)
