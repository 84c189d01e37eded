# SPDX-License-Identifier: Apache-2.0
"""The interface of an eviction policy: what it sees and what it returns.

Invariants: a policy is called only for free blocks with a key, since those without leave first. It
sees only numbers, no tokens, keys or commands. Its hooks are pure: its memory is a tuple of
integers that each hook gets and returns, so a state is a value under any policy.

Why: a policy only decides the place of a block. The pool keeps the order, so a bad policy can cost
hits, and nothing else.
In Rust the policies are variants of an enum: rust/src/types/policies.rs.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

from kvcore.types.pool_errors import PolicyFailed

Memory = tuple[int, ...]
Place = tuple[int, int]
"""Section and order: the lowest leaves first; equal ones leave in the order in which they came."""

SECTIONS_END = 2**8 - 1
ORDERS_END = 2**56
USES_MAX = 2**32 - 1
FIRST_SECTION = 1


class Seen(Struct, frozen=True, gc=False):
    """A block as a policy sees it.

    now: the number of the open batch, plus one. uses: number of batches in which the content was
    computed or hit, up to 2**32 - 1. last, before: `now` at the latest two uses, 0 for none. depth:
    its position in the table for which it was computed. place: its place in the queue, or the last
    one that it had; None if it was never free. These five are known only if the policy `remembers`.
    due: arrival number of the first waiting request that will look the content up; None if there is
    none, or if the policy does not have `sees_waiting`.
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
    """The use of a content, with the fields of `Seen`. number: of an evicted content, in the order
    of eviction.
    """

    uses: int
    last: int
    before: int = 0
    depth: int = 0
    place: Place | None = None
    number: int = 0


class Front(Struct, frozen=True, gc=False):
    """A section with blocks: its number, its front, and its number of blocks."""

    section: int
    block: Seen
    length: int


class EvictionPolicy:
    """Decides which free block with a key leaves first; default: the one that came first.

    remembers: whether uses are counted, also those of evicted contents, up to the number of the
    pool's blocks. sees_waiting: whether `due` is known.
    """

    remembers = False
    sees_waiting = False

    def start(self, num_blocks: int) -> Memory:
        """Return the memory for an empty pool of this size."""
        del num_blocks
        return ()

    def on_use(self, memory: Memory, block: Seen) -> Memory:
        """Note that a content was hit or computed; a reuse if `uses` is above 1."""
        del block
        return memory

    def on_release(self, memory: Memory, block: Seen) -> tuple[Memory, Place]:
        """Return the place of a block that became free. Sections are below 255, orders
        below 2**56.
        """
        del block
        return memory, (FIRST_SECTION, 0)

    def on_wait(self, memory: Memory, block: Seen) -> tuple[Memory, Place]:
        """Return the new place of a free block whose due number changed."""
        return self.on_release(memory, block)

    def take(self, memory: Memory, fronts: Sequence[Front]) -> tuple[Memory, int, Place | None]:
        """Return the section whose front leaves. With a place, the front moves there instead, and
        the policy is called again.
        """
        return memory, fronts[0].section, None


def is_memory(value: object) -> bool:
    """Return whether a value can be a policy's memory: a tuple of unsigned 64-bit integers."""
    if not isinstance(value, tuple):
        return False
    return all(type(each) is int and 0 <= each < 2**64 for each in value)


def failed(policy: EvictionPolicy, hook: str, reason: str | Exception) -> PolicyFailed:
    """Make the error that names a policy and its failed hook."""
    if isinstance(reason, Exception):
        reason = f"raised {type(reason).__name__}: {reason}"
    return PolicyFailed(policy=type(policy).__name__, hook=hook, reason=reason)
