# SPDX-License-Identifier: Apache-2.0
"""Turns the calls of a record into items, and attempts to run any subset of them.

An item replaces the numbers of the record by stable names: requests by id, a hit by the request's
last look-up, blocks by key, batches and operations by their numbers in the record. An attempt
resolves these to its own objects; a call whose name does not resolve is misuse, which changes
nothing.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import attrs

from kvcore.codec.decode import decode
from kvcore.manager import KVCacheManager
from kvcore.record.calls import SHAPES
from kvcore.record.errors import InvalidRecorder
from kvcore.record.fields import LastHit
from kvcore.record.outcomes import ROWS, write_value
from kvcore.record.reader import RecordedCall, read_calls, read_text, segment_files
from kvcore.record.recorder import Recorder
from kvcore.record.segment import read_segment
from kvcore.replay.records.rerun import Backend
from kvcore.trace.calls import Call, Misuse
from kvcore.types.commands import Batch
from kvcore.types.config import Config
from kvcore.types.errors import InvariantViolation, KvcoreError
from kvcore.types.values import Hit, Refused

LOOK_UP = "get_computed_blocks"
BY_BLOCKS = ("pin", "store", "evict_blocks")
POSITIONAL = ("hit", "tokens", "done", "epoch")
"""Options that traces write as arguments."""
EVERY = 256
"""Calls between two comparisons of states in a long attempt."""
CALL_SECONDS, CHECK_SECONDS = 1.0, 60.0
"""Processor time after which a call, or a check of all states, counts as endless."""
OF_CALLS = ("hang", "crash", "kept")
"""Failures that appear at calls, not in states; includes refusals."""
Going = Callable[[int, float], object]
"""Called at the start of each step with its number and the seconds that it may take."""


@attrs.frozen
class Item:
    """A recorded call. keys: those of the blocks that it names. gave: the numbers it returned."""

    name: str
    options: dict[str, Any]
    keys: tuple[bytes | None, ...] = ()
    gave: tuple[int, ...] = ()


Items = tuple[Item, ...]


@attrs.frozen
class Broken:
    """A failure: "difference", "exception", "hang", "crash", "refused:later", "refused:never", an
    invariant, or "kept" by a command.

    at: the index of the item after which it showed.
    """

    name: str
    detail: str
    at: int


def read_items(
    path: str | os.PathLike[str],
    backend: Backend,
    going: Going = lambda *_: None,
    last: int | None = None,
) -> tuple[Config, Items]:
    """Read the configuration of a record and its calls, up to the one in which the process died.

    last: the number of the last call, which is not made; None: make all calls that returned.
    Raises RecordNeedsText, InvalidRecorder for a record that begins in the middle, NotARecord,
    NewerRecord, DamagedRecord.
    """
    files = segment_files(path)
    state = decode(read_text(files[0], "a shorter run").state)
    if state.requests or state.batch.number or any(key is not None for key in state.device.keys):
        reason = "it begins with requests, batches or cached blocks, but a trace begins with none"
        raise InvalidRecorder(name="record", value=str(path), reason=reason)
    attempt = Attempt(state.config, [backend])
    rows, items = dict[int, str](), list[Item]()
    for file in files:
        for call in read_calls(read_segment(file)):
            if call.result is not None and call.result.what == "done" and call.name in ROWS:
                request = call.arguments.get("request")
                name = request.request_id if request else call.arguments["child_id"]
                rows[call.result.numbers[0]] = name
            going(call.number, CALL_SECONDS)
            _add(
                items, call, rows, attempt, is_made=call.result is not None and call.number != last
            )
            if call.number == last:
                return state.config, tuple(items)
    return state.config, tuple(items)


def _add(
    items: list[Item], call: RecordedCall, rows: dict[int, str], attempt: Attempt, *, is_made: bool
) -> None:
    """Add a recorded call as an item; make it if requested, and keep the numbers it returned."""
    options = dict(call.arguments)
    hit = options.get("hit")
    if hit is not None and not isinstance(hit, LastHit):
        look_up = Item(LOOK_UP, {"request_id": options["request_id"]})
        items.append(look_up)
        attempt.make(look_up)
    if call.name == "append":
        named = options["requests"]
        options["requests"] = [
            rows.get(each, str(each)) if isinstance(each, int) else each for each in named
        ]
    if isinstance(options.get("tokens"), memoryview):
        options["tokens"] = options["tokens"].tolist()
    if "request" in options:
        request = options["request"]
        options["request"] = attrs.evolve(request, tokens=list(request.tokens))
    keys: tuple[bytes | None, ...] = ()
    if call.name in BY_BLOCKS:
        keys = tuple(attempt.key_of(block) for block in options["block_ids"])
    item = Item(call.name, options, keys)
    if not is_made:
        items.append(item)
        return
    values = attempt.make(item)
    items.append(attrs.evolve(item, gave=_numbers(values[0])))
    attempt.learn(items[-1], values[0])


class Attempt:
    """Managers that make the same items; queries go to the first one.

    calls: the calls made, in the form of a trace or a record. is_misuse: for each call. clamps:
    whether an allocation requests at most the tokens that its request has.
    """

    def __init__(
        self, config: Config, backends: Sequence[Backend], *, clamps: bool = False
    ) -> None:
        self.clamps = clamps
        self.is_misuse: list[bool] = []
        self.managers = [KVCacheManager(config, backend) for backend in backends]
        self.calls: list[Call] = []
        self.hits: dict[str, Hit] = {}
        self.here: dict[tuple[str, int], int] = {}

    def make(self, item: Item) -> list[Any]:
        """Make an item on each manager: values, with `Misuse` or an exception for an error."""
        call = self.call_of(item)
        given, rest = call.args, call.options
        values = [_value(getattr(each, item.name), given, rest) for each in self.managers]
        self.is_misuse.append(isinstance(values[0], Misuse))
        if isinstance(values[0], Hit):
            self.hits[item.options["request_id"]] = values[0]
        self.learn(item, values[0])
        return values

    def call_of(self, item: Item) -> Call:
        """Return the call of an item in this attempt, and add it to `calls`."""
        rest = self._resolved(item)
        given = tuple(rest.pop(field) for field in SHAPES[item.name].fields)
        given += tuple(rest.pop(name) for name in POSITIONAL if name in rest)
        self.calls.append(Call(item.name, given, rest))
        return self.calls[-1]

    def states(self) -> list[bytes]:
        """Return the bytes of each manager's state; b"" if it cannot be encoded."""
        return [
            data if isinstance(data := _value(m.encode, (), {}), bytes) else b""
            for m in self.managers
        ]

    def learn(self, item: Item, value: Any) -> None:
        """Record which numbers here correspond to those of the record."""
        kind = "batch" if item.name == "take_batch" else "operation"
        self.here |= {
            (kind, there): here for there, here in zip(item.gave, _numbers(value), strict=False)
        }
        if item.name == "pin" and not isinstance(value, Misuse):
            pairs = zip(item.options["block_ids"], self.calls[-1].args[0], strict=False)
            self.here |= {("block", there): here for there, here in pairs}

    def key_of(self, block: int) -> bytes | None:
        """Return the key of a block, if it has one."""
        try:
            return self.managers[0].get_block_key(block)
        except KvcoreError:
            return None

    def _resolved(self, item: Item) -> dict[str, Any]:
        """Resolve the arguments of an item."""
        options = dict(item.options)
        if "hit" in options:
            options["hit"] = self.hits.get(options["request_id"])
        if self.clamps and item.name == "allocate_slots":
            options["num_new_tokens"] = self._clamped(options)
        for kind in ("batch", "operation"):
            if options.get(kind) is not None:
                options[kind] = self.here.get((kind, options[kind]), options[kind])
        if item.name == "unpin":
            options["block_ids"] = [self.here.get(("block", b), b) for b in options["block_ids"]]
        if item.name in BY_BLOCKS:
            options["block_ids"] = [
                self._block(*pair) for pair in zip(options["block_ids"], item.keys, strict=True)
            ]
        return options

    def _clamped(self, options: dict[str, Any]) -> int:
        """Limit the tokens of an allocation to those left to compute."""
        request_id, count, manager = (
            options["request_id"],
            options["num_new_tokens"],
            self.managers[0],
        )
        if options.get("num_output_placeholders"):
            return int(count)
        try:
            left = manager.num_tokens(request_id) + manager.num_draft_tokens(request_id)
            left -= manager.num_computed_tokens(request_id)
        except KvcoreError:
            return int(count)
        hit = options.get("hit")
        left -= options.get("num_external_computed_tokens", 0) + (hit.num_tokens if hit else 0)
        return int(min(count, max(0, left)))

    def _block(self, block: int, key: bytes | None) -> int:
        found = None if key is None else self.managers[0].get_cached_block(key)
        return block if found is None else found


