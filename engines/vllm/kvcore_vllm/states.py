# SPDX-License-Identifier: Apache-2.0
"""State groups in vLLM's form: rows that workers append to, and requests that wait for a state.

vLLM's worker copies a state itself, from the block of the position before the step to the block of
the position after it. These are the source and the target of kvcore's copy, whose command is
therefore not passed on.
"""

from __future__ import annotations

from typing import Any

from kvcore.compat import KVCacheManager
from kvcore.types.keys import make_key
from kvcore.types.values import Hit
from kvcore_vllm.blocks import Tables


class States:
    """The checkpoints that the current step writes, by hash, and the requests that wait for one.

    A checkpoint is not found before its step is over. As in vLLM, a request that would hit it is
    not admitted in that step, and finds it in the next one.
    """

    def __init__(self, compat: KVCacheManager) -> None:
        self._compat = compat
        self._config = config = compat.config
        self._sizes = {n: each.block_size for n, each in enumerate(config.groups) if each.is_state}
        kept = [n for n, each in enumerate(config.groups) if not each.is_windowed | each.is_cross]
        self._full = kept[0] if kept else None  # vLLM asks this group first
        self._written: set[bytes] = set()
        self._moved: set[bytes] = set()
        self._waiting: set[str] = set()

    def begin_step(self) -> None:
        """Forget the last step."""
        self._written.clear()
        self._moved.clear()
        self._waiting.clear()

    def waits(self, request_id: str) -> bool:
        """Return whether a request waits for a checkpoint of this step."""
        return request_id in self._waiting

    def note_end(self, request: Any, end: int) -> None:
        """Note that this step writes the state after a request's first `end` tokens."""
        if any(end % size == 0 for size in self._sizes.values()) and end <= request.num_tokens:
            self.note_written(request, end)

    def note_written(self, request: Any, end: int) -> None:
        """Note that this step writes the state after `end` tokens, which is kept."""
        last = end // self._config.hash_block_size
        self._written.update(request.block_hashes[last - 1 : last])

    def note_moved(self, request: Any, end: int) -> None:
        """Note that a copy of this step fills the block that is found by the hash at a token."""
        last = end // self._config.hash_block_size
        self._moved.update(request.block_hashes[last - 1 : last])

    def junction(self, request: Any, hit: Hit) -> int:
        """Return how many tokens full attention finds if the hit is shorter, else 0.

        Notes that the request waits if this step writes a state between.
        """
        unit, fine = self._config.hit_alignment, self._config.hash_block_size
        hashes, first = request.block_hashes, (hit.num_tokens + unit) // fine - 1
        last = hit.num_common // fine
        if self._config.has_tails and self._full is not None:  # parts have no key in this step
            size = self._config.groups[self._full].block_size
            last = min((hit.num_common // size + 1) * size, request.num_tokens - 1) // fine
        is_moved = hit.num_tokens and hashes[hit.num_tokens // fine - 1] in self._moved
        if is_moved or not self._written.isdisjoint(hashes[first : last : unit // fine]):
            self._waiting.add(request.request_id)
        end = self._found_by_full(request, hit.num_common)
        return end if end > hit.num_tokens else 0

    def _found_by_full(self, request: Any, end: int) -> int:
        """Return how many tokens full attention alone finds, which finds the first `end`."""
        if self._full is None:
            return 0
        config, hashes = self._config, request.block_hashes
        if config.drops_last_hit(self._full):
            return end
        unit, fine, size = (
            config.hit_alignment,
            config.hash_block_size,
            config.groups[self._full].block_size,
        )
        most = min(request.num_tokens - 1, len(hashes) * fine)
        found = end // size * size
        while found + size <= most:
            key = make_key(hashes[(found + size) // fine - 1], self._full)
            if self._compat.core.get_cached_block(key) is None:
                break
            found += size
        return max(end, end + (found - end) // unit * unit)

    def with_nulls(self, grown: Tables, start: int, end: int) -> Tables:
        """Put the null blocks of skipped positions before the new block of each state group.

        start, end: the tokens before and after the step.
        """
        rows = list(grown)
        for number, size in self._sizes.items():
            if rows[number]:
                num_skipped = (end - 1) // size - (start - 1) // size - 1
                rows[number] = (*(0,) * num_skipped, *rows[number])
        return tuple(rows)
