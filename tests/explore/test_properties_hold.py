# SPDX-License-Identifier: Apache-2.0
"""Every property that judges by itself holds in every state and on every call of small worlds."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from kvcore.calls import Call
from kvcore.check.core_model import CoreModel
from kvcore.check.hazards import BATCH_JUDGES
from kvcore.check.properties import PROPERTIES, judge, select
from kvcore.check.world import World
from kvcore.commands import segments
from kvcore.state import State
from tests.explore.worlds import world

EVERY = frozenset(PROPERTIES)
WORLDS = {
    "basic": world(2, 2, 3),
    "tight": world(1, 2, 3, num_prompt=2, without=("fork",)),
    "watermark": world(2, 2, 3, watermark_blocks=1),
    "uncached first": world(2, 2, 3, eviction="uncached_first"),
    "merge": world(2, 2, 2, duplicates="merge", calls_per_batch=2),
    "swap": world(2, 2, 2, "swap_out", "swap_in", num_host_blocks=2, without=("fork",)),
    "cut": world(2, 2, 2, "truncate", "pin", "unpin", without=("fork",)),
}


def walk(model: CoreModel, where: World) -> Iterator[tuple[str, str]]:
    """What does not hold anywhere in a world, with the calls asked for alone included."""
    properties = select(None, where.calls)
    asked = {name: PROPERTIES[name] for name in ("DETERMINISM", "NO-THRASH")}
    start = model.start()
    seen, waiting = {model.name(start)}, [start]
    while waiting:
        node = waiting.pop()
        yield from judge(properties, "state", node, model.prefixes)
        yield from judge({**properties, **asked}, "run", where, node)
        for edge in model.edges(node):
            for step in edge.steps:
                scope: Any = "transition"
                args = (step.before, step.call, step.outcome)
                yield from judge({**properties, **asked}, scope, *args)
            yield from batches(node, edge.steps[-1].before, edge.steps[-1].call)
            name = model.name(edge.node)
            if name not in seen:
                seen.add(name)
                waiting.append(edge.node)


def batches(start: State, opened: State, call: Call) -> Iterator[tuple[str, str]]:
    """What the batch of an edge is not."""
    commands = list(opened.batch.commands)
    if call.name == "take_batch":
        for name, holds in BATCH_JUDGES.items():
            yield from ((name, detail) for detail in holds(start, commands, segments(commands)))


@pytest.mark.parametrize("name", WORLDS)
def test_every_property_holds_everywhere(name: str) -> None:
    where = WORLDS[name]
    found = next(walk(CoreModel(where), where), None)
    assert found is None
