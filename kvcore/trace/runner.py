# SPDX-License-Identifier: Apache-2.0
"""Makes the calls of text traces on a manager.

A verb is the method's name and its words are the arguments in the method's order, a list last. A
hit is the result of the request's last `get_computed_blocks`. After each call every invariant is
checked. The effects of a call are read from the state's open batch, and `take_batch` must return
exactly those.
Twin: rust/src/trace/runner.rs.

    add_request r0 0-14 [lora=a] [media=x@2+4,y@8+1] [salt=s] [own=ab] [skip] [embeds=abcdefg]
                               a letter for the row of each token
    add_request r0 0-14 [retain=0+4@80/1000,8+@50,decode@20]
                               tokens 0 to 3 at 80 for 1000 ms, those from 8 on at 50
    extend_retention r0 0+@80  tick 1000
    add_tokens r0 15-18        remove_request r0          append r0=15 r1=7
    add_block_hashes r0 cd     a letter for each hash of the engine's own
    add_drafts r0 15-16        accept r0 1                rewind 8 r0 r1
    get_computed_blocks r0     cache_blocks r0 8          remove_skipped_blocks r0 8
    allocate_slots r0 4 [hit] [lookahead=2] [external=4] [encoder=3] [reserved=1] [delay] [full]
    can_allocate               with the same words
    free r0                    fork r0 r1                 truncate r0 5
    unschedule r0 3            swap_out r0 r1             swap_in r0 r1
    pin 3 4                    unpin 3 4                  evict_blocks 3 4
    pin_prefix p r0 8          unpin_prefix p             reset_prefix_cache
    store 3 4                  load r0 8 [hit] [full]    complete_operation 0 done|failed
    take_batch                 complete 3                 cancel 3
    advance_epoch [3]          stale: requests of older epochs
    take_events                take_stats                 in_flight
    take_new_block_ids         restore: go on from the state's bytes
    queue, host_queue          free queues, front first
    levels                     free blocks with a key, front first, each with its level
    waiting, host_waiting      quarantined blocks, in the order of their release
    owners, keys               blocks that have any, by id; tail keys behind the full one
    table r0                   host_table r0              computed r0
    status r0                  row r0                     common r0
    drafts r0
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from inspect import signature
from typing import Any, Literal, TypeVar

from kvcore.manager import KVCacheManager
from kvcore.pool.block_pool import BlockPool
from kvcore.pool.retention_state import NOTHING, RetentionState, level_of
from kvcore.state.state import State
from kvcore.trace.text import (
    BadWord,
    TraceNames,
    read_number,
    read_tokens,
    read_u32,
    write_commands,
    write_error,
    write_events,
    write_ids,
    write_value,
)
from kvcore.transitions import TRANSITIONS, arguments
from kvcore.transitions.queries import find_request
from kvcore.types.config import Config
from kvcore.types.errors import InvalidExtraKey, InvalidRetention, KvcoreError
from kvcore.types.extra_inputs import LoRA, MediaItem, PromptEmbeds
from kvcore.types.keys import HASH_SIZE
from kvcore.types.retention import KvCacheRetentionConfig, TokenRangeRetentionConfig
from kvcore.types.slot_request import DEFAULTS, FLAGS
from kvcore.types.values import Hit, KVCacheBlocks, Refused, Request

WORDS = {name.removeprefix("num_").partition("_")[0]: name for name in DEFAULTS}
"""The options of an allocation by their word in a trace: the first word of the name after
`num_`.
"""
OUTPUT_WORDS = {"rejected": "num_rejected", "batch": "batch"}
T = TypeVar("T")


class BadCall(BadWord):
    """The verb or a word of a call cannot be read."""


class Runner:
    """A manager that takes calls as words and returns outcomes as lines."""

    def __init__(self, config: Config, backend: Literal["rust", "python"]) -> None:
        self.manager = KVCacheManager(config, backend=backend)
        self._names = TraceNames()
        self._hits: dict[str, Hit] = {}

    def call(self, verb: str, words: tuple[str, ...]) -> list[str]:
        """Make one call; return its whole outcome as lines. Raises BadCall, InvariantViolation."""
        before = self.manager.state()
        method = CALLS.get(verb)
        if method is None:
            raise BadCall(f"there is no call {verb!r}")
        try:
            given = signature(method).bind(self, *words)
        except TypeError as error:
            raise _bad_call(verb, words, error) from None
        try:
            value = method(*given.args)
            write = WRITERS.get(verb) if not isinstance(value, Refused) else None
            lines = write_value(value if write is None else write(value))
        except KvcoreError as error:
            lines = write_error(error)
        except BadWord as error:
            raise _bad_call(verb, words, error) from None
        after = self.manager.state()
        self.manager.check()
        self._names.learn(after)
        return lines + self._effects(before, after)

    def _effects(self, before: State, after: State) -> list[str]:
        same = before.batch.number == after.batch.number
        commands = after.batch.commands[len(before.batch.commands) if same else 0 :]
        events = after.events[len(before.events) :]
        return write_commands(commands, self._names) + write_events(events, self._names)

    def add_request(self, request_id: str, tokens: str, *words: str) -> int:
        options: dict[str, Any] = {}
        for word in words:
            name, _, value = word.partition("=")
            if name == "lora":
                options["lora"] = _made(LoRA, value)
            elif name == "media":
                options["media"] = [_read_media(item) for item in value.split(",")]
            elif name == "salt":
                options["cache_salt"] = value
            elif name == "embeds":
                options["prompt_embeds"] = PromptEmbeds(value.encode(), 1)
            elif name == "own":
                options["block_hashes"] = _read_hashes(value)
            elif name == "retain":
                options["retention"] = _read_retention(value)
            elif (name, value) == ("skip", ""):
                options["skip_reading_prefix_cache"] = True
            else:
                raise BadWord(f"a request has no {word!r}")
        request = Request(request_id, read_tokens(tokens), **options)
        return self.manager.add_request(request)

    def get_computed_blocks(self, request_id: str) -> Hit:
        self._hits[request_id] = self.manager.get_computed_blocks(request_id)
        return self._hits[request_id]

    def allocate_slots(self, request_id: str, count: str, *words: str) -> object:
        return self.manager.allocate_slots(
            request_id, read_number(count), **self._options(request_id, words)
        )

    def can_allocate(self, request_id: str, count: str, *words: str) -> object:
        options = self._options(request_id, words)
        return self.manager.can_allocate(request_id, read_number(count), **options)

    def checkpoint_stop(self, request_id: str, count: str, *words: str) -> str:
        hit = self._options(request_id, words).get("hit")
        stop, marked = self.manager.checkpoint_stop(request_id, read_number(count), hit)
        return f"{stop}, checkpoint" if marked else str(stop)

    def _options(self, request_id: str, words: tuple[str, ...]) -> dict[str, Any]:
        options: dict[str, Any] = {}
        for word in words:
            name, _, value = word.partition("=")
            option = WORDS.get(name)
            if (name, value) == ("hit", "") and request_id in self._hits:
                options["hit"] = self._hits[request_id]
            elif option in FLAGS and not value:
                options[option] = True
            elif option is not None and option not in FLAGS:
                options[option] = read_number(value)
            else:
                raise BadWord(f"the call has no {word!r}")
        return options

    def append(self, *words: str) -> object:
        options = {}
        if words and words[-1].startswith("batch="):
            options, words = _read_output(words[-1:]), words[:-1]
        split = [pair.partition("=") for pair in words]
        ids, tokens = [name for name, _, _ in split], [token for _, _, token in split]
        known = [read_number(token) for token in tokens] if any(tokens) else None
        return self.manager.append(ids, known, **options)

    def add_tokens(self, request_id: str, tokens: str, *words: str) -> None:
        self.manager.add_tokens(request_id, read_tokens(tokens), **_read_output(words))

    def load(self, request_id: str, count: str, *words: str) -> object:
        options = self._options(request_id, words)
        return self.manager.load(request_id, read_number(count), **options)

    def take_batch(self) -> str:
        emitted = tuple(self.manager.state().batch.commands)
        batch = self.manager.take_batch()
        if tuple(batch) != emitted:
            raise AssertionError(f"batch {batch.number} is not what its calls emitted")
        num_segments = len(set(batch.column("segment")))
        return f"batch {batch.number}: {len(batch)} commands, {num_segments} segments"

    def advance_epoch(self, *number: str) -> int:
        return self.manager.advance_epoch(*map(read_number, number))

    def stale(self) -> str:
        return " ".join(("stale", *self.manager.stale_requests()))

    def in_flight(self) -> str:
        return write_ids(self.manager.in_flight)

    def restore(self) -> None:
        self.manager.restore(self.manager.encode())

    def queue(self) -> str:
        return write_ids(self.manager.state().device.queue)

    def levels(self) -> str:
        pool = self.manager.state().device
        known = pool.retention or RetentionState()
        free = [block for block in pool.queue if pool.keys[block] is not None]
        levels = [level_of(known.kept.get(block, NOTHING), known.now) for block in free]
        pairs = zip(free, levels, strict=True)
        return " ".join(f"{block}@{level}" for block, level in pairs) or "none"

    def host_queue(self) -> str:
        host = self.manager.state().host
        return write_ids(() if host is None else host.queue)

    def waiting(self) -> str:
        return write_ids(self.manager.state().device.quarantine or ())

    def host_waiting(self) -> str:
        host = self.manager.state().host
        return write_ids(() if host is None else host.quarantine or ())

    def owners(self) -> str:
        counts = enumerate(self.manager.state().device.ref_counts)
        return " ".join(f"{block}:{count}" for block, count in counts if count) or "none"

    def keys(self) -> str:
        pool = self.manager.state().device
        return " ".join(self._keys(pool)) or "none"

    def _keys(self, pool: BlockPool) -> Iterator[str]:
        for block, key in enumerate(pool.keys):
            tails = () if pool.tails is None else pool.tails.keys(block)
            for each in (*(() if key is None else (key,)), *tails):
                yield f"{block}{self._names.key(each)}"

    def table(self, request_id: str) -> KVCacheBlocks:
        return self.manager.get_blocks(request_id)

    def host_table(self, request_id: str) -> KVCacheBlocks:
        tables = find_request(self.manager.state(), request_id).host_tables
        return KVCacheBlocks(tuple(tuple(table) for table in tables))

    def computed(self, request_id: str) -> int:
        return self.manager.num_computed_tokens(request_id)

    def to_come(self, request_id: str) -> int:
        return self.manager.num_output_placeholders(request_id)

    def drafts(self, request_id: str) -> int:
        return self.manager.num_draft_tokens(request_id)

    def status(self, request_id: str) -> str:
        return self.manager.status(request_id).value

    def row(self, request_id: str) -> int:
        return self.manager.get_row(request_id)

    def common(self, request_id: str) -> str:
        return write_ids(self.manager.get_num_common_prefix_blocks(request_id))


def _read_hashes(letters: str) -> list[bytes]:
    return [letter * HASH_SIZE for letter in (bytes([code]) for code in letters.encode())]


def _read_media(word: str) -> MediaItem:
    identifier, _, place = word.partition("@")
    offset, _, length = place.partition("+")
    return _made(MediaItem, identifier, read_u32(offset), read_u32(length))


def _read_retention(word: str) -> KvCacheRetentionConfig:
    """Read the retention wish `0+4@80/1000,8+@50,decode@20`: ranges by offset and length, with
    level and ms. Raises BadWord.
    """
    ranges, options = [], dict[str, Any]()
    try:
        for part in word.split(","):
            place, _, wish = part.partition("@")
            priority, slash, duration = wish.partition("/")
            level, ms = read_u32(priority), read_number(duration) if slash else None
            if place == "decode":
                options = {"decode_retention_priority": level, "decode_duration_ms": ms}
                continue
            first, _, length = place.partition("+")
            start = read_u32(first)
            end = start + read_u32(length) if length else None
            ranges.append(TokenRangeRetentionConfig(start, end, level, ms))
        return KvCacheRetentionConfig(ranges, **options)
    except InvalidRetention as error:
        raise BadWord(str(error)) from None


def _read_output(words: Sequence[str]) -> dict[str, int]:
    """Read the options of a batch's output."""
    options = {}
    for word in words:
        name, _, value = word.partition("=")
        if name not in OUTPUT_WORDS:
            raise BadWord(f"output has no {word!r}")
        options[OUTPUT_WORDS[name]] = read_number(value)
    return options


