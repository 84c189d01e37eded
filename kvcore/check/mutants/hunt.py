# SPDX-License-Identifier: Apache-2.0
"""The hunt of one seeded bug: explores a world until a property finds it.

A hunt checks the given properties only, and returns the shortest run to the first one that fails. A
separate hunt checks what users can observe. A walk along broken links that never ends counts as a
crash. tools/twin_mutants.py hunts the bugs of the twin.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from typing import Any

import attrs

from kvcore.check.mutants.observed import OBSERVABLE, ObservedModel, observable_in
from kvcore.check.mutants.seeding import Mutant, Patcher
from kvcore.check.search.search import check
from kvcore.check.world.model import Model
from kvcore.check.world.world import World
from kvcore.pool.free_queue import FreeQueue
from kvcore.trace.calls import Call

OBSERVED_STATES_MAX = 6000
"""Most states of a world that are searched for what users observe."""
HARMLESS_STATES = 1500
"""The same limit for a bug that users must not observe."""


@attrs.frozen(kw_only=True)
class MutantHunt:
    """The result of a hunt.

    found: the property that fails; None if the bug survives. detail: what is wrong. calls: those
    that lead there. verdict: of the exploration. num_states: explored until then. seconds:
    processor time.
    """

    found: str | None
    detail: str
    calls: tuple[Call, ...]
    verdict: str
    num_states: int
    seconds: float


def hunt(mutant: Mutant, where: World, properties: Iterable[str]) -> MutantHunt:
    """Explore a world with a seeded bug until one of these properties fails; for REFINE, run the
    twin, which is correct, as well. Raises BackendMissing.
    """
    names = frozenset(properties)
    backend = "both" if "REFINE" in names else "python"
    return _hunt(mutant, where, properties=names, backend=backend)


def observe(mutant: Mutant) -> MutantHunt:
    """Explore, in the world in which a seeded bug shows, what users observe of it."""
    where = mutant.shows or mutant.world
    named = [name for name in mutant.broken if name in OBSERVABLE]
    if named and mutant.shows in (None, mutant.world):
        return hunt(mutant, where, named)
    most = OBSERVED_STATES_MAX if mutant.costs is None else HARMLESS_STATES
    if where.config.max_in_flight or where.far is not None:
        return _hunt(mutant, where, properties=observable_in(where), max_states=most)
    return _hunt(mutant, ObservedModel(where), max_states=most)


def _hunt(mutant: Mutant, what: World | Model[Any], **options: Any) -> MutantHunt:
    began = time.process_time()
    with Patcher() as patcher:
        patcher.replace(FreeQueue, "__iter__", walk)
        mutant.patch(patcher)
        report = check(what, **options)
    found = report.violation
    return MutantHunt(
        found=None if found is None else found.name,
        detail="" if found is None else found.detail,
        calls=() if found is None else found.calls,
        verdict=report.verdict,
        num_states=report.num_states,
        seconds=time.process_time() - began,
    )


def walk(queue: FreeQueue) -> Iterator[int]:
    """Yield the blocks of a free queue, front first. Raises RuntimeError if its links form a
    loop.
    """
    steps = iter(range(len(queue.following)))
    for sentinel in range(queue.num_blocks, len(queue.following)):
        block = queue.following[sentinel]
        while block != sentinel:
            if next(steps, None) is None:
                raise RuntimeError("the links of the free queue never end")
            yield block
            block = queue.following[block]
