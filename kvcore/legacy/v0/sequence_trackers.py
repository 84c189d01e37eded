# SPDX-License-Identifier: Apache-2.0
"""V0's records of sequences for prefix caching: their block hashes and last access.

The list of a sequence's hashes is live: it grows with the sequence.
Source: S002-59 to 64.
"""

from __future__ import annotations

from typing import Protocol

from kvcore.legacy.v0.block import NONE_HASH, BlockId, hash_chain
from kvcore.legacy.v0.errors import require
from kvcore.legacy.v0.sequences import SequenceLike
from kvcore.legacy.v0.tier_blocks import keep_key


class Finding(Protocol):
    """An allocator that looks up hashes."""

    def find_cached_blocks_prefix(self, block_hashes: list[int]) -> list[int]:
        """Return the hashes up to the first that is not cached."""


class Accessing(Protocol):
    """An allocator that records when blocks were used."""

    def mark_blocks_as_accessed(self, block_ids: list[BlockId], now: float) -> None:
        """Set the access time of blocks."""


class ComputedBlocksTracker:
    """Tracks how many tokens of each sequence are cached."""

    _none_hash = NONE_HASH

    def __init__(self, allocator: Finding, block_size: int, enable_caching: bool) -> None:
        self._allocator = allocator
        self._block_size = block_size
        self._enable_caching = enable_caching
        self._seq_id_to_blocks_hashes: dict[int, list[int]] = {}
        self._seq_id_to_num_tokens_computed: dict[int, int] = {}

    def get_num_cached_tokens(self, seq: SequenceLike) -> int:
        """Return the number of tokens in the leading cached blocks.

        During prefill the first result is kept. Raises WrongCall if the sequence lost tokens.
        """
        if not self._enable_caching:
            return 0
        hashes = self._update_seq_hashes(seq)
        known = self._seq_id_to_num_tokens_computed.get(seq.seq_id)
        if known is not None and seq.is_prefill():
            return known
        num_cached = len(self._allocator.find_cached_blocks_prefix(hashes)) * self._block_size
        self._seq_id_to_num_tokens_computed[seq.seq_id] = num_cached
        return num_cached

    def remove_seq(self, seq_id: int) -> None:
        """Stop tracking a sequence. Raises WrongCall unless it is tracked."""
        if not self._enable_caching:
            return
        reason = "sequence {sequence} is not tracked, {num} are"
        num = len(self._seq_id_to_blocks_hashes)
        require(self.tracks(seq_id), reason, sequence=seq_id, num=num)
        del self._seq_id_to_blocks_hashes[seq_id]
        del self._seq_id_to_num_tokens_computed[seq_id]

    def tracks(self, seq_id: int) -> bool:
        """Return whether a sequence is tracked."""
        hashes, computed = self._seq_id_to_blocks_hashes, self._seq_id_to_num_tokens_computed
        return seq_id in hashes and seq_id in computed

    def _update_seq_hashes(self, seq: SequenceLike) -> list[int]:
        """Hash the full blocks added since the last call; returns all hashes, as a live list."""
        hashes = self._seq_id_to_blocks_hashes.get(seq.seq_id, [])
        token_ids, size, num_hashed = seq.get_token_ids(), self._block_size, len(hashes)
        num_tokens, hashed = len(token_ids), num_hashed * size
        if num_tokens < hashed:
            reason = "sequence {sequence} has {num_tokens} tokens, {num_hashed} were hashed"
            fields = {"num_tokens": num_tokens, "num_hashed": hashed}
            require(False, reason, sequence=seq.seq_id, **fields)
        if num_tokens >= hashed + size:
            parent, extra_hash = hashes[-1] if hashes else None, seq.extra_hash()
            full = range(hashed, num_tokens - size + 1, size)
            chunks = [token_ids[at : at + size] for at in full]
            hashes += map(keep_key, hash_chain(chunks, parent, extra_hash))
        self._seq_id_to_blocks_hashes[seq.seq_id] = hashes
        return hashes


class LastAccessBlocksTracker:
    """Records when each sequence was last used; its blocks get that time when it is freed."""

    def __init__(self, allocator: Accessing) -> None:
        self._allocator = allocator
        self._seq_last_access: dict[int, float | None] = {}

    def add_seq(self, seq_id: int) -> None:
        """Start tracking a sequence. Raises WrongCall if it is tracked already."""
        reason = "sequence {sequence} is tracked already, as {num} are"
        num = len(self._seq_last_access)
        require(seq_id not in self._seq_last_access, reason, sequence=seq_id, num=num)
        self._seq_last_access[seq_id] = None

    def remove_seq(self, seq_id: int) -> None:
        """Stop tracking a sequence. Raises WrongCall if it is not tracked."""
        self._check_tracked(seq_id)
        del self._seq_last_access[seq_id]

    def update_last_access(self, seq_id: int, time: float) -> None:
        """Record when a sequence was used. Raises WrongCall if it is not tracked."""
        self._check_tracked(seq_id)
        self._seq_last_access[seq_id] = time

    def update_seq_blocks_last_access(self, seq_id: int, block_ids: list[BlockId]) -> None:
        """Set the access time of a sequence's blocks, if one was recorded. Raises WrongCall."""
        self._check_tracked(seq_id)
        time = self._seq_last_access[seq_id]
        if time is not None:
            self._allocator.mark_blocks_as_accessed(block_ids, time)

    def _check_tracked(self, seq_id: int) -> None:
        reason = "sequence {sequence} is not tracked, {num} are"
        num = len(self._seq_last_access)
        require(seq_id in self._seq_last_access, reason, sequence=seq_id, num=num)
