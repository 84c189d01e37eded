# SPDX-License-Identifier: Apache-2.0
"""Seeded bugs that keep requests waiting: admission, watermarks, look-ups.

Rules: as in seeding.py. `rows` are those of the catalogue (catalogue.py). Twin: none.
"""

from __future__ import annotations

from typing import Any

from kvcore import hits, plan
from kvcore.check.mutants.seeding import Patcher, mutant
from kvcore.check.mutants.worlds import BOTH, WATERMARK
from kvcore.state import Draft


@mutant(BOTH, "HIT-LONGEST")
def m_lookup_misses(patcher: Patcher) -> None:
    """A look-up finds nothing."""
    patcher.setattr(hits, "common_length", lambda *_: 0)


@mutant(WATERMARK, "ADMIT-EXACT", rows=(69,))
def m_watermark_ignored(patcher: Patcher) -> None:
    """A request is admitted into the room that running requests were to grow in."""
    refuse = plan.refuse

    def refuse_unreserved(draft: Draft, needed: int, available: int, most: int, _: int) -> Any:
        return refuse(draft, needed, available, most, 0)

    patcher.setattr(plan, "refuse", refuse_unreserved)
