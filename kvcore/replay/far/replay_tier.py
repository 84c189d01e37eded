# SPDX-License-Identifier: Apache-2.0
"""The loads and stores of a replay that has a far tier; none of them takes virtual time."""

from __future__ import annotations

from kvcore.manager import KVCacheManager
from kvcore.replay.far.far_blocks import FarBlocks
from kvcore.replay.results import Options
from kvcore.types.values import Hit, Refused


class ReplayTier:
    """A far tier below a manager; without `Options.far_blocks` it is empty and stores nothing."""

    def __init__(self, manager: KVCacheManager, options: Options) -> None:
        self._manager = manager
        self._size = options.block_size
        self._blocks: FarBlocks | None = None
        if options.far_blocks is not None:
            self._blocks = FarBlocks(options.far_blocks, options.store_policy)
        self._operations: list[int] = []

    @property
    def num_written(self) -> int | None:
        """Blocks that were stored; None without a tier."""
        return None if self._blocks is None else self._blocks.num_written

    def begin(self, sequence_id: str, num_known: int, hit: Hit, reserved: int) -> int | Refused:
        """Load the blocks after a hit that the tier has, leaving one known token to compute; return
        the number of loaded tokens.
        """
        if self._blocks is None:
            return 0
        (keys,) = self._manager.get_block_keys(sequence_id)
        end = min(len(keys), (num_known - 1) // self._size)
        num_tokens = self._blocks.count(keys, hit.num_tokens // self._size, end) * self._size
        if num_tokens == 0:
            return 0
        got = self._manager.load(
            sequence_id, num_tokens, hit, full_sequence_must_fit=True, reserved_blocks=reserved
        )
        if isinstance(got, Refused):
            return got
        self._operations += got
        return num_tokens

    def end(self) -> None:
        """Complete the loads of the batch that was taken."""
        for operation in self._operations:
            self._manager.complete_operation(operation, True)
        self._operations = []

    def computed(self, sequence_id: str, prompt_len: int) -> None:
        """Store the blocks of a prompt, whose batch has run."""
        if self._blocks is not None:
            (keys,) = self._manager.get_block_keys(sequence_id)
            self._blocks.computed(keys[: prompt_len // self._size])
