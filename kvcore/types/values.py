# SPDX-License-Identifier: Apache-2.0
"""Arguments and results of calls: requests, hits, blocks, refusals, statistics.

Invariants: all values are frozen and compare by content. A refusal is one of these values, and
false in a condition.
Twin: rust/src/types/values.rs.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar, final, overload

import attrs
from msgspec import Struct

from kvcore.types.commands import Command
from kvcore.types.extra_inputs import LoRA, MediaItem, PromptEmbeds

if TYPE_CHECKING:
    from kvcore.types.retention import KvCacheRetentionConfig

S = TypeVar("S")
T = TypeVar("T")


class Reason(enum.Enum):
    """Why a call was refused."""

    LATER = "later"
    """Retry after blocks have been given back."""
    NEVER = "never"
    """Even an empty pool could not give this many blocks and keep those that must stay free
    (watermark, reserve).
    """


class Verdict(enum.Enum):
    """The answer of `can_allocate`."""

    OK = "ok"
    LATER = "later"
    NEVER = "never"


class Status(enum.Enum):
    """The tier of a request's blocks."""

    WAITING = "waiting"
    RUNNING = "running"
    SWAPPED = "swapped"


@attrs.frozen
class Request:
    """A request as an engine passes it.

    tokens: a list or tuple of ints below 2**32, or a buffer of integers (array, numpy, torch on the
    CPU, bytes); the buffer's item format decides the width. lora, media (sorted by offset),
    cache_salt, prompt_embeds: parts of the request's keys besides its tokens. block_hashes: the
    engine's own hashes of full blocks, 32 bytes each, in order, which must then cover all of these,
    the salt too; None: kvcore hashes.

    skip_reading_prefix_cache: never hit, but publish. retention: how long its content should stay
    cached under `eviction="retention"`; no effect under other policies.
    """

    request_id: str
    tokens: Any
    lora: LoRA | None = attrs.field(default=None, kw_only=True)
    media: Sequence[MediaItem] = attrs.field(default=(), kw_only=True)
    cache_salt: str | None = attrs.field(default=None, kw_only=True)
    prompt_embeds: PromptEmbeds | None = attrs.field(default=None, kw_only=True)
    block_hashes: Sequence[bytes] | None = attrs.field(default=None, kw_only=True)
    skip_reading_prefix_cache: bool = attrs.field(default=False, kw_only=True)
    retention: KvCacheRetentionConfig | None = attrs.field(default=None, kw_only=True)


class KVCacheBlocks(Struct, frozen=True, gc=False, eq=False):
    """Block ids, per group in table order; 0 is the null block if there is one.

    groups: the ids of each group; the twin's are bytes, native uint32s, of which `blocks` makes
    ints. Comparisons are of `blocks`.
    """

    groups: tuple[tuple[int, ...] | bytes, ...]

    @property
    def blocks(self) -> tuple[tuple[int, ...], ...]:
        """The ids, one tuple per group; the twin's are made by each access."""
        return tuple(
            [
                tuple(memoryview(ids).cast("I")) if isinstance(ids, bytes) else ids
                for ids in self.groups
            ]
        )

    if TYPE_CHECKING:  # true without a call; the type lets a type checker narrow `if got:`

        def __bool__(self) -> Literal[True]: ...

    def __add__(self, other: KVCacheBlocks) -> KVCacheBlocks:
        """Concatenate the blocks of both, group by group."""
        pairs = zip(self.blocks, other.blocks, strict=True)
        return KVCacheBlocks(tuple(mine + theirs for mine, theirs in pairs))

    @overload
    def get_block_ids(self, allow_none: Literal[False] = False) -> tuple[list[int], ...]: ...
    @overload
    def get_block_ids(self, allow_none: bool) -> tuple[list[int], ...] | None: ...
    def get_block_ids(self, allow_none: bool = False) -> tuple[list[int], ...] | None:
        """Return one list of ids per group; None if `allow_none` is set and no group has blocks."""
        if allow_none and not any(self.blocks):
            return None
        return tuple(list(ids) for ids in self.blocks)

    def get_unhashed_block_ids(self, has_key: Callable[[int], bool]) -> tuple[list[int], ...]:
        """Return the ids of the blocks without a key, one list per group. has_key: the manager's
        method.
        """
        return tuple([block for block in ids if not has_key(block)] for ids in self.blocks)

    def new_empty(self) -> KVCacheBlocks:
        """Return an instance without blocks, with the same number of groups."""
        return KVCacheBlocks(((),) * len(self.groups))

    def __eq__(self, other: object) -> bool:
        return self.blocks == other.blocks if isinstance(other, KVCacheBlocks) else NotImplemented

    def __ne__(self, other: object) -> bool:  # a Struct has its own
        return not self == other

    def __hash__(self) -> int:
        return hash(self.blocks)

    def __repr__(self) -> str:
        return f"KVCacheBlocks(blocks={self.blocks!r})"


