# SPDX-License-Identifier: Apache-2.0
"""The state machine that drives a run through every transition, in any order.

Hypothesis picks rules evenly, so what matters most has rules of its own, some twice, and the rest
shares `upkeep`.
"""

from __future__ import annotations

from typing import ClassVar

from hypothesis import note
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from kvcore import Hit, Request
from kvcore.types.values import Status
from tests.helpers.lockstep import Lockstep, story
from tests.helpers.worlds import (
    NAMES,
    allocations,
    by_status,
    configs,
    inside_blocks,
    own_hashes,
    rarely,
    requests,
    seldom,
    tokens,
)

DATA = st.data()
UPKEEP = (
    *(
        "pin",
        "unpin",
        "pin prefix",
        "unpin prefix",
        "evict",
        "reset",
        "epoch",
        "drain",
        "cache",
        "cache",
        "extend",
        "extend",
        "remove",
    ),
    *("trim", "trim", "hashes", "rewind"),
)


def any_known(machine: Machine) -> bool:
    """Tell whether there is any request."""
    return bool(machine.run.state.requests)


def any_name_left(machine: Machine) -> bool:
    """Tell whether another request can be added."""
    return any(name not in machine.run.state.requests for name in machine.names)


def any_running(machine: Machine) -> bool:
    """Tell whether any request holds device blocks."""
    return bool(by_status(machine.run.state, Status.RUNNING))


