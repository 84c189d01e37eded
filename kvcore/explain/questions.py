# SPDX-License-Identifier: Apache-2.0
"""Questions to a manager about its own answers, as methods: `KVCacheManager` has them from here."""

from __future__ import annotations

from typing import Unpack

from kvcore.explain.refusal import ExplainedRefusal, explain_refusal
from kvcore.state.state import State
from kvcore.transitions.slot_request import SlotOptions, check_hit_kind
from kvcore.types.values import Hit


class Questions:
    """What a manager says about its refusals."""

    def state(self) -> State:
        """The state as an immutable value."""
        raise NotImplementedError

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
        check_hit_kind(hit)
        return explain_refusal(self.state(), request_id, num_new_tokens, hit, **options)
