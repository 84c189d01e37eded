# SPDX-License-Identifier: Apache-2.0
"""How traces write tokens, keys, commands, events and values.

One line states one thing; consecutive commands of one kind (and, for table changes, of one row and
group) share a line. A content key is written as the tokens of its prefix in parentheses, then its
extra keys after `;`, then `@group` in every group except the first.
Twin: rust/src/trace/text.rs.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from itertools import groupby

from kvcore.state.state import NO_HOST_BLOCK, State
from kvcore.types.commands import (
    Command,
    CopyOnWrite,
    CutTable,
    Evict,
    Free,
    Load,
    SetTable,
    Store,
    SwapIn,
    SwapOut,
)
from kvcore.types.errors import KvcoreError
from kvcore.types.events import AllBlocksCleared, BlockRemoved, BlockStored, Event
from kvcore.types.extra_inputs import ExtraKeys
from kvcore.types.keys import HASH_SIZE
from kvcore.types.values import Appended, Hit, KVCacheBlocks, PrefixCacheStats, Refused, Swapped

TOKENS_MAX = 2**16
"""Most tokens of one word, since the tokens of a trace are held in memory."""
_UNSIGNED, _SIGNED = re.compile(r"\+?[0-9]{1,999}"), re.compile(r"[+-]?[0-9]{1,999}")


class TraceNames:
    """The prefix that each block hash stands for, learnt from requests."""

    def __init__(self) -> None:
        self._prefixes: dict[bytes, str] = {}

    def learn(self, state: State) -> None:
        """Learn the hashes of all requests of a state."""
        size = state.config.hash_block_size
        for request in state.requests.values():
            for position, block_hash in enumerate(request.block_hashes):
                prefix = request.tokens[: (position + 1) * size]
                marks = write_marks(request.extra_keys, len(prefix))
                self._prefixes.setdefault(block_hash, f"({write_tokens(prefix)}{marks})")

    def block_hash(self, block_hash: bytes) -> str:
        """Write the prefix of a block hash."""
        return self._prefixes[block_hash]

    def key(self, key: bytes) -> str:
        """Write the prefix of a key, and its group unless that is the first."""
        group_id = int.from_bytes(key[HASH_SIZE:], "big")
        return self.block_hash(key[:HASH_SIZE]) + (f"@{group_id}" if group_id else "")


class BadWord(ValueError):
    """A word cannot be read."""


def read_number(text: str) -> int:
    """Read a decimal integer of 64 bits. Raises BadWord."""
    if not _SIGNED.fullmatch(text) or not -(2**63) <= int(text) < 2**63:
        raise BadWord(f"{text!r} is not an integer of 64 bits")
    return int(text)


def read_u32(text: str) -> int:
    """Read an unsigned decimal integer of 32 bits. Raises BadWord."""
    if not _UNSIGNED.fullmatch(text) or int(text) >= 2**32:
        raise BadWord(f"{text!r} is not an unsigned integer of 32 bits")
    return int(text)


def read_tokens(text: str) -> list[int]:
    """Read tokens such as `0-9,100`, at most TOKENS_MAX. Raises BadWord."""
    tokens: list[int] = []
    for part in text.split(","):
        first, dash, last = part.partition("-")
        run = range(read_u32(first), read_u32(last if dash else first) + 1)
        if len(tokens) + len(run) > TOKENS_MAX:
            raise BadWord(f"there are more than {TOKENS_MAX} tokens")
        tokens.extend(run)
    return tokens


def write_tokens(tokens: Iterable[int]) -> str:
    """Write the shortest text that `read_tokens` reads as these tokens."""
    parts = []
    for _, run in groupby(enumerate(tokens), key=lambda item: item[1] - item[0]):
        values = [token for _, token in run]
        parts.append(str(values[0]) if len(values) == 1 else f"{values[0]}-{values[-1]}")
    return ",".join(parts)


def write_marks(extra_keys: ExtraKeys, num_tokens: int) -> str:
    """Write the extra keys of a prefix, each after `;`."""
    marks = [] if extra_keys.lora is None else [f"lora={extra_keys.lora.name}"]
    media = (item for item in extra_keys.media if item.offset < num_tokens)
    for item in media:
        cut = item.end == extra_keys.media_cut_at and item.end < num_tokens
        kind = "cut-media" if cut else "media"
        marks.append(f"{kind}={item.identifier}@{item.offset}+{item.length}")
    if extra_keys.cache_salt is not None:
        marks.append(f"salt={extra_keys.cache_salt}")
    if extra_keys.embeds:
        cut = extra_keys.rows_cut and extra_keys.num_rows < num_tokens
        marks.append(f"cut-embeds={extra_keys.num_rows}" if cut else "embeds")
    return "".join(f";{mark}" for mark in marks)


def write_ids(ids: Iterable[int]) -> str:
    """Write block ids in order, `null` for the null block; `none` for an empty list."""
    return " ".join("null" if block == NO_HOST_BLOCK else str(block) for block in ids) or "none"


def write_blocks(blocks: KVCacheBlocks) -> str:
    """Write the block ids of all groups."""
    return " | ".join(write_ids(ids) for ids in blocks.blocks)


def write_value(value: object) -> list[str]:
    """Write the line of a call's value; no line for None."""
    match value:
        case None:
            return []
        case bool():
            return ["= yes" if value else "= no"]
        case KVCacheBlocks():
            return [f"= blocks {write_blocks(value)}"]
        case Hit():
            more = value.num_common > value.num_tokens
            common = f", {value.num_common} without states" if more else ""
            return [f"= hit {write_blocks(value.blocks)}, {value.num_tokens} tokens{common}"]
        case Refused():
            return [f"= {write_refused(value)}"]
        case Swapped():
            return [f"= swapped: copied {value.num_copied} found {value.num_found}"]
        case Appended():
            behind = f", {write_refused(value.refused)}" if value.refused is not None else ""
            return [f"= done {value.done}{behind}"]
        case PrefixCacheStats():
            fresh = (value.requests, value.queries, value.hits)
            again = (value.preempted_requests, value.preempted_queries, value.preempted_hits)
            line = "requests {} queries {} hits {}"
            return [f"= {line.format(*fresh)}", f"= preempted {line.format(*again)}"]
        case _:
            return [f"= {value}"]