def _read_done(word: str) -> bool:
    if word not in ("done", "failed"):
        raise BadWord(f"an operation is done or failed, not {word!r}")
    return word == "done"


def _made(kind: Callable[..., T], *parts: object) -> T:
    """Make an extra key of a request. Raises BadWord."""
    try:
        return kind(*parts)
    except InvalidExtraKey as error:
        raise BadWord(str(error)) from None


def _bad_call(verb: str, words: Sequence[str], error: Exception) -> BadCall:
    return BadCall(f"{verb} cannot take {' '.join(words) or 'nothing'}: {error}")


READERS: dict[str, Callable[[str], object]] = {
    **dict.fromkeys(("request_id", "parent_id", "child_id", "request_ids", "name"), str),
    "tokens": read_tokens,
    "hashes": _read_hashes,
    "retention": _read_retention,
    "done": _read_done,
}
"""How to read a word as this argument, or as an item of it; words of other arguments are
numbers.
"""
LISTS = ("request_ids", "block_ids")
"""Arguments that take all remaining words."""
WRITERS: dict[str, Callable[[Any], object]] = {
    **dict.fromkeys(("add_request", "fork"), "row {}".format),
    **dict.fromkeys(("store", "load"), lambda value: f"operations {write_ids(value)}"),
    "rewind": lambda fell: " ".join(("fell", *fell)),
    "can_allocate": lambda verdict: verdict.value,
    "take_events": lambda events: f"{len(events)} events",
    "take_new_block_ids": write_ids,
}
"""How a trace writes the values of these calls."""


def _plain(name: str) -> Callable[..., object]:
    """Make the call of a transition whose words are its arguments."""
    singles = [each for each in arguments(name) if each not in LISTS]
    lists = [each for each in arguments(name) if each in LISTS]

    def call(runner: Runner, *words: str) -> object:
        rest = words[len(singles) :]
        if len(words) < len(singles) or (rest and not lists):
            raise BadWord(f"it takes {', '.join(arguments(name)) or 'nothing'}")
        given: dict[str, object] = {}
        for each, word in zip(singles, words, strict=False):
            given[each] = READERS.get(each, read_number)(word)
        for each in lists:
            given[each] = [READERS.get(each, read_number)(word) for word in rest]
        return getattr(runner.manager, name)(**given)

    return call


CALLS: dict[str, Callable[..., object]] = {name: _plain(name) for name in TRANSITIONS} | {
    name: method
    for name, method in vars(Runner).items()
    if callable(method) and not name.startswith("_") and name != "call"
}
