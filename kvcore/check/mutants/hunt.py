# SPDX-License-Identifier: Apache-2.0
"""One seeded bug, explored until a property finds it.

Rules: a hunt asks some properties alone and gives the shortest run to the first that does not hold.
What users can observe is judged in a hunt of its own. Twin: rust/tests/mutants.rs.
"""

from __future__ import annotations

import time
from collections.abc import Iterable

import attrs

from kvcore.calls import Call
from kvcore.check.actions import World
from kvcore.check.mutants.seeding import Mutant, Patcher
from kvcore.check.search import Broken, Explorer

OBSERVABLE = frozenset({"KV-READ", "NOCRASH", "LEAK", "ZEROED"})
"""What a user sees: another content, a crash, a block that never comes back, memory unwritten."""


@attrs.frozen(kw_only=True)
class Hunt:
    """What came of a hunt.

    found: the property that does not hold, None where the bug lives. detail: what is wrong. story:
    the calls that lead there. num_states: explored until then. seconds: of this processor.
    """

    found: str | None
    detail: str
    story: tuple[Call, ...]
    num_states: int
    seconds: float


def hunt(mutant: Mutant, where: World, properties: Iterable[str]) -> Hunt:
    """Explore a world with a seeded bug until one of these properties does not hold."""
    began = time.process_time()
    explorer = Explorer(where, judges=frozenset(properties))
    found, detail = None, ""
    story: tuple[Call, ...] = ()
    with Patcher() as patcher:
        mutant.patch(patcher)
        try:
            explorer.run()
        except Broken as broken:
            found, detail, story = broken.name, str(broken).split("\n")[0], broken.story
    return Hunt(
        found=found,
        detail=detail,
        story=story,
        num_states=explorer.report.num_states,
        seconds=time.process_time() - began,
    )
