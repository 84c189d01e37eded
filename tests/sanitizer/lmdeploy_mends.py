# SPDX-License-Identifier: Apache-2.0
"""Mends of LMDeploy 0.18.0 in memory, one for each cause of what was found in it.

Run by LMDeploy's own interpreter: prints, for each world that is named, what it finds as the engine
is, with the mend of its cause alone, and with all mends.
"""

import json
import sys
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import patch

from kvcore.sanitizer.engines import lmdeploy
from kvcore.sanitizer.hunter.run import run
from kvcore.sanitizer.hunter.world import HuntWorld, world_from_json

Mend = Callable[..., Any]
"""Stands in place of a method, and gets that method as its first argument."""


async def sleep(method: Any, engine: Any, level: int = 1) -> None:
    """Empty the tree when all sessions have ended."""
    await method(engine, level)
    engine.scheduler.block_trie.evict(engine.scheduler.block_manager.num_gpu_blocks)


def preempt(method: Any, scheduler: Any, seqs: Iterable[Any]) -> None:
    """Give up the blocks and the state of a preempted request."""
    running = [seq for seq in seqs if seq.status.name == "RUNNING"]
    method(scheduler, seqs)
    for seq in running:
        seq.state.release_paging_resources()


async def outputs(method: Any, loop: Any, running: Any, inputs: Any) -> Any:
    """Note the states of the batch in flight, while the next one is made."""
    loop.inputs_maker.flying = {seq.logical_state for seq in running}
    answered = await method(loop, running, inputs)
    loop.inputs_maker.flying = set()
    return answered


def save(method: Any, maker: Any, seqs: Any, delta: Any) -> Any:
    """Save the state of a request in flight before the next batch, where restores are made."""
    made = method(maker, seqs, delta)
    if made is not None:
        flying, pairs = getattr(maker, "flying", ()), list(zip(*made.state_save_plan, strict=True))
        for plan, early in (("state_restore_plan", True), ("state_save_plan", False)):
            chosen = [pair for pair in pairs if (pair[0] in flying) is early]
            object.__setattr__(made, plan, tuple(zip(*chosen, strict=True)) or ((), ()))
    return made


def extend(method: Any, trie: Any, seq: Any, node: Any, num_blocks: int) -> None:
    """Put no block into the tree behind a request's private copies."""
    private = seq.prefix_cache.recompute_overlap.fresh_block_range
    method(trie, seq, node, min(num_blocks, private.start) if private else num_blocks)


def chunk(method: Any, task: Any, *args: Any) -> Any:
    """Drop rows of preempted requests from the decode, as a prefill that is no chunk does."""
    task.delta, task.maker.running_seqs, _ = task.maker.create_model_inputs_delta_valid_only()
    return method(task, *args)


def payload(method: Any, task: Any) -> Any:
    """Tell the model agent of the dropped rows."""
    task.result.delta = task.result.delta or getattr(task, "delta", None)
    return method(task)


def mends() -> dict[str, list[tuple[Any, str, Mend]]]:
    """Return what mends each world of a cause: class, method and what stands in its place."""
    source = lmdeploy.source
    maker, loop = source("engine.inputs_maker"), source("engine.engine_loop").EngineLoop
    task, scheduler = maker._ForwardInputsTask, source("paging").Scheduler
    preempts = [(scheduler, "preempt_seqs", preempt)]
    return {
        "tree_survives_sleep": [(source("engine.engine").Engine, "sleep", sleep)],
        "hit_behind_own_blocks": preempts,
        "state_counts_a_token_twice": preempts,
        "state_saved_a_step_late": [
            (loop, "_main_loop_get_outputs", outputs),
            (maker.InputsMakerAsync, "_make_decode_cache_inputs", save),
        ],
        "ancestors_fill_the_pool": [
            (source("paging.block_trie.trie").BlockTrie, "_extend_trie_path", extend)
        ],
        "preempted_row_stays": [
            (task, "_build_chunk_inputs", chunk),
            (task, "_build_payload", payload),
        ],
    }


def instead(method: Any, mend: Mend) -> Any:
    """Return a method that calls a mend with the method in whose place it stands."""
    return lambda *args: mend(method, *args)


def found(world: HuntWorld, changes: Iterable[tuple[Any, str, Mend]] = ()) -> str | None:
    """Run a world with these changes; return the name of its finding."""
    with ExitStack() as stack:
        for owner, name, mend in changes:
            stack.enter_context(patch.object(owner, name, instead(getattr(owner, name), mend)))
        outcome = run(lmdeploy.Adapter, world)
    return outcome.found.name if outcome.found else None


if __name__ == "__main__":
    lmdeploy.Adapter.version()
    by_cause = mends()
    every = [change for changes in by_cause.values() for change in changes]
    for path in map(Path, sys.argv[1:]):
        world = world_from_json(json.loads(path.read_text())["world"])
        own = by_cause[path.stem.removeprefix("lmdeploy_")]
        print(json.dumps([found(world), found(world, own), found(world, every)]))