def attempt(
    config: Config,
    items: Items,
    backends: Sequence[Backend],
    name: str | None = None,
    *,
    clamps: bool = False,
    going: Going = lambda *_: None,
    folder: Path | None = None,
) -> tuple[Attempt, Broken | None]:
    """Make items up to the first failure. name: the failure that counts; None: any but refusals.

    States are compared and checked each EVERY items; once they differ, item by item from the
    last place at which they did not. folder: where the last manager is recorded.
    """
    run, good = Attempt(config, backends, clamps=clamps), 0
    if folder is not None:
        run.managers[-1].start_recording(Recorder(folder))
    checks = name not in OF_CALLS and not (name or "").startswith("refused:")
    kept: list[bytes] = run.states() if checks else []
    known = (dict(run.hits), dict(run.here))
    for at, item in enumerate(items):
        going(at, CALL_SECONDS)
        broken = _failure_in(run.make(item), run.calls[-1], at, name)
        if broken is not None:
            return run, broken
        if not checks or (at + 1 < len(items) and (at + 1) % EVERY):
            continue
        going(at, CHECK_SECONDS)
        states = run.states()
        broken = _checked(run, states, at, name)
        if broken is not None and at > good:
            again = _closer(run, kept, known, items[good : at + 1], good, name, going)
            return again or (run, broken)
        if broken is not None:
            return run, broken
        kept, known, good = states, (dict(run.hits), dict(run.here)), at + 1
    return run, None


