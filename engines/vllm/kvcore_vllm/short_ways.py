# SPDX-License-Identifier: Apache-2.0
"""The manager with fast paths for what every step has: decoded tokens, and requests that end.

They are taken if nothing else has to be noted: no events, no windows, no blocks to zero, no modules
that predict several tokens. All other calls take the path of `manager.py`; the outcome is the same.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from kvcore_vllm.blocks import Blocks
from kvcore_vllm.manager import KVCacheManager as Whole


class KVCacheManager(Whole):
    """vLLM's manager under its names, with the fast paths."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        noted = (
            self._zeroing.wanted,
            self.events,
            self._num_prefilled_again,
            self._windows,
            self.parts,
        )
        self._is_plain = not any(noted)
        self._append, self._nothing = self.compat.append, self.compat.empty_kv_cache_blocks
        sparse = self._retention is not None and self.coordinator.retention_interval is not None
        sizes = (group.block_size for group in self.compat.config.groups if group.is_state)
        self._unit = math.gcd(*sizes) if sparse else 0  # a state that ends here may not be kept
        if self._is_plain and not sparse:
            self.cache_blocks = self.compat.cache_blocks  # type: ignore[method-assign] # the same

    @property
    def is_short(self) -> bool:
        """Whether `compat.append` alone suffices for a decoded token now."""
        return self._is_plain and self._in_step and not self._unit

    @property
    def can_free_later(self) -> bool:
        """Whether `free` reads nothing of a request that changes once it is finished."""
        return self._is_plain and not self._loading  # a load is confirmed by counts in flight

    def allocate_slots(
        self,
        request: Any,
        num_new_tokens: int,
        num_new_computed_tokens: int = 0,
        new_computed_blocks: Any = None,
        num_lookahead_tokens: int = 0,
        num_external_computed_tokens: int = 0,
        delay_cache_blocks: bool = False,
        num_encoder_tokens: int = 0,
        full_sequence_must_fit: bool = False,
        reserved_blocks: int = 0,
        has_scheduled_reqs: bool = True,
        skip_zeroing_group_ids: Sequence[int] = (),
    ) -> Blocks | None:
        """Allocate slots for new tokens. Returns the new blocks, or None if they do not fit."""
        if num_new_tokens == 1 and new_computed_blocks is None and self._is_plain and self._in_step:
            counts = num_new_computed_tokens or num_lookahead_tokens or num_external_computed_tokens
            others = delay_cache_blocks or num_encoder_tokens or full_sequence_must_fit
            unit = self._unit
            ends = unit and (request.num_computed_tokens + 1) % unit == 0
            if not (counts or others or reserved_blocks or ends):
                grown = self._append(request)
                if grown is self._nothing:
                    return self.empty_kv_cache_blocks
                if grown is not None:
                    return self._result(grown.blocks)
        return super().allocate_slots(
            request,
            num_new_tokens,
            num_new_computed_tokens,
            new_computed_blocks,
            num_lookahead_tokens,
            num_external_computed_tokens,
            delay_cache_blocks,
            num_encoder_tokens,
            full_sequence_must_fit,
            reserved_blocks,
            has_scheduled_reqs,
            skip_zeroing_group_ids,
        )

    def free(self, request: Any) -> None:
        """Give back a request's blocks, tail first."""
        if self._in_step or not self._is_plain or not self._free_in_order(request):
            super().free(request)

    def _free_in_order(self, request: Any) -> bool:
        """Free a request, and return True, unless two of its blocks have no key.

        The order of blocks without a key in the free queue would differ from vLLM's.
        """
        self._confirm_loads(request)
        tables = self.compat.get_blocks(request.request_id).blocks
        held = tables[0] if len(tables) == 1 else [each for table in tables for each in table]
        has_key = self.compat.core.has_key
        num_found = sum(map(has_key, held))
        if len(held) - num_found > 1:
            return False
        lasts = [next(filter(has_key, reversed(table)), 0) for table in tables]
        self.compat.free(request)
        if not all(map(has_key, lasts)):  # keys are withdrawn from the end
            self.num_withdrawn += num_found - sum(map(has_key, held))
        return True
