# SPDX-License-Identifier: Apache-2.0
"""Why tokens were computed that a cache without limit would have had, and why a call was refused.

Questions are methods of `KVCacheManager`; what answers them is imported when it is asked.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Unpack

from kvcore.transitions.slot_request import SlotOptions, check_hit_kind
from kvcore.types.arguments import read_count
from kvcore.types.values import Hit

if TYPE_CHECKING:
    from kvcore import _twin
    from kvcore.explain.explanation import Missed
    from kvcore.explain.live import Live
    from kvcore.explain.refusal import ExplainedRefusal
    from kvcore.state.state import State


class Questions:
    """Methods of a manager that explain its refusals and misses, and what others wait for."""

    _core: _twin.Backend
    _live: Live | None

    @property
    def num_due_blocks(self) -> int:
        """Free blocks that waiting requests will look up (`queue_aware`). Changes nothing."""
        return self._core.num_due_blocks

    if TYPE_CHECKING:

        def state(self) -> State: ...

    def explain_miss(self, request_id: str) -> Missed | None:
        """Why a request misses what was cached before: of a waiting one as of now, of a running one
        as of its first slots; None if those were not seen, as of a fork's child. Changes nothing.

        Needs `explain_entries`. At most a few ms. Raises ExplainOff, UnknownRequest.
        """
        if self._live is None:
            from kvcore.explain.errors import ExplainOff

            raise ExplainOff(request_id=request_id)
        return self._live.explain_miss(request_id)

    def _remember(self, explain_entries: int) -> None:
        """Remember the newest removed keys from now on, at most `explain_entries` of them."""
        if read_count("explain_entries", explain_entries):
            from kvcore.explain.live import Live  # few managers remember

            self._live = Live(self, explain_entries)

    def explain_refusal(
        self,
        request_id: str,
        num_new_tokens: int,
        hit: Hit | None = None,
        **options: Unpack[SlotOptions],
    ) -> ExplainedRefusal:
        """Why `allocate_slots` would refuse this: verdict, needed, available and pending blocks.

        Then who holds blocks, and what each one's leaving would bring. O(pool). Raises what
        `allocate_slots` raises. Changes nothing.
        """
        from kvcore.explain.refusal import explain_refusal

        check_hit_kind(hit)
        return explain_refusal(self.state(), request_id, num_new_tokens, hit, **options)
