# SPDX-License-Identifier: Apache-2.0
"""Both tiers of SGLang's cache are reached, and a load of the wrong pages is found."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from kvcore.sanitizer.hunter.adapter import peer_python

ROOT = Path(__file__).parents[2]
HUNT = """
import json
import sys
from kvcore.sanitizer.engines import sglang_host
from kvcore.sanitizer.hunter.run import run
from kvcore.sanitizer.hunter.world import Generator

class Engine(sglang_host.Engine):
    def __init__(self, world):
        super().__init__(world)
        controller = self.cache.cache_controller
        load = controller.load
        controller.load = lambda host_indices, **named: load(self.mixed(host_indices), **named)

    def mixed(self, slots):
        return slots.reshape(-1, self.size).flip(0).reshape(-1)

class Adapter(sglang_host.Adapter):
    pass

if sys.argv[1] == "wrong":
    Adapter.Engine = Engine
generator = Generator(Adapter.AXES, 1)
outcomes = [run(Adapter, generator.next()) for _ in range(150)]
reached = [sum(goal in each.reached for each in outcomes) for goal in ("offload", "restore")]
print(json.dumps([[each.found.name for each in outcomes if each.found], *reached]))
"""


@pytest.mark.slow
@pytest.mark.parametrize(("load", "finding"), [("right", None), ("wrong", "wrong-kv")])
def test_a_load_of_the_wrong_pages_is_found(load: str, finding: str | None) -> None:
    python = peer_python("sglang")
    if not python.exists():
        pytest.skip(f"SGLang is not installed in {python.parents[1]}")
    hunted = subprocess.run(
        [python, "-c", HUNT, load],
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONHASHSEED": "0"},
        capture_output=True,
        text=True,
        check=True,
    )
    found, num_stored, num_loaded = json.loads(hunted.stdout.splitlines()[-1])
    assert num_stored > 20
    assert num_loaded > 5
    assert set(found) == ({finding} if finding else set())
