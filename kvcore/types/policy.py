# SPDX-License-Identifier: Apache-2.0
"""An eviction policy: what it sees, and what it answers.

Invariants: a policy is asked only about free blocks with a key, since those without leave first. It
sees numbers: no tokens, keys or commands. Its hooks are pure: what it remembers is its memory, a
tuple of integers that each hook gets and returns, so a state is a value under any policy.
Why: a policy only says where a block stands. The pool keeps the order, so a policy may cost hits,
and nothing else.
In Rust the policies are variants of an enum: rust/src/types/policies.rs.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

from kvcore.types.base_error import PolicyFailed

Memory = tuple[int, ...]
Place = tuple[int, int]
"""Section and order: the lowest leaves first, of equal ones the one that came first."""

SECTIONS_END = 2**8 - 1
ORDERS_END = 2**56
USES_MAX = 2**32 - 1
FIRST_SECTION = 1


class Seen(Struct, frozen=True, gc=False):
    """What a policy sees of a block.

    now: the number of the open batch and one. uses: batches in which the content was computed or
    found, up to 2**32 - 1. last, before: the latest two of them, as `now` was then, 0 for none.
    depth: its place in the table that it was computed for. place: where it stands, or stood when it
    was free last, None if it was not yet. Those five are known if the policy `remembers`. due: the
    number of the first waiting request that will look the content up, in the order of arrival; None
    if none will, and unless the policy `sees_waiting`.
    """

    block: int
    group_id: int
    now: int
    uses: int = 0
    last: int = 0
    before: int = 0
    depth: int = 0
    place: Place | None = None
    due: int | None = None


class Uses(Struct, frozen=True, gc=False):
    """How a content was used, as `Seen` says. number: of one that left, in the order of leaving."""

    uses: int
    last: int
    before: int = 0
    depth: int = 0
    place: Place | None = None
    number: int = 0


class Front(Struct, frozen=True, gc=False):
    """A section that has blocks: its number, its front, and how many blocks it has."""

    section: int
    block: Seen
    length: int


class EvictionPolicy:
    """Which free block with a key leaves first; the one that came first, unless overridden.

    remembers: uses are counted, also of contents that left, up to the number of the pool's blocks.
    sees_waiting: `due` is known.
    """

    remembers = False
    sees_waiting = False

    def start(self, num_blocks: int) -> Memory:
        """The memory of an empty pool of this size."""
        del num_blocks
        return ()

    def on_use(self, memory: Memory, block: Seen) -> Memory:
        """A content was found, or computed: again, if `uses` is above 1."""
        del block
        return memory

    def on_release(self, memory: Memory, block: Seen) -> tuple[Memory, Place]:
        """A block became free: where it stands. Sections are below 255, orders below 2**56."""
        del block
        return memory, (FIRST_SECTION, 0)

    def on_wait(self, memory: Memory, block: Seen) -> tuple[Memory, Place]:
        """A free block got another due number: where it stands now."""
        return self.on_release(memory, block)

    def take(self, memory: Memory, fronts: Sequence[Front]) -> tuple[Memory, int, Place | None]:
        """The section whose front leaves. With a place, the front goes there and stays, and the
        policy is asked again.
        """
        return memory, fronts[0].section, None


def is_memory(value: object) -> bool:
    """Whether a value can be a policy's memory: a tuple of integers of 64 bits, none below 0."""
    if not isinstance(value, tuple):
        return False
    return all(type(each) is int and 0 <= each < 2**64 for each in value)


def failed(policy: EvictionPolicy, hook: str, reason: str | Exception) -> PolicyFailed:
    """The error that names a policy and the hook that it got wrong."""
    if isinstance(reason, Exception):
        reason = f"raised {type(reason).__name__}: {reason}"
    return PolicyFailed(policy=type(policy).__name__, hook=hook, reason=reason)
