# SPDX-License-Identifier: Apache-2.0
"""Keeps blocks of prompts and answers in a directory, and loads them for later prompts.

A sequence's blocks are stored when its prompt is computed, before they leave its windows, and when
it ends. A prompt gets the longest prefix whose blocks are in the directory for every group,
ignoring those that have left a window. A failed load is not retried for that sequence: the rest is
computed. Operations are completed after their batch was executed or cancelled; a sequence may end
earlier, and its blocks stay held until then.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvcore import Hit, Refused
from kvcore.types.groups import skipped_blocks
from kvcore_runtime.cache.directory import DirectoryTier
from kvcore_runtime.cache.errors import TierError
from kvcore_runtime.engine.exchange import Exchange, is_null
from kvcore_runtime.engine.sequence import Sequence

if TYPE_CHECKING:
    from kvcore_runtime.engine.engine import Engine


class DirectoryExchange(Exchange):
    """An engine's stores to, and loads from, one directory.

    num_stored, num_loaded: blocks so far, including those that were already in the directory;
    num_written: without these. errors: of the failed operations, in order.
    """

    takes_prompts = True

    def __init__(self, engine: Engine, tier: DirectoryTier) -> None:
        self._engine = engine
        self._tier = tier
        engine.runtime.external = tier
        self._stores: dict[int, bytes] = {}  # the key of each
        self._loads: dict[int, Sequence | None] = {}  # None: its sequence continues without it
        self._batches: dict[int, int] = {}  # the batch of each operation
        self._tried: set[str] = set()
        self._kept: dict[str, set[int]] = {}  # blocks stored for a sequence
        self.num_stored = 0
        self.num_loaded = 0
        self.errors: list[TierError] = []

    @property
    def num_written(self) -> int:
        """Number of blocks stored so far that were not in the directory before."""
        return self._tier.num_written

    @property
    def is_busy(self) -> bool:
        """See `Exchange`."""
        return bool(self._stores or self._loads)

    def begin(self, sequence: Sequence, hit: Hit) -> int | Refused:
        """See `Exchange`."""
        name = sequence.sequence_id
        if name in self._tried:
            return 0
        num_tokens = self._find(sequence, hit.num_tokens)
        if num_tokens == 0:
            return 0
        got = self._engine.manager.load(name, num_tokens, hit, full_sequence_must_fit=True)
        if isinstance(got, Refused):
            return got
        self._tried.add(name)
        self._loads |= dict.fromkeys(got, sequence)
        self._batches |= dict.fromkeys(got, self._engine.open_number)
        return num_tokens

    def poll(self) -> list[Sequence]:
        """See `Exchange`."""
        touched: list[Sequence] = []
        for each in self._engine.take_finished():
            del self._batches[each.operation]
            self._engine.manager.complete_operation(each.operation, each.done)
            if each.error is not None:
                self.errors.append(each.error)
            if each.operation in self._stores:
                del self._stores[each.operation]
                self.num_stored += each.done
                continue
            sequence = self._loads.pop(each.operation)
            self.num_loaded += each.done
            if sequence is not None and sequence not in touched:
                touched.append(sequence)
        unfinished = self._loads.values()
        return [sequence for sequence in touched if sequence not in unfinished]

    def cancelled(self, number: int) -> list[Sequence]:
        """See `Exchange`. Operations that have run are reported by `poll`; the others failed."""
        heard = {each.operation for each in self._engine.finished}
        lost: list[Sequence] = []
        for operation, batch in list(self._batches.items()):
            if batch < number:
                continue
            sequence = self._loads.get(operation)
            if sequence is not None:
                self._loads[operation] = None
                if sequence not in lost:
                    lost.append(sequence)
            if operation not in heard:
                del self._batches[operation]
                self._stores.pop(operation, None)
                self._loads.pop(operation, None)
                self._engine.manager.complete_operation(operation, False)
        self._tried.difference_update(each.sequence_id for each in lost)
        self._kept.clear()
        return lost

    def prompt_computed(self, sequence: Sequence) -> None:
        """See `Exchange`: store the blocks of the sequence that others may hit."""
        manager, name = self._engine.manager, sequence.sequence_id
        kept = self._kept.setdefault(name, set())
        tables, keys = manager.get_block_ids(name), manager.get_block_keys(name)
        stored = {
            block: key
            for table, own in zip(tables, keys, strict=True)
            for block, key in zip(table, own, strict=False)  # the last block may not be full
            if block not in kept and not is_null(manager.config, block) and manager.has_key(block)
        }
        kept.update(stored)
        operations = manager.store(list(stored))
        self._stores |= zip(operations, stored.values(), strict=True)
        self._batches |= dict.fromkeys(operations, self._engine.open_number)

    finished = prompt_computed

    def forget(self, sequence: Sequence) -> None:
        """See `Exchange`."""
        self._tried.discard(sequence.sequence_id)
        self._kept.pop(sequence.sequence_id, None)
        for operation, waiting in self._loads.items():
            if waiting is sequence:
                self._loads[operation] = None

    def _find(self, sequence: Sequence, start: int) -> int:
        """Return how many tokens after the first `start` ones the directory has for all groups."""
        manager = self._engine.manager
        keys, alignment = manager.get_block_keys(sequence.sequence_id), manager.config.hit_alignment
        sizes = (group.block_size for group in manager.config.groups)
        full = min(len(own) * size for own, size in zip(keys, sizes, strict=True))
        end = min(sequence.num_tokens - 1, full) // alignment * alignment
        while end > start:
            missing = self._first_missing(keys, start, end)
            if missing is None:
                return end - start
            # Every end after the first missing block needs that block, even with a window.
            end = missing // alignment * alignment
        return 0

    def _first_missing(
        self, keys: tuple[tuple[bytes, ...], ...], start: int, end: int
    ) -> int | None:
        """Return the start of the first block that a query at `end` needs but the directory lacks.

        Only blocks of tokens [start, end) are searched, group by group. Pending stores count as
        missing, whether or not the executor has written them, so that a run does not depend on
        time.
        """
        writing = set(self._stores.values())
        for group, own in zip(self._engine.manager.config.groups, keys, strict=True):
            first = max(start // group.block_size, skipped_blocks(group, end))
            for position in range(first, end // group.block_size):
                if own[position] in writing or own[position] not in self._tier:
                    return position * group.block_size
        return None
