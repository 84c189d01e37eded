# SPDX-License-Identifier: Apache-2.0
"""The steps of a run in the words of text traces: the call, and everything that it returned.

The form is that of `trace/runner.py`, so that a story reads like a trace and can be made into one.
A hit is shown as the look-up before the call that uses it. A request that an exploration names by a
number is called r and that number.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import attrs

from kvcore.check.properties.hits import hit_of
from kvcore.check.world.model import CheckedCall
from kvcore.state.state import State
from kvcore.trace.calls import Call, Misuse
from kvcore.trace.runner import OUTPUT_WORDS, WORDS
from kvcore.trace.text import (
    TraceNames,
    write_commands,
    write_events,
    write_field,
    write_ids,
    write_tokens,
    write_value,
)
from kvcore.types.commands import Batch, segments
from kvcore.types.config import Config
from kvcore.types.extra_inputs import LoRA
from kvcore.types.groups import Group
from kvcore.types.retention import KvCacheRetentionConfig
from kvcore.types.slot_request import FLAGS
from kvcore.types.values import Request

OPTION_WORDS = {option: word for word, option in (WORDS | OUTPUT_WORDS).items()}
ON_LISTS = ("swap_out", "swap_in", "pin", "unpin", "evict_blocks", "store")
CONFIG_WORDS = (
    *("num_host_blocks", "max_model_len", "max_num_batched_tokens", "enable_caching"),
    *("null_block", "eviction", "duplicates", "num_preallocate_tokens", "watermark_blocks"),
    *("use_eagle", "enable_events", "record_new_blocks", "hashing", "max_in_flight", "publish"),
    *("hide_salts", "max_pinned_blocks", "floors"),
)


@attrs.frozen
class WrittenStep:
    """One call as a trace writes it: its look-up, its words, its result, and what it emitted."""

    lookup: tuple[str, ...]
    words: str
    value: tuple[str, ...]
    emitted: tuple[str, ...]

    @property
    def is_numbered(self) -> bool:
        """Return whether it counts as a call: closing a batch and executing it do not."""
        return self.words != "take_batch" and not self.words.startswith(("(", "execute "))

    @property
    def is_empty(self) -> bool:
        """Return whether it is a batch without commands."""
        said = "".join((*self.value, *self.emitted))
        return self.words == "take_batch" and (not said or " 0 commands" in said)

    @property
    def lines(self) -> Iterator[str]:
        """Yield the lines of a trace."""
        yield from self.lookup
        yield self.words
        yield from (f"  {line}" for line in (*self.value, *self.emitted))


@attrs.frozen
class Raised:
    """The value of a call that raised an error which no call may raise."""

    error: str


class StepWriter:
    """Writes the steps of one run in words; knows the prefixes of keys that it has met."""

    def __init__(self) -> None:
        self.names = SafeNames()
        self._batch = 0

    def write(self, step: CheckedCall) -> WrittenStep:
        """Write a step in words."""
        call, outcome = step.call, step.outcome
        commands: Sequence[Any] = outcome.commands
        events: Sequence[Any] = ()
        if isinstance(step.before, State):
            self.names.learn(step.before)
            self.names.learn(outcome.state)
            events = list(outcome.state.events)[len(step.before.events) :]
        emitted = (*write_commands(commands, self.names), *write_events(events, self.names))
        return WrittenStep(_lookup(call), words_of(call), tuple(self._value(step)), emitted)

    def _value(self, step: CheckedCall) -> list[str]:
        call, value = step.call, step.outcome.value
        if isinstance(value, Misuse):
            fields = (f" {name}={write_field(each)}" for name, each in value.fields.items())
            return [f"= error {value.error}{''.join(fields)}"]
        if isinstance(value, Raised):
            return [f"= raises {value.error}"]
        if isinstance(value, Batch):
            commands = list(value)
            number = self._batch = max(self._batch, value.number)
            self._batch += 1
            count = len(set(segments(commands)))
            return [f"= batch {number}: {len(commands)} commands, {count} segments"]
        if isinstance(value, tuple) and call.name in ("store", "load"):
            return [f"= operations {write_ids(value)}"]
        if call.name in ("add_request", "fork") and isinstance(value, int):
            return [f"= row {value}"]
        return write_value(value)


class SafeNames(TraceNames):
    """Names that fall back to the first digits of a hash that no request was seen with."""

    def block_hash(self, block_hash: bytes) -> str:
        """Write the prefix of a block hash."""
        try:
            return super().block_hash(block_hash)
        except KeyError:
            return f"(hash {block_hash.hex()[:8]})"


def name_of(request_id: str) -> str:
    """Return a request's name in a story."""
    return f"r{request_id}" if request_id.isdigit() else request_id