class Hit(Struct, frozen=True, gc=False):
    """A cached prefix of a request: its blocks per group, and the tokens that they hold.

    num_common: the tokens that the groups other than state groups find, 0 without state groups. A
    state after them would make the hit that long.
    """

    blocks: KVCacheBlocks
    num_tokens: int
    num_common: int = 0

    def __iter__(self) -> Iterator[Any]:
        return iter((self.blocks, self.num_tokens))


@final
class Refused(Struct, frozen=True, gc=False):
    """The refusal of a call that did not fit. The call has changed nothing but window trims.

    needed: blocks that the call would take from the free queue. available: free blocks, less those
    that the call must leave. pending: released blocks that wait for an unfinished operation or
    batch.
    """

    reason: Reason
    needed: int
    available: int
    pending: int = 0

    def __bool__(self) -> Literal[False]:
        return False


@final
class Swapped(Struct, frozen=True, gc=False):
    """The distinct blocks that a swap copied to the other tier or found there."""

    num_copied: int
    num_found: int

    if TYPE_CHECKING:  # as in KVCacheBlocks

        def __bool__(self) -> Literal[True]: ...


class Appended(Struct, frozen=True, gc=False, eq=False):
    """The progress of an `append`: requests from the refused one on are unchanged. False if one was
    refused, as `Refused` itself is.

    columns: the bytes of `grown`, ignored in comparisons.
    """

    done: int
    refused: Refused | None = None
    columns: bytes = b""

    @property
    def grown(self) -> tuple[memoryview, ...]:
        """The places of tables that the call set, as four int32 columns with a row per `SetTable`,
        in order: the request's index in the call's list, group, position, block. Block 0 replaces a
        block that a window gave back.
        """
        columns = memoryview(self.columns).cast("i")
        size = len(columns) // 4
        return tuple(columns[start * size : (start + 1) * size] for start in range(4))

    def __bool__(self) -> bool:
        return self.refused is None

    def __repr__(self) -> str:
        return f"Appended(done={self.done!r}, refused={self.refused!r})"

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Appended):
            return NotImplemented
        return (self.done, self.refused) == (other.done, other.refused)

    def __ne__(self, other: object) -> bool:  # a Struct has its own
        return not self == other

    def __hash__(self) -> int:
        return hash((self.done, self.refused))


class PrefixCacheStats(Struct, frozen=True, gc=False):
    """Look-ups since the last `take_stats`, counted with the allocation that used them.

    queries and hits are tokens. Requests that were preempted before are counted separately. reset:
    whether the cache was reset meanwhile.
    """

    requests: int = 0
    queries: int = 0
    hits: int = 0
    preempted_requests: int = 0
    preempted_queries: int = 0
    preempted_hits: int = 0
    reset: bool = False

    @property
    def hit_rate(self) -> float:
        """Hit tokens over queried tokens of new requests, 0.0 without queries."""
        return self.hits / self.queries if self.queries else 0.0


class Outcome(Struct, Generic[S, T], frozen=True, gc=False):
    """The result of a transition: the new state, the commands that it emitted, and its value."""

    state: S
    commands: tuple[Command, ...]
    value: T