class Machine(RuleBasedStateMachine):
    """Calls on a `Lockstep`, which checks each of them."""

    least: ClassVar[int] = 3
    most: ClassVar[int] = 8
    longest: ClassVar[int] = 7
    twin: ClassVar[bool] = True
    inside: ClassVar[bool] = False
    """Whether hits may end inside blocks."""
    names: ClassVar[tuple[str, ...]] = NAMES

    run: Lockstep
    hits: list[Hit]

    @initialize(data=DATA)
    def start(self, data: st.DataObject) -> None:
        drawn = configs(least=self.least, most=self.most)
        config = data.draw(inside_blocks(drawn) if self.inside else drawn)
        self.run = Lockstep(config, twin=self.twin)
        self.hits = []

    def teardown(self) -> None:
        if hasattr(self, "run"):
            note(story(self.run))
            self.run.catch_up()

    def known(self) -> list[str]:
        return sorted(self.run.state.requests)

    def new_name(self, data: st.DataObject) -> str:
        fresh = [name for name in self.names if name not in self.run.state.requests]
        repeat = not fresh or data.draw(seldom())
        return data.draw(st.sampled_from(self.names if repeat else fresh))

    def some(self, data: st.DataObject, *statuses: Status) -> list[str]:
        names = by_status(self.run.state, *statuses)
        return data.draw(st.lists(st.sampled_from(names), min_size=1, max_size=3, unique=True))

    def serve(self, data: st.DataObject) -> None:
        """Add a request and schedule all of it, as an engine does."""
        name = self.new_name(data)
        self.run.call("add_request", data.draw(self.request(name)))
        hit = self.run.hit(name)
        left = len(self.run.state.requests[name].tokens) - hit.num_tokens
        self.run.call("allocate_slots", name, left, hit)

    def request(self, name: str) -> st.SearchStrategy[Request]:
        return requests(self.run.state, name, most=self.longest)

    @rule(data=DATA)
    @precondition(any_name_left)
    def add_request(self, data: st.DataObject) -> None:
        self.run.call("add_request", data.draw(self.request(self.new_name(data))))

    def allocate(self, data: st.DataObject) -> None:
        request_id, count, hit, options = data.draw(allocations(self.run, self.hits))
        self.run.call("allocate_slots", request_id, count, hit, **options)

    def append(self, data: st.DataObject) -> None:
        names = self.some(data, Status.RUNNING)
        if not data.draw(seldom()):
            names = [each for each in names if not self.run.state.requests[each].drafts]
        values = data.draw(st.lists(st.integers(0, 1), min_size=len(names), max_size=len(names)))
        self.run.call("append", names, values)

    allocate_any = rule(data=DATA)(precondition(any_known)(allocate))
    allocate_more = rule(data=DATA)(precondition(any_known)(allocate))
    serve_some = rule(data=DATA)(precondition(any_name_left)(serve))
    serve_more = rule(data=DATA)(precondition(any_name_left)(serve))
    append_some = rule(data=DATA)(precondition(any_running)(append))
    append_more = rule(data=DATA)(precondition(any_running)(append))

    @rule(data=DATA)
    @precondition(any_running)
    def free(self, data: st.DataObject) -> None:
        """Free a request, and forget it or not."""
        request_id = data.draw(st.sampled_from(self.known()))
        self.run.call("free", request_id)
        if data.draw(st.booleans()):
            self.run.call("remove_request", request_id)

    @rule(data=DATA)
    @precondition(lambda self: any_running(self) and any_name_left(self))
    def fork(self, data: st.DataObject) -> None:
        parent = data.draw(st.sampled_from(by_status(self.run.state, Status.RUNNING)))
        self.run.call("fork", parent, self.new_name(data))

    @rule(data=DATA)
    @precondition(any_running)
    def truncate(self, data: st.DataObject) -> None:
        request_id = data.draw(st.sampled_from(by_status(self.run.state, Status.RUNNING)))
        most = len(self.run.state.requests[request_id].tokens)
        self.run.call("truncate", request_id, data.draw(st.integers(0, most)))

    @rule(data=DATA)
    @precondition(lambda self: any_running(self) and self.run.state.host is not None)
    def swap_out(self, data: st.DataObject) -> None:
        self.run.call("swap_out", self.some(data, Status.RUNNING))

    @rule(data=DATA)
    @precondition(lambda self: bool(by_status(self.run.state, Status.SWAPPED)))
    def swap_in(self, data: st.DataObject) -> None:
        self.run.call("swap_in", self.some(data, Status.SWAPPED))

    @rule(data=DATA)
    @precondition(any_running)
    def guess(self, data: st.DataObject) -> None:
        """Give a request drafts and schedule all of it, as an engine does."""
        name = data.draw(st.sampled_from(by_status(self.run.state, Status.RUNNING)))
        drafts = data.draw(st.lists(st.integers(0, 1), max_size=3))
        self.run.call("add_drafts", name, drafts)
        request = self.run.state.requests[name]
        left = len(request.tokens) + len(request.drafts) - request.num_computed
        if left > 0 and not data.draw(rarely()):
            self.run.call("allocate_slots", name, left)

    @rule(data=DATA)
    @precondition(lambda self: bool(self.guessing()))
    def accept(self, data: st.DataObject) -> None:
        """Judge the scheduled drafts of a request, which the forward pass has seen."""
        name = data.draw(st.sampled_from(self.guessing()))
        request = self.run.state.requests[name]
        if self.run.state.batch.scheduled[request.row] is not None and not data.draw(rarely()):
            self.run.call("take_batch")
        scheduled = request.num_computed - len(request.tokens)
        self.run.call("accept", name, data.draw(st.integers(0, scheduled)))

    def guessing(self) -> list[str]:
        """Return the requests with scheduled drafts."""
        known = self.run.state.requests.values()
        return sorted(r.request_id for r in known if r.num_computed > len(r.tokens))

    @rule(data=DATA)
    @precondition(any_known)
    def load(self, data: st.DataObject) -> None:
        """Load the next whole blocks of a request after its hit, or store blocks with keys."""
        state = self.run.state
        if data.draw(rarely()):
            keyed = [block for block, key in enumerate(state.device.keys) if key is not None]
            some = st.lists(st.sampled_from(keyed or [1]), min_size=1, max_size=3)
            self.run.call("store", data.draw(some))
            return
        waiting = by_status(state, Status.WAITING) or self.known()
        name = data.draw(st.sampled_from(waiting))
        hit, step = self.run.hit(name), state.config.block_alignment
        most = (len(state.requests[name].tokens) - 1 - hit.num_tokens) // step
        if most > 0 or data.draw(seldom()):
            count = step * data.draw(st.integers(1, max(1, most)))
            self.run.call("load", name, count, *([hit] if hit.num_tokens else []))

    @rule(data=DATA)
    @precondition(lambda self: bool(self.run.state.operations))
    def complete(self, data: st.DataObject) -> None:
        """Finish an operation, done more often than not, mostly of a batch that was taken."""
        number = data.draw(st.sampled_from(sorted(self.run.state.operations)))
        opened = self.run.state.operations[number].batch == self.run.state.batch.number
        if opened and not data.draw(seldom()):
            self.run.call("take_batch")
        self.run.call("complete_operation", number, not data.draw(rarely()))

    @rule(data=DATA)
    @precondition(lambda self: any_running(self) or bool(self.run.state.batch.commands))
    def take_batch(self, data: st.DataObject) -> None:
        """Take the batch; if too many are in flight, mostly finish one first."""
        in_flight = self.run.state.in_flight
        full = len(in_flight) == self.run.state.config.max_in_flight > 0
        if full and not data.draw(seldom()):
            self.run.call("complete", in_flight[0].number)
        self.run.call("take_batch")

    @rule(data=DATA)
    @precondition(lambda self: bool(self.run.state.in_flight))
    def finish_batch(self, data: st.DataObject) -> None:
        """Complete the oldest batch, or cancel any, or let the device run all."""
        numbers = [batch.number for batch in self.run.state.in_flight]
        match data.draw(st.sampled_from(["complete", "complete", "cancel", "catch up", "any"])):
            case "complete":
                self.run.call("complete", numbers[0])
            case "cancel":
                self.run.call("cancel", data.draw(st.sampled_from(numbers)))
            case "catch up":
                self.run.catch_up()
            case _:
                number = data.draw(st.integers(0, numbers[-1] + 1))
                self.run.call(data.draw(st.sampled_from(["complete", "cancel"])), number)

    @rule(data=DATA)
    @precondition(lambda self: bool(self.run.schedule.loads()))
    def fail_load(self, data: st.DataObject) -> None:
        """Take the batch; the first of its loads fails somewhere."""
        write = self.run.schedule.loads()[0]
        first = data.draw(st.integers(write.start, write.loaded - 1))
        self.run.take_and_fail((write.request_id, first))

    @rule(data=DATA, kind=st.sampled_from(UPKEEP))
    @precondition(any_known)
    def upkeep(self, data: st.DataObject, kind: str) -> None:
        state = self.run.state
        name = data.draw(st.sampled_from(self.known()))
        blocks = st.lists(st.integers(0, state.config.num_blocks - 1), min_size=1, max_size=2)
        pinned = sorted(state.device.pins) or [1]
        match kind:
            case "pin":
                self.run.call("pin", data.draw(blocks))
            case "unpin":
                self.run.call("unpin", [data.draw(st.sampled_from(pinned))])
            case "pin prefix":
                most = state.requests[name].num_computed
                pin = data.draw(st.sampled_from("pq"))
                self.run.call("pin_prefix", pin, name, data.draw(st.integers(0, most + 1)))
            case "unpin prefix":
                self.run.call("unpin_prefix", data.draw(st.sampled_from("pq")))
            case "evict":
                self.run.call("evict_blocks", data.draw(blocks))
            case "reset":
                self.run.call("reset_prefix_cache")
            case "epoch":
                self.run.call("advance_epoch")
            case "drain":
                for name in ("take_events", "take_stats", "take_new_block_ids"):
                    self.run.call(name)
            case "cache":
                most = state.requests[name].num_computed
                self.run.call("cache_blocks", name, data.draw(st.integers(0, most + 1)))
            case "extend":
                self.run.call("add_tokens", name, data.draw(tokens(state.config, most=3)))
            case "trim":
                most = state.requests[name].num_computed
                self.run.call("remove_skipped_blocks", name, data.draw(st.integers(0, most + 1)))
            case "hashes":
                request = state.requests[name]
                hashes = own_hashes(state.config, list(request.tokens))
                hashes = hashes[len(request.block_hashes) :]
                self.run.call("add_block_hashes", name, hashes[: data.draw(st.integers(0, 3))])
            case "rewind":
                names = self.some(data, *Status)
                most = min(state.requests[each].num_computed for each in names)
                self.run.call("rewind", names, data.draw(st.integers(0, most)))
            case "remove":
                self.run.call("remove_request", name)

    def anything(self, data: st.DataObject) -> None:
        """Make one call of any rule that applies, outside Hypothesis's own choice of rules."""
        ways = [self.add_request, self.serve] if any_name_left(self) else []
        if any_known(self):
            ways += [self.allocate, self.upkeep_any, self.load]
        if any_running(self):
            ways += [self.append, self.append, self.free, self.truncate, self.take_any]
            ways += [self.fork] if any_name_left(self) else []
            ways += [self.guess]
            ways += [self.swap_out] if self.run.state.host is not None else []
        if by_status(self.run.state, Status.SWAPPED):
            ways.append(self.swap_in)
        if self.guessing():
            ways += [self.accept, self.accept]
        if self.run.state.operations:
            ways += [self.complete, self.complete]
        if self.run.state.in_flight:
            ways.append(self.finish_batch)
        data.draw(st.sampled_from(ways))(data)

    def upkeep_any(self, data: st.DataObject) -> None:
        self.upkeep(data, data.draw(st.sampled_from(UPKEEP)))

    def take_any(self, data: st.DataObject) -> None:
        self.take_batch(data)
