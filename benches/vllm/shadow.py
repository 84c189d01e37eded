# SPDX-License-Identifier: Apache-2.0
"""Run vLLM 0.33.0's schedulers on random traffic with kvcore in the shadow of their manager.

Run: python -m benches.vllm --shadow [--modes sync,async] [--seeds 4] [--steps 200]. The traffic is
that of compare.py. The exit status is 1 if kvcore differs, or places blocks elsewhere, and no
rule (rules.py) explains the first result that differs.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from benches.vllm.compare import KINDS, MAX_MODEL_LEN, MODEL, Side, World, make_config, send
from benches.vllm.compare import watch as watch_side
from benches.vllm.compare import world_of as make_world
from benches.vllm.first_difference import FirstDifference
from benches.vllm.options import read_options
from benches.vllm.rules import RULES
from benches.vllm.traffic import Traffic

# isort: split
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import init_none_hash


def run(world: World, num_steps: int, model: str) -> FirstDifference:
    """Run and find the first difference of the managers. Raises RuntimeError without one call."""
    side = Side(KINDS[world.is_async][1], world, make_config(world, model), world.seed)
    managers: Any = side.scheduler.kv_cache_manager
    watch = watch_side(side, managers.kvcore)
    first_difference = FirstDifference(managers, watch)
    traffic = Traffic(world.seed, MAX_MODEL_LEN)
    for number in range(1, num_steps + 1):
        watch.begin()
        send(traffic, number, (side,))
        side.step(number)
    if not managers.tally.num_calls:
        raise RuntimeError(f"{world}: nothing was compared")
    return first_difference


def main() -> int:
    """Run; returns 1 if kvcore differs from vLLM's manager and no rule explains it."""
    options = read_options()
    os.environ["KVCORE_SHADOW"] = "1"
    init_none_hash(sha256)
    failed = False
    with tempfile.TemporaryDirectory() as model:
        (Path(model) / "config.json").write_text(json.dumps(MODEL))
        for mode in options.modes:
            num_parted = num_moved = num_other = 0
            for seed in options.seeds:
                first_difference = run(make_world(mode, seed), options.steps, model)
                tally = first_difference.managers.tally
                num_moved += not tally.same_ids
                num_parted += tally.difference is not None
                if first_difference.rule is not None:
                    rule = (
                        f"by rule: {RULES[first_difference.rule]}"
                        if first_difference.rule
                        else "by no rule"
                    )
                    what = tally.difference or "blocks at other places"
                    print(f"{mode}, seed {seed}, {rule}: {what}", flush=True)
                    num_other += first_difference.is_unexplained
            failed |= num_other > 0
            print(
                f"{mode}: {len(options.seeds)} runs of {options.steps} steps, {num_parted} parted, "
                f"{num_moved} with blocks at other places; {num_other} of them by no rule",
                flush=True,
            )
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
