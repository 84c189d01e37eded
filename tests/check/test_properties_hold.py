# SPDX-License-Identifier: Apache-2.0
"""The properties that are checked only on request hold, too: the same call gives the same outcome,
and a fair scheduler finishes every request from every state.
"""

from __future__ import annotations

from typing import Any

import pytest

from kvcore import Group
from kvcore.check.search.scope import checked_in
from kvcore.check.search.search import check
from kvcore.check.world.world import World
from tests.check.worlds import world

FULL, SLOT = Group(2), Group(1)
WINDOW = Group(1, kind="sliding_window", window=2)
ENCODER = Group(1, kind="cross_attention")
FEW: dict[str, Any] = {"without": ("fork",), "num_letters": 1}
WORLDS = {
    "basic": world(2, 2, 3, num_letters=1),
    "basic, two letters": world(2, 2, 2),
    "basic, all at once": world(2, 2, 3),
    "too small": world(1, 2, 3, num_prompt=2, without=("fork",)),
    "watermark": world(2, 2, 3, watermark_blocks=1, **FEW),
    "uncached first": world(2, 2, 3, eviction="uncached_first", **FEW),
    "merge": world(2, 2, 2, duplicates="merge", moves_per_batch=2, **FEW),
    "swap": world(2, 2, 2, "swap_out", "swap_in", num_host_blocks=2, **FEW),
    "cut": world(2, 2, 2, "truncate", "pin", "unpin", **FEW),
    "window": world(4, 2, 3, groups=(FULL, WINDOW), **FEW),
    "drafts": world(3, 1, 4, num_drafts=2, num_letters=1),
    "encoder": world(3, 1, 3, groups=(SLOT, ENCODER), enable_caching=False, num_encoder=2),
    "loads": world(2, 1, 3, "load", loads_fail=True, **FEW),
    "in flight": world(1, 1, 3, max_in_flight=1, **FEW),
}


SLOW = {"basic, all at once"}


@pytest.mark.parametrize(
    "name", [pytest.param(each, marks=[pytest.mark.slow] * (each in SLOW)) for each in WORLDS]
)
def test_every_property_holds_everywhere(name: str) -> None:
    where: World = WORLDS[name]
    usual, _ = checked_in(where, None, parity=False)
    requested = {*usual, "DETERMINISM", "NO-THRASH"}
    report = check(where, properties=sorted(requested))
    assert report.violation is None, report.violation
    assert report.verdict == "complete"
