# SPDX-License-Identifier: Apache-2.0
"""Random runs of transformers' continuous batching with kvcore in the shadow of its cache.

Run: make engines-transformers-shadow [ARGS="--modes plain,tight --seeds 4"]. Tiny random models
compute each step on the CPU. Ends with status 1 if kvcore parts, but for two decisions that
docs/engines/transformers.md lists: it may refuse what transformers grants (in modes of MAY_REFUSE),
and may find fewer tokens if it evicted the others, which it says of each (`explain_miss`).
"""

from __future__ import annotations

import argparse
import logging
import os
import random
import sys
from functools import partial
from typing import Any

os.environ["KVCORE_SHADOW"] = "1"  # before the adapter is installed

import attrs
import kvcore_transformers
import pytest
from kvcore_transformers import cache
from kvcore_transformers.shadow import Shadow
from transformers.generation.continuous_batching.utils import logger

from kvcore import KVCacheManager
from tests.engines.transformers.models import draw_prompts, serve, tiny
from tests.engines.transformers.streams import act_streams

TIGHT = {"num_blocks": 16}
ASYNC = {"use_async_batching": True}
MODES: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("full", {}),
    "samples": ("full", {"n": 3}),
    "cancels": ("full", {}),
    "tight": ("full", TIGHT),
    "tight-prefill-first": ("full", TIGHT | {"scheduler_type": "prefill_first"}),
    "async": ("full", ASYNC),
    "async-tight": ("full", ASYNC | TIGHT),
    "hybrid": ("hybrid", {}),
    "hybrid-samples": ("hybrid", {"n": 3}),
    "sliding": ("sliding", {}),
    "tight-hybrid": ("hybrid", TIGHT),
    "tight-samples": ("full", TIGHT | {"n": 3}),
}
"""The kind of the model's layers, and what is changed of the settings. Requests are not cancelled
while steps overlap: transformers 5.23.0 fails all others then.
"""
MAY_REFUSE = ("tight-hybrid", "tight-samples")
NUM_EXPLAINED = 10_000
"""Number of removed keys that kvcore remembers: more than a run has."""


@attrs.define
class Parting:
    """The difference at which kvcore parted: the call, and the causes of a look-up's misses."""

    call: str = ""
    is_refusal: bool = False
    causes: frozenset[str] = frozenset()

    def is_by_design(self, mode: str) -> bool:
        """Tell whether the page lists it."""
        refuses = self.call == "can_store_request_tokens" and self.is_refusal
        return self.causes == {"evicted"} or (refuses and mode in MAY_REFUSE)


def explain(patched: pytest.MonkeyPatch) -> Parting:
    """Let kvcore remember the keys that it removes, and a shadow say why it parts."""
    remembering = partial(KVCacheManager, explain_entries=NUM_EXPLAINED)
    patched.setattr(cache, "KVCacheManager", remembering)
    part, parting = Shadow.part, Parting()

    def parts(shadow: Shadow, own: Any, name: str, who: str, mine: Any, theirs: Any) -> None:
        parting.call, parting.is_refusal = name, mine is True and theirs is False
        if name == "search_prefix_match" and shadow.kvcore and isinstance(theirs, int):
            missed = shadow.kvcore.manager.explain_miss(who)
            parting.causes = (
                frozenset(each.cause for each in missed.spans) if missed else parting.causes
            )
        part(shadow, own, name, who, mine, theirs)

    patched.setattr(Shadow, "part", parts)
    return parting


def run(mode: str, seed: int) -> Shadow:
    """Return what both caches did in a run."""
    kind, changed = MODES[mode]
    chance = random.Random(seed)
    prompts = draw_prompts(seed, num_prompts=20, num_systems=4)
    cancelled: set[str] = set()

    def cancel(manager: Any) -> None:
        active = sorted(manager.batch_processor.scheduler.active_requests)
        if active and chance.random() < 0.1:
            cancelled.add(name := chance.choice(active))
            manager.cancel_request(name)

    cancels = "cancels" in mode
    served = serve(
        tiny(kind, seed),
        prompts,
        before_step=cancel if cancels else None,
        num_expected=(lambda: len(prompts) - len(cancelled)) if cancels else None,
        new=chance.randrange(4, 24),
        **changed,
    )
    shadow: Shadow = served.cache.shadow
    if served.errors or not shadow.num_calls:
        raise RuntimeError(f"{mode}, seed {seed}: {served.errors or 'nothing was compared'}")
    return shadow


def main() -> int:
    """Run. Returns 1 if kvcore differs from transformers' cache."""
    parser = argparse.ArgumentParser(prog="make engines-transformers-shadow", description=__doc__)
    parser.add_argument("--modes", default=",".join(MODES), metavar="NAME,...", help="%(default)s")
    parser.add_argument("--seeds", type=int, default=4, help="runs of each mode, %(default)s")
    given = parser.parse_args()
    modes = given.modes.split(",")
    if unknown := sorted({*modes} - MODES.keys()):
        parser.error(f"no modes are called {', '.join(unknown)}")
    logger.setLevel(logging.CRITICAL)  # differences are printed here, reports are summed up
    failed = False
    for mode in modes:
        parted = steps = 0
        hits, evictions = [0, 0], [0, 0]
        for seed in range(given.seeds):
            with pytest.MonkeyPatch.context() as patched, kvcore_transformers.installed():
                act_streams(patched)
                parting = explain(patched)
                shadow = run(mode, seed)
            steps += shadow.num_steps
            hits = [a + b for a, b in zip(hits, shadow.hit_tokens.values(), strict=True)]
            evictions = [
                a + b for a, b in zip(evictions, shadow.num_evictions.values(), strict=True)
            ]
            if shadow.difference is not None:
                by_design = parting.is_by_design(mode)
                why = ", by design" if by_design else f" {sorted(parting.causes)}"
                print(f"{mode}, seed {seed}{why}: {shadow.difference}", flush=True)
                failed |= not by_design
                parted += 1
        print(
            f"{mode}: {given.seeds} runs, {steps} steps, {parted} parted; transformers and kvcore: "
            f"{hits[0]} and {hits[1]} hit tokens, {evictions[0]} and {evictions[1]} evictions",
            flush=True,
        )
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
