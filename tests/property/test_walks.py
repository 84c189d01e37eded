# SPDX-License-Identifier: Apache-2.0
"""Long random walks through worlds that are too large to explore, checked call by call.

The calls are those of the explorer, each kind as likely as the others, with batches taken now and
then. A failure names its seed and the calls that lead to it.
"""

from __future__ import annotations

import functools
import random
from collections import Counter

import pytest

from kvcore import Config, Group
from kvcore.check.properties.checker import note, note_state
from kvcore.check.search.moves import moves
from kvcore.check.search.report import Report
from kvcore.check.world.world import BASIC_CALLS, World
from kvcore.oracle.prefixes import Prefixes
from kvcore.trace.calls import Call, perform
from kvcore.types.commands import CopyOnWrite, SwapIn, SwapOut, Touch
from tests.helpers.lockstep import Lockstep, story

CALLS = BASIC_CALLS | {"truncate", "swap_out", "swap_in", "evict_blocks", "cache_blocks"}
CALLS |= {"rewind", "remove_skipped_blocks"}
WINDOW = Group(1, kind="sliding_window", window=3)
CONFIGS = [
    Config(6, 2, num_host_blocks=4, null_block=False, enable_events=True),
    Config(7, 3, num_host_blocks=6, duplicates="merge", enable_events=True),
    Config(9, 2, num_host_blocks=8, eviction="uncached_first", num_preallocate_tokens=2),
    Config(13, num_host_blocks=12, groups=(Group(2, zero_new_blocks=True),) * 2),
    Config(16, num_host_blocks=12, groups=(Group(2), WINDOW), enable_events=True),
    Config(9, 2, num_host_blocks=8, eviction="queue_aware", enable_events=True),
    Config(9, 2, num_host_blocks=8, eviction="lru2", duplicates="merge"),
    Config(9, 2, eviction="s3fifo"),
    Config(16, groups=(Group(2), WINDOW), eviction="learned"),
    Config(16, groups=(Group(1), Group(2, kind="chunked_local", window=4)), watermark_blocks=1),
    Config(8, 4, hash_block_size=1, num_host_blocks=4, null_block=False, enable_events=True),
    Config(9, 4, hash_block_size=2, duplicates="merge", num_host_blocks=6),
    Config(16, groups=(Group(4), Group(2, kind="sliding_window", window=3)), hash_block_size=1),
]
IDS = [
    *("plain", "merge", "uncached_first", "groups", "window"),
    *("queue_aware", "lru2", "s3fifo", "learned", "chunks"),
    *("inside_blocks", "inside_blocks_merge", "inside_blocks_window"),
]
NUM_STEPS = 600
GOALS = {each.__name__ for each in (CopyOnWrite, SwapIn, SwapOut, Touch)} | {
    *("sharing", "duplicates", "refused later", "truncate", "Evict"),
}


@functools.cache
def walk(config: Config, seed: int) -> Counter[str]:
    """Make random calls; what they reached."""
    dice = random.Random(seed)
    world = World(
        config=config,
        num_requests=4,
        num_tokens=9,
        num_prompt=5,
        num_drafts=2,
        num_external=2,
        num_lookahead=1,
        delays=(False, True),
        calls=CALLS,
    )
    run, prefixes = Lockstep(config), Prefixes(config)
    report = Report()
    try:
        for _ in range(NUM_STEPS):
            step(run, world, prefixes, dice, report)
    except AssertionError as error:
        error.add_note(f"seed {seed}, {config}, after\n{story(run)}")
        raise
    return report.goals


def step(
    run: Lockstep, world: World, prefixes: Prefixes, dice: random.Random, report: Report
) -> None:
    """Make one random call, or take the batch."""
    if not dice.randrange(4):
        run.call("take_batch")
        run.call("take_events")
        return
    found = moves(world, run.state, prefixes)
    possible = [each for each in found if isinstance(each, Call)]
    name = dice.choice(sorted({call.name for call in possible}))
    call = dice.choice([each for each in possible if each.name == name])
    note(report.notes, call, perform(run.state, call))
    run.call(call.name, *call.args, **call.options)
    note_state(report.notes, run.state)
    prefixes.learn(run.state)


@pytest.mark.parametrize("config", CONFIGS, ids=IDS)
@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2, 3))]
)
def test_long_walk_is_right_at_every_call(config: Config, seed: int) -> None:
    walk(config, seed)


def test_walks_reach_all_that_matters() -> None:
    goals = sum((walk(CONFIGS[0], seed) for seed in range(4)), Counter())
    assert {name for name in GOALS if not goals[name]} == set()
