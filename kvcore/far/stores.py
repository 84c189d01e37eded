# SPDX-License-Identifier: Apache-2.0
"""Choose the blocks that an engine stores in its far tier, and store them.

The batch after the one that wrote a block copies it into a slot; from then on the block does not
depend on the tier, whose answer only changes the counts. A block without a slot is not stored.
"""

from __future__ import annotations

from collections import OrderedDict

import attrs

from kvcore.errors import KvcoreError
from kvcore.far.engine import FarEngine, FarSequence
from kvcore.far.fetches import BATCH_PAGES
from kvcore.far.known import KnownNames
from kvcore.far.link import Ended, TierLink
from kvcore.far.options import FarOptions
from kvcore.far.page import PageOwner
from kvcore.far.slots import Slots
from kvcore.far.tier import FarStatus
from kvcore.types.groups import skipped_blocks

NUM_SEEN_MAX = 32
"""Number of keys per block of the pool that the policy "second_use" remembers."""


@attrs.frozen
class _Store:
    """A store of a batch."""

    name: str
    slot: int
    batch: int
    place: PageOwner


class Stores:
    """The stores of an engine: those in batches, and those handed to the tier."""

    def __init__(
        self,
        engine: FarEngine,
        link: TierLink,
        staging: Slots,
        options: FarOptions,
        known: KnownNames,
    ) -> None:
        self._engine = engine
        self._link = link
        self._staging = staging
        self._options = options
        self._operations: dict[int, _Store] = {}
        self._copied: list[_Store] = []
        # The first block of each group that `look` has not handled yet, by sequence.
        self._next: dict[str, list[int]] = {}
        self._known = known
        # The age of the first sequence that used a block, by its key.
        self._seen: OrderedDict[bytes, tuple[int, int]] = OrderedDict()
        self._num_seen_max = NUM_SEEN_MAX * engine.manager.config.num_blocks

    @property
    def is_copying(self) -> bool:
        """Whether a batch has yet to copy blocks."""
        return bool(self._operations)

    @property
    def held(self) -> list[int]:
        """The slots of blocks that are being copied, or were and are not handed to the tier yet."""
        return self.copying + [each.slot for each in self._copied]

    @property
    def copying(self) -> list[int]:
        """The slots that batches have yet to fill."""
        return [each.slot for each in self._operations.values()]

    def owns(self, operation: int) -> bool:
        """Return whether an operation is a store."""
        return operation in self._operations

    def look(self, sequence: FarSequence) -> None:
        """Store the new blocks of a running sequence, none of which the open batch may write."""
        place, manager, name = self._link.place, self._engine.manager, sequence.sequence_id
        if place is None or not self._link.is_up:
            return
        num_computed = manager.num_computed_tokens(name)
        end = min(num_computed, manager.num_tokens(name))
        groups = manager.config.groups
        starts = self._next.setdefault(name, [0] * len(groups))
        ends = [end // group.block_size for group in groups]
        if all(start >= stop for start, stop in zip(starts, ends, strict=True)):
            return
        keys = manager.get_block_keys(name)
        for index, (group, own) in enumerate(zip(groups, keys, strict=True)):
            behind = skipped_blocks(group, num_computed)
            for position in range(starts[index], min(ends[index], len(own))):
                if not self._take(own[position], sequence) and position >= behind:
                    break  # it is published later
                starts[index] = position + 1

    def end(self, operation: int, done: bool) -> None:
        """Note that a batch copied a block, or failed to."""
        store = self._operations.pop(operation)
        self._staging.unmark(store.slot)  # else a later store of this key would copy into it
        if done:
            self._copied.append(store)
        else:
            self._drop(store, "not copied")

    def submit(self) -> None:
        """Hand the copied blocks to the tier."""
        copied, self._copied = self._copied, []
        for first in range(0, len(copied), BATCH_PAGES):
            part = copied[first : first + BATCH_PAGES]
            names, slots = [each.name for each in part], [each.slot for each in part]
            if self._link.store(names, slots, self._options.store_timeout_s) is None:
                for each in part:
                    self._drop(each, "busy" if self._link.is_up else "down")

    def answered(self, ended: Ended) -> None:
        """Process the end of a store."""
        ticket = ended.ticket
        if ended.statuses is None:
            for name in ticket.names:
                self._known.discard(name)
            return
        for name, slot, status in zip(ticket.names, ticket.slots, ended.statuses, strict=True):
            self._staging.give_back(slot)
            if status is not FarStatus.OK:
                self._known.discard(name)

    def cancelled(self, number: int, reported: set[int]) -> list[int]:
        """Give up the stores of the batches from this number on. Returns the failed operations.

        reported: operations whose end will still be reported; they are not given up.
        """
        failed = [
            operation
            for operation, store in self._operations.items()
            if store.batch >= number and operation not in reported
        ]
        for operation in failed:
            self._drop(self._operations.pop(operation), "cancelled")
        self._next.clear()
        return failed

    def forget(self, name: str) -> None:
        """Forget a sequence that ends, or that computes its blocks again."""
        self._next.pop(name, None)

    def _take(self, key: bytes, sequence: FarSequence) -> bool:
        """Store the block of a key if the policy says so. Returns False to try again later."""
        if self._options.store_policy == "second_use":
            first = self._seen.setdefault(key, sequence.age)
            self._seen.move_to_end(key)
            if len(self._seen) > self._num_seen_max:
                self._seen.popitem(last=False)
            if first == sequence.age:
                return True
        return self._store(key)

    def _store(self, key: bytes) -> bool:
        """Store the block of a key unless the tier has it. Returns False to try again later."""
        place = self._link.place
        assert place is not None
        name = place.name(key)
        under_way = (*self._operations.values(), *self._copied)
        if name in self._known or any(each.name == name for each in under_way):
            return True
        block = self._engine.manager.get_cached_block(key)
        others = any(each.place != place for each in self._operations.values())
        if block is None or others:  # a slot's mark names a key but no place
            return False
        slots = self._staging.take("store", 1)
        if not slots:
            self._link.counts.dropped["no slot to store"] += 1
            return True
        try:
            (operation,) = self._engine.manager.store([block])
        except KvcoreError:  # the open batch writes it, or it depends on a load
            self._staging.give_back(slots[0])
            return False
        self._staging.mark(slots[0], key, place.identity)
        self._operations[operation] = _Store(name, slots[0], self._engine.open_number, place)
        self._known.add(name)
        return True

    def _drop(self, store: _Store, why: str) -> None:
        self._staging.give_back(store.slot)
        self._known.discard(store.name)
        self._link.counts.dropped[why] += 1
