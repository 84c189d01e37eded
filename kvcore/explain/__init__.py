# SPDX-License-Identifier: Apache-2.0
"""Explains why tokens were computed that an unlimited cache would have had, and why a call was
refused.

The questions are methods of `KVCacheManager`; the code that answers them is imported on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Unpack

from kvcore.transitions.slot_request import check_hit_kind
from kvcore.types.arguments import read_count
from kvcore.types.slot_request import SlotOptions
from kvcore.types.values import Hit

if TYPE_CHECKING:
    from kvcore import _twin
    from kvcore.explain.explanation import Missed
    from kvcore.explain.live import Live
    from kvcore.explain.refusal import ExplainedRefusal
    from kvcore.state.state import State


class Questions:
    """Methods of a manager that explain its refusals and misses."""

    _core: _twin.Backend
    _live: Live | None

    @property
    def num_cached_blocks(self) -> int:
        """Number of free blocks whose content can be hit. O(blocks). Changes nothing."""
        return self._core.num_cached_blocks

    @property
    def num_due_blocks(self) -> int:
        """Number of free blocks that waiting requests will look up (`queue_aware`). Changes
        nothing.
        """
        return self._core.num_due_blocks

    if TYPE_CHECKING:

        def state(self) -> State: ...

    def explain_miss(self, request_id: str) -> Missed | None:
        """Explain why a request misses what was cached before. Changes nothing.

        A waiting request is explained as of now, a running one as of its first slots; the result is
        None if these were not observed, as for the child of a fork.

        Needs `explain_entries`. Takes at most a few ms. Raises ExplainOff, UnknownRequest.
        """
        if self._live is None:
            from kvcore.explain.errors import ExplainOff

            raise ExplainOff(request_id=request_id)
        return self._live.explain_miss(request_id)

    def _remember(self, explain_entries: int) -> None:
        """Start to remember removed keys, the newest `explain_entries` of them. Raises
        InvalidConfig.
        """
        if read_count("explain_entries", explain_entries):
            from kvcore.explain.live import Live  # few managers use this

            self._live = Live(self, explain_entries)

    def explain_refusal(
        self,
        request_id: str,
        num_new_tokens: int,
        hit: Hit | None = None,
        **options: Unpack[SlotOptions],
    ) -> ExplainedRefusal:
        """Explain why `allocate_slots` would refuse this call: verdict, needed, available and
        pending blocks.

        Also lists who holds blocks, and how many each would make available by leaving. O(pool).
        Raises what `allocate_slots` raises. Changes nothing.
        """
        from kvcore.explain.refusal import explain_refusal

        check_hit_kind(hit)
        return explain_refusal(self.state(), request_id, num_new_tokens, hit, **options)
