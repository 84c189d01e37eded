# SPDX-License-Identifier: Apache-2.0
"""Which blocks of windows and states stay findable, by vLLM's own rule.

vLLM gives no key to a block that no hit can need, nor, by `prefix_cache_retention_interval`, to one
that it does not expect to be hit. The core gives each full block its key; this takes it back.
"""

from __future__ import annotations

from typing import Any

from vllm.v1.core.kv_cache_coordinator import replay_boundaries
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry

from kvcore.compat import KVCacheManager
from kvcore.types.keys import make_key

SPARSE = ("sliding_window", "state")


class Retention:
    """Takes back keys after each call that publishes, those of states once the step is over.

    coordinator: has the interval, which may change. block_size: tokens in whole blocks of all
    groups. drops: whether look-ups drop a block for EAGLE. num_again: tokens that the next chunk
    writes again. limits: whether what no hit can need lies at the end of a request, too, so that
    the core has to publish up to `limit` only.
    """

    def __init__(
        self,
        compat: KVCacheManager,
        coordinator: Any,
        kv_cache_groups: list[Any],
        *,
        block_size: int,
        drops: bool,
        num_again: int,
    ) -> None:
        self._compat, self._coordinator = compat, coordinator
        self._block_size, self._drops, self._num_again = block_size, drops, num_again
        self._alignment, config = block_size, compat.config
        if coordinator.enable_partial_hash_hits:
            self._alignment = config.hash_block_size
        flagged = [each.kv_cache_spec for each in kv_cache_groups if each.is_eagle_group]
        self._groups = [
            (
                number,
                each.kv_cache_spec,
                KVCacheSpecRegistry.get_manager_class(each.kv_cache_spec, each.role),
                drops and (each.kv_cache_spec in flagged or not flagged),
            )
            for number, each in enumerate(kv_cache_groups)
            if config.groups[number].kind in SPARSE
        ]
        self._is_alone = len(kv_cache_groups) == 1
        sizes = [config.groups[number].block_size for number, *_ in self._groups]
        more = [size * each[-1] for size, each in zip(sizes, self._groups, strict=True)]
        self._num_more = max(more)
        self.limits = not (self._is_alone or config.has_states) and min(sizes) < block_size
        kept = [n for n, each in enumerate(config.groups) if not each.is_windowed | each.is_cross]
        self._full = None if self._is_alone or config.has_states or not kept else kept[0]
        self._seen: dict[str, dict[int, int]] = {}  # blocks by request and group
        self._states: list[tuple[str, int]] = []  # requests and blocks that get keys with the step

    def note(self, request: Any, num_found: int, num_tokens: int) -> bool:
        """Take back the keys of a request's new full blocks. Returns whether a state at the end of
        these tokens is kept.

        num_found: tokens of its hit, in the request's first call.
        """
        num_tokens = max(0, min(num_tokens, request.num_tokens) - self._num_again)
        name, interval = request.request_id, self._coordinator.retention_interval
        tables, dropped, is_kept = None, list[int](), True
        for number, spec, manager, drops in self._groups:
            group = self._compat.config.groups[number]
            size = group.block_size
            end = self._num_cacheable(request, num_tokens, size, drops=drops) // size
            if group.is_state:
                first = end - 1 if num_tokens == end * size else end
            else:
                seen = self._seen.setdefault(name, {})
                first = seen.get(number, num_found // size)
                seen[number] = max(first, end)
            if first >= end:
                continue
            mask = manager.reachable_block_mask(
                *(first, end, self._alignment, spec, drops, interval),
                reachable_boundaries=self._boundaries(request, size, drops=drops),
            )
            if mask is None or all(mask):
                continue
            tables = tables or self._compat.get_block_ids(name)
            table = tables[number][first:end]
            blocks = [each for each, keeps in zip(table, mask, strict=False) if each and not keeps]
            if group.is_state:
                self._states += [(name, each) for each in blocks]
                is_kept = False
            else:
                dropped += blocks
        if dropped:
            self._compat.evict_blocks(dropped)
        return is_kept

    def end_step(self) -> None:
        """Take back the keys of states that the step wrote and that are not kept."""
        if self._states:
            self._compat.evict_blocks([block for _, block in self._states])
            self._states.clear()

    def forget(self, request_id: str) -> None:
        """Forget a request that gives back its blocks."""
        self._seen.pop(request_id, None)
        self._states = [each for each in self._states if each[0] != request_id]

    def limit(self, num_tokens: int) -> int:
        """Return how many of these tokens any hit can need."""
        whole = num_tokens // self._block_size * self._block_size
        return min(num_tokens, whole + self._num_more) if whole else 0

    def junction(self, request: Any, num_tokens: int, most: int) -> int:
        """Return what full attention finds, up to `most` tokens, if a hit is shorter, else 0."""
        if self._full is None:
            return 0
        config, find = self._compat.config, self._compat.core.get_cached_block
        fine, size = config.hash_block_size, config.groups[self._full].block_size
        dropped = size * config.drops_last_hit(self._full)
        hashes, found = request.block_hashes, num_tokens
        most = min(most + dropped, len(hashes) * fine)
        while found + size <= most:
            if find(make_key(hashes[(found + size) // fine - 1], self._full)) is None:
                break
            found += size
        end = (found - dropped) // self._block_size * self._block_size
        return end if end > num_tokens else 0

    def _num_cacheable(self, request: Any, num_tokens: int, size: int, *, drops: bool) -> int:
        """Return how many of these tokens vLLM caches."""
        hashed = len(request.block_hashes) * self._compat.config.hash_block_size
        if self._is_alone or self._alignment != self._block_size:
            return min(num_tokens, hashed)
        whole = num_tokens // self._block_size * self._block_size
        return min(num_tokens, whole + size * (drops and whole > 0), hashed)

    def _boundaries(self, request: Any, size: int, *, drops: bool) -> list[int]:
        """Return the tokens at which later requests may resume, as vLLM expects."""
        found = [
            *replay_boundaries(request.num_prompt_tokens, self._block_size, use_eagle=self._drops)
        ]
        junction = request.shared_prefix_boundary
        if junction:
            found += [junction, *([junction - size] * drops)]
        return found
