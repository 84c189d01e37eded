# SPDX-License-Identifier: Apache-2.0
"""Random runs of vLLM 0.33.0's schedulers with kvcore in the shadow of their manager.

Run: python -m benches.vllm --shadow [--modes sync,async] [--seeds 4] [--steps 200]. The traffic is
that of compare.py. Ends with status 1 if kvcore parts, unless keys were withdrawn before.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from benches.vllm.compare import KINDS, MAX_MODEL_LEN, MODEL, Side, World, make_config, send
from benches.vllm.compare import world_of as make_world
from benches.vllm.options import read_options
from benches.vllm.traffic import Traffic

# isort: split
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import init_none_hash


def run(world: World, num_steps: int, model: str) -> Any:
    """Both managers after the steps of a run. Raises RuntimeError if nothing was compared."""
    side = Side(KINDS[world.is_async][1], world, make_config(world, model), world.seed)
    traffic = Traffic(world.seed, MAX_MODEL_LEN)
    for number in range(1, num_steps + 1):
        send(traffic, number, (side,))
        side.step(number)
    managers: Any = side.scheduler.kv_cache_manager
    if not managers.tally.num_calls:
        raise RuntimeError(f"{world}: nothing was compared")
    return managers


def main() -> int:
    """Run; 1 if kvcore parts from vLLM's manager."""
    options = read_options()
    os.environ["KVCORE_SHADOW"] = "1"
    init_none_hash(sha256)
    failed = False
    with tempfile.TemporaryDirectory() as model:
        (Path(model) / "config.json").write_text(json.dumps(MODEL))
        for mode in options.modes:
            num_parted = num_moved = 0
            for seed in options.seeds:
                managers = run(make_world(mode, seed), options.steps, model)
                tally = managers.tally
                num_moved += not tally.same_ids
                if tally.difference is not None:
                    print(f"{mode}, seed {seed}: {tally.difference}", flush=True)
                    num_parted += 1
                    failed |= managers.kvcore.num_withdrawn == 0
            print(
                f"{mode}: {len(options.seeds)} runs of {options.steps} steps, {num_parted} parted, "
                f"{num_moved} with blocks at other places",
                flush=True,
            )
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
