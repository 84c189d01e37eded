# SPDX-License-Identifier: Apache-2.0
"""A pool whose free queue is ordered by an eviction policy (`types/policy.py`).

Invariants: free blocks without a key are in front, the one freed last first; then come those with a
key, ordered by place, and first in, first out among equal places. A free block that loses its key
moves to the front. So the queue is the order of leaving, unless a policy decides otherwise in
`take`. Blocks of older epochs have no place: they leave first, without a call of the policy.
Why: the queue stays a ring of links. `tails` has the last block of each place, so a block is
inserted after the tail of its own place or of the next lower one.
Twin: rust/src/pool/policy_pool.rs.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import attrs
from immutables import Map
from msgspec.structs import replace
from pyrsistent import pvector

from kvcore.pool.block_pool import BlockPool, PoolTransaction
from kvcore.pool.free_queue import OLDER
from kvcore.pool.policy_state import KEYLESS, PolicyState
from kvcore.types.effects import Effects
from kvcore.types.keys import HASH_SIZE
from kvcore.types.policies import policy_of
from kvcore.types.policy import (
    ORDERS_END,
    SECTIONS_END,
    USES_MAX,
    EvictionPolicy,
    Front,
    Place,
    Seen,
    Uses,
    failed,
    is_memory,
)

if TYPE_CHECKING:
    from kvcore.pool.floors import Spare


class PolicyTransaction(PoolTransaction):
    """A transaction on a pool that a policy orders. now: the number of the open batch."""

    __slots__ = (
        *("dues", "ghosts", "left", "lengths", "memory", "next_number", "now"),
        *("order", "places", "policy", "lasts", "uses"),
    )

    def __init__(self, pool: BlockPool, effects: Effects, now: int) -> None:
        super().__init__(pool, effects)
        policy, state = policy_of(pool.eviction), pool.policy
        assert policy is not None
        assert state is not None
        self.policy = policy
        self.now = now
        self.memory = state.memory
        self.places = state.places.evolver()
        self.order = [place for place, _ in state.tails]
        self.lasts = dict(state.tails)
        self.lengths = dict(state.lengths)
        self.dues = state.dues
        self.uses = state.uses
        self.ghosts = state.ghosts
        self.left = state.left
        self.next_number = state.next_number

    def freeze(self) -> BlockPool:
        """Return the pool as an immutable value."""
        old, new = self.pool.policy, super().freeze()
        places = self.places.persistent()
        assert old is not None
        same_order = new.queue is self.pool.queue and places is old.places
        same_uses = self.uses is old.uses and self.ghosts is old.ghosts
        if same_order and same_uses and self.memory == old.memory and self.dues is old.dues:
            return new if new is self.pool else attrs.evolve(new, policy=old)
        tails = tuple((place, self.lasts[place]) for place in self.order)
        state = PolicyState(
            self.memory,
            places,
            tails,
            Map(self.lengths),
            self.dues,
            self.uses,
            self.ghosts,
            self.left,
            self.next_number,
        )
        return attrs.evolve(new, policy=state)

    def seen(self, block: int) -> Seen:
        """Return a block with a key, as the policy sees it."""
        key = self.keys[block]
        assert key is not None
        dues, known = self.dues.get(key), self.uses.get(block)
        due, now = None if dues is None else dues[0], self.now + 1
        group_id = int.from_bytes(key[HASH_SIZE:], "big")
        if known is None:
            return Seen(block, group_id, now, due=due)
        counts = (known.uses, known.last, known.before, known.depth, known.place)
        return Seen(block, group_id, now, *counts, due)

    def _take_front(self, count: int) -> list[int]:
        blocks = []
        for _ in range(count):
            blocks.append(self._next())
            self._dequeue(blocks[-1])
        return blocks

    def _next(self, spare: Spare | None = None) -> int:
        """Return the block that leaves next, as the policy decides; of those that may be taken, if
        there are floors.
        """
        front = self.queue.front() if spare is None else super()._next(spare)
        takes = type(self.policy).take is not EvictionPolicy.take
        for _ in range(self.queue.length if takes and self.places[front] != KEYLESS else 0):
            fronts = tuple(self._fronts(spare))
            section, place = self._call_hook("take", fronts)
            chosen = next((each for each in fronts if each.section == section), None)
            if chosen is None:
                raise failed(self.policy, "take", f"names section {section!r}, which is empty")
            if place is None:
                return chosen.block.block
            self._move(chosen.block.block, self._checked("take", place))
        return self.queue.front() if spare is None else super()._next(spare)

    def _fronts(self, spare: Spare | None) -> Iterator[Front]:
        """Yield the front block of each section, of those that may be taken."""
        before = self.queue.sentinel()
        for section in sorted(self.lengths):
            front = self.queue.following[before]
            before = self.lasts[self.order[bisect_left(self.order, (section + 1, 0)) - 1]]
            while spare is not None and front != before and not spare.may_take(front):
                front = self.queue.following[front]
            if spare is None or spare.may_take(front):
                yield Front(section, self.seen(front), self.lengths[section])

    def _dequeue(self, block: int) -> None:
        place, before = self.places[block], self.queue.preceding[block]
        if place == KEYLESS and self.queue.first_ring() == OLDER:
            return super()._dequeue(block)
        if self.lasts[place] == block:
            if before != self.queue.sentinel() and self.places[before] == place:
                self.lasts[place] = before
            else:
                del self.lasts[place]
                del self.order[bisect_left(self.order, place)]
        self.places[block] = KEYLESS
        left = self.lengths.pop(place[0]) - 1
        if left:
            self.lengths[place[0]] = left
        return super()._dequeue(block)

    def _enqueue(self, block: int) -> None:
        """Put a block without owner into the place that the policy returns."""
        if block in self.older:
            super()._enqueue(block)
        else:
            self._put(block, self.place_of(block))

    def place_of(self, block: int, hook: str = "on_release") -> Place:
        """Ask the policy for the place of a block that becomes free, or whose due number
        changed.
        """
        if self.keys[block] is None:
            return KEYLESS
        return self._checked(hook, *self._call_hook(hook, self.seen(block)))

    def _put(self, block: int, place: Place) -> None:
        """Put a block after those of its place; a block without a key goes to the front."""
        self.places[block] = place
        if block in self.uses:
            self.uses = self.uses.set(block, replace(self.uses[block], place=place))
        self.lengths[place[0]] = self.lengths.get(place[0], 0) + 1
        index = bisect_right(self.order, place)
        before = self.lasts[self.order[index - 1]] if index else self.queue.sentinel()
        if place not in self.lasts:
            insort(self.order, place)
            self.lasts[place] = block
        elif place != KEYLESS:
            self.lasts[place] = block
        self.queue.insert(self.queue.sentinel() if place == KEYLESS else before, block)

    def _move(self, block: int, place: Place) -> None:
        self._dequeue(block)
        self._put(block, place)

    def publish(self, block: int, key: bytes, depth: int = 0) -> None:
        """Make a block findable under a key."""
        super().publish(block, key)
        if not self.policy.remembers:
            return
        known = self.ghosts.get(key)
        if known is None:
            self.uses = self.uses.set(block, Uses(1, self.now + 1, depth=depth))
        else:
            self._forget_ghost(key, known)
            self.uses = self.uses.set(block, replace(known, depth=depth, place=None, number=0))
            self._use(block)
            return
        self._call_hook("on_use", self.seen(block))

    def touch(self, block: int) -> None:
        """Add an owner; a block that had none leaves the free queue or the quarantine, and keeps
        its content.
        """
        super().touch(block)
        if block in self.uses:
            self._use(block)

    def _use(self, block: int) -> None:
        """Note that a content was hit, at most once per batch."""
        known = self.uses[block]
        if known.last == self.now + 1:
            return
        uses = min(known.uses + 1, USES_MAX)
        again = replace(known, uses=uses, last=self.now + 1, before=known.last)
        self.uses = self.uses.set(block, again)
        self._call_hook("on_use", self.seen(block))

    def _remember(self, block: int, key: bytes) -> None:
        """Remember the use of a content whose block loses its key, and forget the oldest one."""
        known = self.uses.get(block)
        if known is None:
            return
        self.uses = self.uses.delete(block)
        if key in self.ghosts:
            self._forget_ghost(key, self.ghosts[key])
        number = self.next_number
        self.ghosts = self.ghosts.set(key, replace(known, place=None, number=number))
        self.left, self.next_number = self.left.set(number, key), number + 1
        if len(self.ghosts) > len(self.keys):
            oldest = min(self.left)
            self._forget_ghost(self.left[oldest], self.ghosts[self.left[oldest]])

    def _forget_ghost(self, key: bytes, known: Uses) -> None:
        self.ghosts, self.left = self.ghosts.delete(key), self.left.delete(known.number)

    def unpublish(self, block: int) -> None:
        """Forget the key of a block, if any; a free block moves to the front."""
        key = self.keys[block]
        super().unpublish(block)
        if key is None:
            return
        self._remember(block, key)
        if block in self.queue:
            self._move(block, KEYLESS)

    def clear_index(self) -> None:
        """Forget every key; free blocks move to the front in their order of leaving."""
        cached = [block for block in self.queue if self.keys[block] is not None]
        super().clear_index()
        self.uses, self.ghosts, self.left = Map(), Map(), Map()
        for block in cached:
            self._move(block, KEYLESS)

    def start_epoch(self) -> None:
        """Forget every key; free blocks leave before all those freed later."""
        super().start_epoch()
        self.places = pvector([KEYLESS] * len(self.keys)).evolver()
        self.order, self.lasts, self.lengths = [], {}, {}
        self.uses, self.ghosts, self.left = Map(), Map(), Map()

    def wait(self, keys: Sequence[bytes], due: int) -> None:
        """Note that a waiting request will look up these keys, those of the prompt's end first."""
        for key in keys:
            old = self.dues.get(key, ())
            new = tuple(sorted((*old, due)))
            self.dues = self.dues.set(key, new)
            if new[0] != (old[0] if old else None):
                self._due_changed(key)

    def stop_waiting(self, keys: Sequence[bytes], due: int) -> None:
        """Undo `wait`."""
        for key in keys:
            old = self.dues[key]
            new = tuple(each for each in old if each != due)
            self.dues = self.dues.set(key, new) if new else self.dues.delete(key)
            if old[0] == due:
                self._due_changed(key)

    def _due_changed(self, key: bytes) -> None:
        """Ask the policy for new places of the free blocks of a key."""
        for block in self.index.blocks(key):
            if block in self.queue:
                self._move(block, self.place_of(block, "on_wait"))

    def _call_hook(self, hook: str, seen: Seen | Sequence[Front]) -> tuple[Any, ...]:
        """Call a policy's hook, keep its memory, and return the rest of its answer. Raises
        PolicyFailed.
        """
        try:
            answer = getattr(self.policy, hook)(self.memory, seen)
        except Exception as error:
            raise failed(self.policy, hook, error) from error
        parts = (answer,) if hook == "on_use" else answer
        size = {"on_use": 1, "take": 3}.get(hook, 2)
        if not isinstance(parts, tuple) or len(parts) != size or not is_memory(parts[0]):
            raise failed(self.policy, hook, f"answers {answer!r}")
        self.memory = parts[0]
        return parts[1:]

    def _checked(self, hook: str, place: Any) -> Place:
        """Check a place that a policy returned. Raises PolicyFailed."""
        if not (
            isinstance(place, tuple)
            and len(place) == 2
            and all(type(each) is int for each in place)
            and 0 < place[0] < SECTIONS_END
            and 0 <= place[1] < ORDERS_END
        ):
            raise failed(self.policy, hook, f"returns {place!r}, which is not a place")
        return place