def write_refused(refused: Refused) -> str:
    """Write a refusal with its numbers."""
    pending = f" pending {refused.pending}" if refused.pending else ""
    reason = refused.reason.value
    return f"refused {reason}: needed {refused.needed} available {refused.available}{pending}"


def write_error(error: KvcoreError) -> list[str]:
    """Write the line of a misuse, with its fields in the order in which the error names them."""
    fields = "".join(f" {name}={write_field(value)}" for name, value in error.fields.items())
    return [f"= error {type(error).__name__}{fields}"]


def write_field(value: object) -> str:
    """Write one field of an error; a list as its items with commas."""
    return ",".join(str(item) for item in value) if isinstance(value, list) else str(value)


def write_commands(commands: Sequence[Command], names: TraceNames) -> list[str]:
    """Write the lines of commands, in order."""
    return [
        f"! {head} {' '.join(_write_item(command, names) for command in run)}".rstrip()
        for head, run in groupby(commands, key=_head)
    ]


def _head(command: Command) -> str:
    name = type(command).__name__
    if isinstance(command, SetTable | CutTable):
        group_id = f" group {command.group_id}" if command.group_id else ""
        return f"{name} row {command.row}{group_id}:"
    return f"{name} cached" if isinstance(command, Free) and command.cached else name


def _write_item(command: Command, names: TraceNames) -> str:
    match command:
        case SetTable():
            return f"{command.position}={command.block}"
        case CutTable():
            return str(command.length)
        case Evict():
            return f"{command.block}{names.key(command.key)}"
        case CopyOnWrite():
            return f"{command.source}>{command.target}"
        case SwapOut():
            return f"{command.block}>host:{command.host_block}"
        case Store():
            return f"{command.operation}:{command.block}{names.key(command.key)}"
        case Load():
            return f"{command.operation}:{names.key(command.key)}>{command.block}"
        case SwapIn():
            return f"host:{command.host_block}>{command.block}"
        case _:
            block = getattr(command, "block", None)
            return "" if block is None else str(block)


def write_events(events: Sequence[Event], names: TraceNames) -> list[str]:
    """Write the lines of events, in order."""
    return [f"* {_write_event(event, names)}" for event in events]


def _write_event(event: Event, names: TraceNames) -> str:
    match event:
        case BlockStored():
            stored = " ".join(names.block_hash(each) for each in event.block_hashes)
            after = (
                "" if event.parent_hash is None else f" after {names.block_hash(event.parent_hash)}"
            )
            group_id = f" group {event.group_id}" if event.group_id else ""
            epoch = f" epoch {event.epoch}" if event.epoch else ""
            return f"stored {stored}{after} tokens {write_tokens(event.tokens)}{group_id}{epoch}"
        case BlockRemoved():
            group_id = f" group {event.group_id}" if event.group_id else ""
            return f"removed {names.block_hash(event.block_hash)}{group_id}"
        case AllBlocksCleared():
            return "cleared"