def words_of(call: Call) -> str:
    """Write a call as a line of a trace."""
    return " ".join((call.name, *_words(call)))


def _words(call: Call) -> list[str]:
    name, args = call.name, call.args
    match name:
        case "add_request":
            return _request_words(args[0])
        case "allocate_slots" | "load":
            words = [name_of(args[0]), str(args[1])]
            return words + ["hit"] * (hit_of(call) is not None) + _option_words(call)
        case "append":
            tokens = [f"={token}" for token in args[1]] if len(args) > 1 else [""] * len(args[0])
            words = [f"{name_of(each)}{token}" for each, token in zip(args[0], tokens, strict=True)]
            return words + _option_words(call)
        case "rewind":
            return [str(args[1]), *map(name_of, args[0])]
        case "complete_operation":
            return [str(args[0]), "done" if args[1] else "failed"]
        case "add_drafts" | "add_tokens":
            return [name_of(args[0]), write_tokens(list(args[1])), *_option_words(call)]
        case "extend_retention":
            return [name_of(args[0]), retention_words(args[1])]
        case "add_block_hashes":
            return [name_of(args[0]), _letters(args[1])]
    items = args[0] if name in ON_LISTS else args
    return [name_of(each) if isinstance(each, str) else str(each) for each in items]


def _request_words(request: Request) -> list[str]:
    words = [name_of(request.request_id), write_tokens(list(request.tokens))]
    if isinstance(request.lora, LoRA):
        words.append(f"lora={request.lora.name}")
    items = (f"{each.identifier}@{each.offset}+{each.length}" for each in request.media)
    words += [f"media={','.join(items)}"] if request.media else []
    words += [f"salt={request.cache_salt}"] if request.cache_salt is not None else []
    wish, hashes = request.retention, request.block_hashes
    words += [f"retain={retention_words(wish)}"] if wish is not None else []
    words += [f"own={_letters(hashes)}"] if hashes is not None else []
    return words + ["skip"] * request.skip_reading_prefix_cache


def retention_words(wish: KvCacheRetentionConfig) -> str:
    """Write a retention wish as a trace does."""

    def level(priority: int, ms: int | None) -> str:
        return f"@{priority}" if ms is None else f"@{priority}/{ms}"

    words = []
    for each in wish.token_range_retention_configs:
        length = "" if each.token_end is None else str(each.token_end - each.token_start)
        words.append(f"{each.token_start}+{length}{level(each.priority, each.duration_ms)}")
    words.append(f"decode{level(wish.decode_retention_priority, wish.decode_duration_ms)}")
    return ",".join(words)


def _letters(hashes: Sequence[bytes]) -> str:
    """Write hashes as single letters if each repeats one, as an engine's own in traces do."""
    return "".join(chr(each[0]) for each in hashes)


def _option_words(call: Call) -> list[str]:
    words = []
    for option, value in call.options.items():
        if option in FLAGS:
            words += [OPTION_WORDS[option]] * bool(value)
        elif option in OPTION_WORDS:
            words.append(f"{OPTION_WORDS[option]}={value}")
    return words


def _lookup(call: Call) -> tuple[str, ...]:
    """Write the look-up whose hit a call uses."""
    hit = hit_of(call)
    if hit is None:
        return ()
    return (f"get_computed_blocks {name_of(call.args[0])}", f"  {write_value(hit)[0]}")


def config_words(config: Config) -> str:
    """Write a config as a trace does, without the hash seed: keys are written as prefixes."""
    defaults = {field.name: field.default for field in attrs.fields(Config)}
    words = [f"config num_blocks={config.num_blocks}"]
    if config.groups == (Group(config.block_size),):
        words.append(f"block_size={config.block_size}")
    else:
        words.append(f"groups={','.join(map(group_words, config.groups))}")
    for name in CONFIG_WORDS:
        value = getattr(config, name)
        if value != defaults[name]:
            said = {True: "yes", False: "no"}[value] if isinstance(value, bool) else value
            if name == "floors":
                said = ",".join(f"{salt}:{size}" for salt, size in sorted(value.items()))
            words.append(f"{name}={said}")
    words += [f"hash_block_size={config.hash_unit}"] if config.hash_unit is not None else []
    return " ".join(words)


def group_words(group: Group) -> str:
    """Write a group as a trace does."""
    window = f":{group.window}" if group.window is not None else ""
    flags = "+eagle" * group.eagle + "+zero" * group.zero_new_blocks
    return f"{group.kind}:{group.block_size}{window}{flags}"
