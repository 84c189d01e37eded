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

import attrs

from benches.vllm.compare import KINDS, MAX_MODEL_LEN, MODEL, Side, World, make_config, send
from benches.vllm.compare import world_of as make_world
from benches.vllm.options import read_options
from benches.vllm.rules import LOOK_UPS, RULES, Watch, flat, rule_of
from benches.vllm.traffic import Traffic

# isort: split
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import init_none_hash


@attrs.define
class Judge:
    """Finds the first result of a shadow's managers that differs, and the rule that explains it.

    rule: the rule for that result, empty if none explains it; None if nothing differs. After it the
    two place blocks differently, so later differences follow from it.
    """

    managers: Any
    watch: Watch
    rule: str | None = None

    def __attrs_post_init__(self) -> None:
        self.watch.watch_tokens(self.managers.kvcore.compat)
        self._replace("part", self._part)
        self._replace("_same_blocks", self._same_blocks)

    def _replace(self, name: str, around: Any) -> None:
        call = getattr(self.managers, name)
        setattr(self.managers, name, lambda *args: around(*args) or call(*args))

    def _part(self, name: str, _: str, mine: Any, theirs: Any) -> None:
        if name in LOOK_UPS and isinstance(theirs, tuple):
            self._same_blocks(mine[0], theirs[0])
        self.rule = self.rule or ""

    def _same_blocks(self, mine: Any, _: Any) -> None:
        # The result of an allocation may omit blocks that a connector fills.
        name, who, ours = self.watch.calls[-1]
        is_look_up = name in LOOK_UPS
        own = flat(self.managers.own.get_blocks(who) if mine and not is_look_up else mine)
        if self.rule is None and own != ours:
            self.rule = ""
            if own is not None and ours is not None:
                self.rule = rule_of(self.watch.lost, own, ours, is_look_up=is_look_up)


def run(world: World, num_steps: int, model: str) -> Judge:
    """Run and return the judge of the managers. Raises RuntimeError if nothing was compared."""
    side = Side(KINDS[world.is_async][1], world, make_config(world, model), world.seed)
    managers: Any = side.scheduler.kv_cache_manager
    blocks = managers.kvcore.block_pool.blocks
    watch = Watch(managers.kvcore, world.block_size, lambda block: bool(blocks[block].has_key))
    judge = Judge(managers, watch)
    traffic = Traffic(world.seed, MAX_MODEL_LEN)
    for number in range(1, num_steps + 1):
        watch.begin()
        send(traffic, number, (side,))
        side.step(number)
    if not managers.tally.num_calls:
        raise RuntimeError(f"{world}: nothing was compared")
    return judge


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
                judge = run(make_world(mode, seed), options.steps, model)
                tally = judge.managers.tally
                num_moved += not tally.same_ids
                num_parted += tally.difference is not None
                if judge.rule is not None:
                    rule = f"by rule: {RULES[judge.rule]}" if judge.rule else "by no rule"
                    what = tally.difference or "blocks at other places"
                    print(f"{mode}, seed {seed}, {rule}: {what}", flush=True)
                    num_other += not judge.rule
            failed |= num_other > 0
            print(
                f"{mode}: {len(options.seeds)} runs of {options.steps} steps, {num_parted} parted, "
                f"{num_moved} with blocks at other places; {num_other} of them by no rule",
                flush=True,
            )
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