def _closer(
    run: Attempt,
    kept: list[bytes],
    known: Any,
    items: Items,
    start: int,
    name: str | None,
    going: Going,
) -> tuple[Attempt, Broken] | None:
    """Repeat from the last states without failure, checking after each item."""
    for manager, state in zip(run.managers, kept, strict=True):
        manager.restore(state)
    run.hits, run.here = known
    del run.calls[start:], run.is_misuse[start:]
    for at, item in enumerate(items, start):
        going(at, CALL_SECONDS)
        broken = _failure_in(run.make(item), run.calls[-1], at, name)
        going(at, CHECK_SECONDS)
        broken = broken or _checked(run, run.states(), at, name)
        if broken is not None:
            return run, broken
    return None


def _failure_in(values: list[Any], call: Call, at: int, name: str | None) -> Broken | None:
    """Return the failure in the values of a call."""
    for value in values:
        if isinstance(value, BaseException) and name in (None, "exception"):
            return Broken("exception", f"{call} raises {value!r}", at)
        refused = getattr(value, "refused", value)
        if isinstance(refused, Refused) and name == f"refused:{refused.reason.value}":
            return Broken(name, f"{call} returns {refused}", at)
    if name in (None, "difference"):
        for value in values[1:]:
            if _comparable(call.name, value) != _comparable(call.name, values[0]):
                return Broken("difference", f"{call} returns {values[0]!r} or {value!r}", at)
    return None


def _checked(run: Attempt, states: list[bytes], at: int, name: str | None) -> Broken | None:
    """Return the failure in the states after a call."""
    if name in (None, "difference") and len(set(states)) > 1:
        return Broken("difference", f"the states differ behind {run.calls[-1]}", at)
    if name == "difference":
        return None
    for manager in run.managers:
        try:
            manager.check()
        except InvariantViolation as error:
            if name in (None, error.name):
                return Broken(error.name, error.detail, at)
        except Exception as error:  # the state is so damaged that its check raises
            if name in (None, "exception"):
                return Broken("exception", f"the check of the state raises {error!r}", at)
    return None


def _comparable(name: str, value: Any) -> Any:
    """Return a value in comparable form: an exception by its type, a batch by its bytes."""
    if isinstance(value, BaseException):
        return type(value).__name__
    return write_value(name, value) if isinstance(value, Batch) else value


def _value(method: Callable[..., Any], given: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """Return the value or error of a call. A panic of the twin is not an Exception."""
    try:
        return method(*given, **options)
    except InvariantViolation as error:
        return error
    except KvcoreError as error:
        return Misuse(type(error).__name__, error.fields)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        return error


def _numbers(value: Any) -> tuple[int, ...]:
    """Return the numbers by which later calls name the value of a call."""
    if isinstance(value, Batch):
        return (value.number,)
    if isinstance(value, tuple) and all(isinstance(each, int) for each in value):
        return value
    return ()
