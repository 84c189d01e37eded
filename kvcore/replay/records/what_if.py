# SPDX-License-Identifier: Apache-2.0
"""What if: makes the calls of a record on managers with other configurations, all in one pass.

The recorded manager runs beside them, since its counts tell how far each request got. A manager
with the recorded configuration starts with the recorded state. One with another configuration
starts empty: requests that ran when the record began are admitted again, and blocks cached then are
missing.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import attrs
from msgspec.structs import replace

from kvcore.codec.decode import decode
from kvcore.manager import KVCacheManager
from kvcore.record.errors import InvalidRecorder
from kvcore.record.outcomes import write_error, write_value
from kvcore.record.reader import RecordedCall, read_calls, segment_files
from kvcore.record.segment import KEYS, Segment, read_segment
from kvcore.replay.records.counterpart import AVOIDED, BY_BLOCKS, UNMADE, Made, Tally
from kvcore.replay.records.filled import NONE, Filled, check_variant
from kvcore.replay.records.follower import Follower
from kvcore.replay.records.rerun import BY_CONTENT, Backend
from kvcore.state.state import State
from kvcore.types.config import Config
from kvcore.types.errors import InvalidConfig, KvcoreError
from kvcore.types.values import Appended, Refused

LOOK_UP = "get_computed_blocks"
ADMITS, GIVES_BACK = {"allocate_slots", "load", "swap_in"}, {"free", "swap_out"}
ENDS = {*ADMITS, "remove_request"}
AHEAD_MAX = 1 << 16
"""The largest number of calls to read ahead."""
WRONG = (KvcoreError, Refused)
COUNTED = {"allocate_slots", "load", "fork"}
NOT_WORDED = ("groups", "hash_seed", "hash_unit")
WORDED = {
    field.name: "str" if isinstance(field.default, str) else "int"
    for field in attrs.fields(Config)
    if field.init and field.name not in NOT_WORDED
}
"""The fields of a configuration that a variant can change, and how to read their words."""


@attrs.frozen
class Variant:
    """The result of one configuration. parted_at: the first call that differed, or None.

    fidelity: the share of the calls that were made at their own place; after `parted_at` it ignores
    look-ups, and calls that were refused or misuse in the record.
    """

    name: str
    tally: Tally
    parted_at: int | None
    fidelity: float


@attrs.frozen
class WhatIf:
    """Variants beside the recorded run.

    num_left_out: requests that existed when the record began; a variant with another configuration
    leaves their calls out. num_cold: blocks cached then, which such a variant lacks.
    """

    num_calls: int
    recorded: Tally
    variants: tuple[Variant, ...]
    num_left_out: int = 0
    num_cold: int = 0


def what_if(
    path: str | os.PathLike[str], variants: Mapping[str, Config], backend: Backend
) -> WhatIf:
    """Make the calls of a record with each configuration, up to the first damage or gap in it.

    Raises RecordNeedsText for a configuration in which hashes are not enough, InvalidRecorder for a
    record whose calls give different outcomes, NotARecord, NewerRecord, DamagedRecord.
    """
    files = segment_files(path)
    first = read_segment(files[0])
    state = decode(first.state)
    if first.header.flags & KEYS:
        for config in variants.values():
            check_variant(state.config, config, path)
    base = _restored(first, state, backend)
    followers = [_begin(config, first, state, backend) for config in variants.values()]
    rows = {row: name for row, name in enumerate(state.rows) if name is not None}
    room_for_others = set[tuple[int, str]]()
    has_larger, num_calls = any(each.scale > 1 for each in followers), 0
    for call in _with_room_for_others(_calls(files, first, state), room_for_others):
        made = _make(base, call, rows, has_larger)
        num_calls += 1
        if call.name in ("add_request", "fork") and isinstance(made.value, int):
            rows[made.value] = _added(made)
        wrong = isinstance(made.value, WRONG)
        parts: list[Made] = []
        for each in followers:
            if each.parted_at is None and each.make_as_recorded(made):
                continue
            if call.name == "append" and isinstance(made.value, Appended):
                if each.append_at_once(made):
                    continue
                names, tokens = _read_append(made, rows, each.appended)
                each.appended = 0
                each.follow_append(made, names, tokens)
            elif call.name == "take_batch" and not wrong:
                each.follow_batch(made)
            elif not wrong and call.name != LOOK_UP:
                parts = parts or list(_split(made, room_for_others))
                each.follow(parts)
    for each in followers:
        each.finish()
    done = [
        Variant(name, each.tally, each.parted_at, each.fidelity)
        for name, each in zip(variants, followers, strict=True)
    ]
    if all(each.same for each in followers):
        return WhatIf(num_calls, base.tally, tuple(done))
    num_cold = sum(key is not None for key in state.device.keys)
    return WhatIf(num_calls, base.tally, tuple(done), len(state.requests), num_cold)


def changed(config: Config, changes: str) -> Config:
    """Change values of a configuration: "num_blocks=8192,eviction=lru2".

    Raises InvalidConfig for a field that does not exist or cannot be written as a word, and as
    Config does.
    """
    values: dict[str, Any] = {}
    for change in changes.split(","):
        name, _, word = (part.strip() for part in change.partition("="))
        if name not in WORDED:
            reason = f"a variant changes fields of Config: {', '.join(sorted(WORDED))}"
            raise InvalidConfig(field=name, value=word, reason=reason)
        values[name] = _from_word(name, word)
    if "block_size" in values and len(config.groups) == 1:
        size = values["block_size"]
        values["groups"] = (attrs.evolve(config.groups[0], block_size=size),)
    return attrs.evolve(config, **values)


def _from_word(name: str, word: str) -> int | bool | str | dict[str, str | int] | None:
    """Read the value of a field; floors are written salt:blocks+salt:blocks. Raises
    InvalidConfig.
    """
    if name == "floors":
        pairs = (each.rpartition(":") for each in word.split("+") if word.lower() != "none")
        return {salt: int(size) if size.isdecimal() else size for salt, _, size in pairs}
    if WORDED[name] == "str":
        return word
    known: dict[str, int | bool | None] = {"true": True, "false": False, "none": None}
    if word.lower() in known:
        return known[word.lower()]
    if not (word.isascii() and word.isdigit()):
        reason = "must be an integer of at least 0, true, false or none"
        raise InvalidConfig(field=name, value=word, reason=reason)
    return int(word)


def _calls(files: Sequence[Path], first: Segment, state: State) -> Iterator[RecordedCall]:
    """Yield the calls that returned, up to the first gap. first, state: of the first file."""
    segments = chain([(first, state)], ((read_segment(path), None) for path in files[1:]))
    following = first.header.first_call
    for segment, known in segments:
        if segment.header.first_call != following:
            return
        for call in read_calls(segment, known):
            if call.result is not None:
                following += 1
                yield call
        if segment.dropped_bytes:
            return


def _restored(segment: Segment, state: State, backend: Backend) -> Follower:
    """Make a manager with the recorded state."""
    manager = KVCacheManager(state.config, backend)
    manager.restore(segment.state)
    running = [name for name, each in state.requests.items() if any(each.tables)]
    return Follower(manager, running, same=True)


def _begin(config: Config, segment: Segment, state: State, backend: Backend) -> Follower:
    """Make a manager: with the recorded state if it has the recorded configuration, else empty."""
    if config == state.config:
        return _restored(segment, state, backend)
    follower = Follower(KVCacheManager(config, backend), [], same=False)
    follower.first_batch = state.batch.number
    if segment.header.flags & KEYS:
        follower.scale = config.hash_block_size // state.config.hash_block_size
    follower.gone |= set(state.requests)
    follower.parted_at = segment.header.first_call if state.requests else None
    return follower


def _make(base: Follower, call: RecordedCall, rows: Mapping[int, str], has_larger: bool) -> Made:
    """Make a call on the recorded manager. has_larger: whether a variant has larger blocks. Raises
    InvalidRecorder if that does not give the recorded outcome.
    """
    arguments, manager = call.arguments, base.manager
    keys: tuple[bytes | None, ...] = ()
    if call.name in BY_BLOCKS:
        keys = tuple(map(partial(_key_of, manager), arguments["block_ids"]))
    filled = NONE
    if call.hashes is not None and call.result is not None:
        if call.result.what in BY_CONTENT:
            return Made(call.number, call.name, arguments, value=UNMADE)
        filled = _filled(manager, call, has_larger)
    value = base.run(call.name, arguments, filled=filled)
    wrong = isinstance(value, KvcoreError)
    if (write_error(value) if wrong else write_value(call.name, value)) != call.outcome:
        reason = f"call {call.number:,} has a different outcome; `kvcore replay` shows more"
        raise InvalidRecorder(name="what_if", value=call.name, reason=reason)
    target = 0
    if not wrong and call.name in COUNTED:
        request_id = arguments.get("child_id") or arguments["request_id"]
        target = manager.num_computed_tokens(request_id)
    elif isinstance(value, Appended) and value.refused is not None:
        arguments = arguments | {"requests": _names(arguments["requests"], rows)}
    return Made(call.number, call.name, arguments, target, value, keys, filled)


def _filled(manager: KVCacheManager, call: RecordedCall, has_larger: bool) -> Mapping[str, Filled]:
    """Return the hashes that come with a call of a record by keys, by request."""
    hashes, fine = call.hashes or {}, manager.config.hash_block_size
    if has_larger and call.name == "add_block_hashes" and str(call.result) == "done":
        request_id = call.arguments["request_id"]
        (known, *_) = manager.get_block_keys(request_id)
        before = len(known) * manager.config.block_size
        return {request_id: Filled(before, call.arguments["hashes"], fine)}
    return {
        request_id: Filled(manager.num_tokens(request_id), made, fine)
        for request_id, made in hashes.items()
    }


def _key_of(manager: KVCacheManager, block: int) -> bytes | None:
    try:
        return manager.get_block_key(block)
    except KvcoreError:
        return None


def _added(made: Made) -> str:
    """Return the id that an `add_request` or a `fork` added."""
    child = made.arguments.get("child_id")
    return str(made.arguments["request"].request_id if child is None else child)


def _read_append(
    made: Made, rows: Mapping[int, str], start: int
) -> tuple[list[str], Sequence[int] | None]:
    """Return the requests of an `append`, from `start` to the last appended one, and their
    tokens.
    """
    named, tokens = made.arguments["requests"], made.arguments.get("tokens")
    names = _names(named[start : made.value.done], rows)
    return names, None if tokens is None else tokens[start : made.value.done]


def _names(named: Any, rows: Mapping[int, str]) -> list[str]:
    return named if isinstance(named, list) else [rows[row] for row in named]


def _split(made: Made, room_for_others: set[tuple[int, str]]) -> Iterator[Made]:
    """Split a call into one call per request."""
    arguments = made.arguments
    several = arguments.get("request_ids")
    for request_id in [arguments.get("request_id")] if several is None else several:
        avoided = (made.number, request_id) in room_for_others
        if several is not None:
            arguments = arguments | {"request_ids": [request_id]}
        elif not avoided:
            yield made
            continue
        yield replace(made, arguments=arguments, value=AVOIDED if avoided else made.value)


def _with_room_for_others(
    calls: Iterable[RecordedCall], found: set[tuple[int, str]]
) -> Iterator[RecordedCall]:
    """Yield the calls.

    Before a call that frees blocks, adds to `found` its number with each of its requests that is
    allocated again within AHEAD_MAX calls.
    """
    ahead, undecided = deque[RecordedCall](), dict[str, int]()
    for call in calls:
        if not undecided and call.name not in GIVES_BACK:
            yield call
            continue
        ahead.append(call)
        if call.name in GIVES_BACK or (undecided and call.name in ENDS):
            one = call.arguments.get("request_id", "")
            for each in [one] if one else call.arguments.get("request_ids", ()):
                number = undecided.pop(each, None)
                if number is not None and call.name in ADMITS:
                    found.add((number, each))
                if call.name in GIVES_BACK:
                    undecided[each] = call.number
        if len(ahead) > AHEAD_MAX:
            over = ahead[0].number
            undecided = {each: number for each, number in undecided.items() if number > over}
        first = next(iter(undecided.values()), call.number + 1)
        while ahead and ahead[0].number < first:
            yield ahead.popleft()
    yield from ahead
