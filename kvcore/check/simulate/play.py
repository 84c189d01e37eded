# SPDX-License-Identifier: Apache-2.0
"""One run: managers that take the same calls, a device behind them, and the checks on both.

A run is a list of moves of an engine, which name their subject relative to the run ("the next
tokens of r5", "the oldest batch") and become calls of the core when they are made, so that a run
with moves left out is a run too. Every call is made on every manager and must return the same;
batches, which contain the commands, are compared whole, states by their canonical bytes every few
batches. The device runs batches in order and late; cancelled ones it runs or drops. Only this file
knows what is scheduled.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import attrs

from kvcore.check.names.in_flight import copied
from kvcore.check.simulate.prefixes import Prefixes, SimulatedRequest
from kvcore.check.simulate.watched import Watch
from kvcore.manager import KVCacheManager
from kvcore.oracle.content_oracle import ContentOracle, Pass, Tables, set_entry
from kvcore.oracle.device import Device, DeviceSize
from kvcore.trace.calls import Call, Misuse, perform_on
from kvcore.types.commands import Allocate, Batch, CutTable, SetTable, SwapOut
from kvcore.types.config import Config
from kvcore.types.errors import InvariantViolation
from kvcore.types.values import Reason, Refused, Request, Status

MakeManager = Callable[[Config], KVCacheManager]
ADMITTING = ("allocate_slots", "load", "swap_in")


@attrs.frozen
class Move:
    """One thing that an engine or its device does."""

    verb: str
    args: tuple[Any, ...] = ()

    def __str__(self) -> str:
        return f"{self.verb}({', '.join(map(repr, self.args))})"


@attrs.define
class Issued:
    """A taken batch. uses: its blocks of each tier. ran: whether the device executed it."""

    number: int
    batch: Batch
    passes: list[Pass]
    uses: dict[str, set[int]]
    ran: bool = False


@attrs.define
class Transfer:
    """An unfinished store or load of the external store. waits: the request that waits for it."""

    batch: int
    loads: bool
    waits: str | None


@attrs.frozen
class Pinned:
    """A prefix that a pin keeps: the first tokens of a request. epoch: of the weights."""

    request: Request
    num_tokens: int
    epoch: int


class Play:
    """The managers, the device and the engine's knowledge of one run.

    managers: by name; the first one answers questions. devices: further devices besides the memory.
    """

    def __init__(
        self,
        config: Config,
        managers: Sequence[tuple[str, MakeManager]],
        devices: Sequence[Callable[[DeviceSize], Device]] = (),
        num_rows: int = 0,
        num_tokens: int = 0,
    ) -> None:
        self.config = config
        self.managers = [(name, make(config)) for name, make in managers]
        self._watch = Watch(config, self.managers)
        self.prefixes = Prefixes(config)
        self.memory = ContentOracle(config, self.prefixes.block)
        plan = DeviceSize(config, num_rows, num_tokens, self.prefixes.block)
        self.devices: list[Device] = [self.memory, *(make(plan) for make in devices)]
        self.most_in_flight = config.max_in_flight
        self.known: dict[str, SimulatedRequest] = {}
        self.passes: list[Pass] = []
        self.waiting: list[Issued] = []
        self.unfinished: list[Issued] = []
        self.transfers: dict[int, Transfer] = {}
        self.load_starts: dict[str, int] = {}
        self.pins: list[int] = []
        self.keys: set[tuple[bytes, int]] = set()
        self.tables: Tables = {}
        self.calls: list[Call] = []
        self.goals: Counter[str] = Counter()
        self.number = 0
        self.epoch = config.epoch
        self.now_ms = 0
        self.pinned: dict[str, Pinned | None] = {}
        self.forgot = False

    @property
    def manager(self) -> KVCacheManager:
        """Return the manager that answers questions."""
        return self.managers[0][1]

    def call(self, name: str, *args: Any, **options: Any) -> Any:
        """Make a call on every manager; return its value, or a `Misuse`. Raises InvariantViolation
        (NOCRASH, PARITY).
        """
        call = Call(name, args, options)
        self.calls.append(call)
        num_free, before = self.manager.num_free_blocks, self._watch.state()
        values = [self._make(label, manager, call) for label, manager in self.managers]
        for (label, _), value in zip(self.managers[1:], values[1:], strict=True):
            if value != values[0]:
                first = self.managers[0][0]
                detail = f"{call} gives {value!r} in {label}, {values[0]!r} in {first}"
                raise InvariantViolation("PARITY", detail)
        value = values[0]
        self._watch.check(before, call, value)
        if isinstance(value, Misuse):
            self.goals[value.error] += 1
        elif isinstance(value, Refused):
            self.goals[f"refused {value.reason.value}"] += 1
            self._check_refusal(call, value)
        else:
            self.goals[name] += 1
            few = self.manager.num_free_blocks < min(num_free, self.config.watermark_blocks)
            if name == "swap_in" and few:
                raise InvariantViolation("ADMIT-EXACT", f"{call} leaves less than the watermark")
        return value

    def careful(self, name: str, *args: Any, **options: Any) -> Any:
        """Make a call that may be misuse, which must leave the state unchanged (ATOMIC-FAIL)."""
        before = self.manager.encode()
        value = self.call(name, *args, **options)
        if isinstance(value, Misuse) and self.manager.encode() != before:
            raise InvariantViolation("ATOMIC-FAIL", f"{self.calls[-1]} raises {value}")
        return value

    def _check_refusal(self, call: Call, refused: Refused) -> None:
        """Check that a refused call needs more than there is, and that a free pool admits."""
        if refused.needed <= refused.available:
            raise InvariantViolation("ADMIT-EXACT", f"{call} gives {refused}")
        pool_is_free = self.manager.num_free_blocks == self.config.num_usable_blocks
        if refused.reason is Reason.LATER and pool_is_free and call.name in ADMITTING:
            detail = f"{call} gives {refused}, all blocks are free"
            raise InvariantViolation("DEADLOCK-FREE", detail)

    def _make(self, label: str, manager: KVCacheManager, call: Call) -> Any:
        try:
            value = perform_on(manager, call)
        except (InvariantViolation, KeyboardInterrupt):
            raise
        except BaseException as error:  # a panic of the twin is no Exception
            detail = f"{call} raises {type(error).__name__} in {label}: {error}"
            raise InvariantViolation("NOCRASH", detail) from error
        return tuple(value) if call.name == "take_events" else value

    def status(self, name: str) -> Status | None:
        """Return where a request's blocks are; None for an unknown request."""
        return self.manager.status(name) if name in self.known else None

    def left(self, name: str) -> int:
        """Count the tokens and drafts of a request that are not scheduled."""
        known = self.known[name]
        return len(known.tokens) + len(known.drafts) - self.manager.num_computed_tokens(name)

    def loading(self, name: str) -> bool:
        """Return whether a request waits for a load."""
        return any(each.waits == name for each in self.transfers.values())

    def schedule(
        self, known: SimulatedRequest, start: int, loaded: int, end: int, num_slots: int
    ) -> None:
        """Note what the open batch's forward pass does for a request."""
        self.passes.append(self.pass_of(known, start, loaded, end, num_slots))

    def pass_of(
        self, known: SimulatedRequest, start: int, loaded: int, end: int, num_slots: int
    ) -> Pass:
        """Return a forward pass for a request."""
        nodes = known.contents
        more = known.drafts or [token for token, _ in known.future]
        if more:
            more = self.prefixes.numbers(known, more)
            nodes = nodes + self.prefixes.in_epoch(more, known.epoch)
        return Pass(
            request_id=known.name,
            row=known.row,
            start=start,
            loaded=loaded,
            end=end,
            num_slots=num_slots,
            nodes=nodes,
            encoder=known.encoder,
            encodes=not start,
            num_drafts=max(0, end - len(known.nodes)) if known.drafts else 0,
        )

    def leave(self, names: Sequence[str]) -> None:
        """Forget what the open batch schedules for requests, and whose loads they wait for."""
        self.passes = [each for each in self.passes if each.request_id not in names]
        for name in names:
            if name in self.known:
                self.known[name].drop_output()
            self.load_starts.pop(name, None)
            for each in self.transfers.values():
                each.waits = None if each.waits == name else each.waits
            self.settle(name)

    def settle(self, name: str) -> None:
        """Forget the drafts that the manager dropped."""
        known = self.known.get(name)
        if known is not None and known.drafts and not self.manager.num_draft_tokens(name):
            known.drafts = []

    def issue(self, batch: Batch) -> None:
        """Hand a taken batch to the device. Raises InvariantViolation (CMD-INFLIGHT)."""
        passes, self.passes = self.passes, []
        for each in passes:
            known = self.known[each.request_id]
            known.sampler = batch.number if each.end > each.loaded else None
            for guess in known.guesses:
                guess.batch = batch.number if guess.batch is None else guess.batch
        for command in batch:
            if isinstance(command, SetTable | CutTable):
                set_entry(self.tables, command)
        taken = Issued(batch.number, batch, passes, self._uses(batch, passes))
        self.number = batch.number + 1
        self._check_in_flight(batch)
        self.waiting.append(taken)
        if self.most_in_flight:
            self.unfinished.append(taken)

    def run(self, issued: Issued) -> None:
        """Let the devices execute a batch."""
        self.memory.epoch = issued.batch.epoch
        for device in self.devices:
            try:
                device.apply(issued.batch)
                device.forward(issued.passes)
            except InvariantViolation:
                raise
            except Exception as error:
                raise InvariantViolation(type(error).__name__, str(error)) from error
        issued.ran = True

    def forget(self, first: int) -> None:
        """Drop the batches from a number on, and the open one."""
        self.forgot = True
        self.waiting = [each for each in self.waiting if each.number < first]
        self.unfinished = [each for each in self.unfinished if each.number < first]
        self.passes = []
        for each in self.transfers.values():
            if each.batch >= first and each.waits is not None:
                self.load_starts.pop(each.waits, None)
                each.waits = None
        self.number += 1
        for name, known in self.known.items():
            self.settle(name)
            known.guesses = [g for g in known.guesses if g.batch is not None and g.batch < first]
            left = self.manager.num_computed_tokens(name) - len(known.tokens)
            known.guesses = known.guesses if left > 0 else []
            known.future = known.future[: max(0, left - known.num_rejected)]
            known.sampler = None

    def has_run(self, number: int) -> bool:
        """Return whether a batch was executed, or never will be."""
        return number < self.number and all(each.number != number for each in self.waiting)

    def _uses(self, batch: Batch, passes: Sequence[Pass]) -> dict[str, set[int]]:
        """Return the blocks that a batch reads or writes, by its commands and by the tables after
        its execution.
        """
        uses: dict[str, set[int]] = {"device": set(), "host": set()}
        for tier, block in copied(batch):
            uses[tier].add(block)
        for each in passes:
            for index in range(len(self.config.groups)):
                uses["device"].update(self.tables.get((each.row, index), ()))
        return uses

    def _check_in_flight(self, batch: Batch) -> None:
        """Check that no unfinished batch uses the blocks that this batch hands out anew."""
        if not self.unfinished:
            return
        kinds, first, second = (batch.column(name).tolist() for name in ("kind", "a", "b"))
        handed = {a for kind, a in zip(kinds, first, strict=True) if kind == Allocate.kind}
        hosts = {b for kind, b in zip(kinds, second, strict=True) if kind == SwapOut.kind}
        for each in self.unfinished:
            for tier, blocks in (("device", handed), ("host", hosts)):
                if blocks & each.uses[tier]:
                    detail = f"batch {batch.number} hands out {tier} blocks "
                    detail += f"{sorted(blocks & each.uses[tier])[:5]}, batch {each.number} uses "
                    raise InvariantViolation("CMD-INFLIGHT", f"{detail}them and is not finished")
