# SPDX-License-Identifier: Apache-2.0
"""The setting of a simulated run: a configuration, and the traffic and trouble of its engine.

All of it is drawn from the run's random generators, in a fixed order, so that a seed and the given
options make the run again. Given values are not drawn. A pool is made smaller than its
requests need together, so that most runs evict and preempt.
"""

from __future__ import annotations

import math
from random import Random
from typing import Any

import attrs

from kvcore.check.simulate.further import FURTHER
from kvcore.types.config import EVICTIONS, Config
from kvcore.types.errors import KvcoreError
from kvcore.types.groups import Group, Kind

KINDS: tuple[Kind, ...] = ("full_attention", "full_attention", "sliding_window", "chunked_local")
CROSS = 0.1
"""Chance of a group of encoder tokens beside the others; nothing is cached then."""
SHARE = 0.35
"""Chance of each kind of further draws."""
STATES = 0.2
"""Chance of groups of recurrent states beside the others."""
TRIES = 100
MOST_DRAFTS = 4
"""Drafts at a time."""


@attrs.frozen(kw_only=True)
class Fixed:
    """The settings of a run that a caller fixed; those that are None are drawn.

    num_blocks: usable device blocks. num_requests: most requests at a time. config: the whole
    configuration. cross, states: whether a group of encoder tokens, or of recurrent states, may be
    drawn. further: the kinds of further draws that the run makes; each may be drawn if it is None.
    """

    num_blocks: int | None = None
    num_requests: int | None = None
    config: Config | None = None
    cross: bool = True
    states: bool = True
    further: tuple[str, ...] | None = None


@attrs.frozen(kw_only=True)
class Setting:
    """One run's configuration and rates; a rate is the chance of an event in one step.

    num_prompt, num_output: most tokens of a request's prompt and of its answer. budget: most tokens
    that a step schedules. num_documents: texts that prompts begin with. arrival: new requests per
    step. lag: chance that the device is late by another step. fails: chance that a transfer fails.
    further: the rates of further events.
    """

    config: Config
    num_requests: int
    num_prompt: int
    num_output: int
    budget: int
    num_documents: int
    arrival: float
    lag: float
    fails: float
    rates: dict[str, float]
    further: dict[str, float]


def draw_setting(random: Random, more: Random, fixed: Fixed) -> Setting:
    """Draw the setting of a run. more: the generator of its further draws."""
    names = fixed.further
    if names is None:
        names = tuple(name for name in FURTHER if more.random() < SHARE)
    config = fixed.config
    if config is None:
        config = _with_further(_draw_config(random, fixed), more, names)
    further = [pair for name in names for pair in FURTHER[name].items()]
    usable, size = config.num_usable_blocks, config.block_size
    num_requests = fixed.num_requests or random.choice([2, 5, 20, 60, 200])
    pressure = random.choice([0.5, 1.0, 1.5, 3.0])
    share = max(1, int(usable * pressure / (num_requests * len(config.groups))))
    longest = max(2, min(share * size * 2, config.length_limit, 4096))
    num_output = random.randint(1, max(1, longest // 2))
    rates = {
        name: random.choice([0.0, rate, rate, 4 * rate])
        for name, rate in RATES.items()
        if name != "swap" or config.num_host_blocks
    }
    if config.has_states:
        rates |= {name: random.choice([0.0, 0.2, 0.9]) for name in OF_STATES}
        rates["guess"] *= most_drafts(config) > 0
    return Setting(
        config=config,
        num_requests=num_requests,
        num_prompt=max(1, longest - num_output),
        num_output=num_output,
        budget=random.choice([longest, longest * 2, max(1, longest // 2), 4 * num_requests]),
        num_documents=random.choice([1, 3, 20]),
        arrival=random.choice([0.3, 1.0, 3.0]),
        lag=random.choice([0.1, 0.5, 0.9]),
        fails=random.choice([0.0, 0.1, 0.5]),
        rates=rates,
        further={name: min(1.0, rate * more.choice([1, 1, 2])) for name, rate in further},
    )


RATES = {
    "abort": 0.03,
    "accept": 0.8,
    "cache": 0.05,
    "cancel": 0.03,
    "drain": 0.1,
    "evict": 0.02,
    "external": 0.1,
    "extend": 0.05,
    "fork": 0.05,
    "guess": 0.1,
    "hashes": 0.2,
    "late": 0.2,
    "load": 0.05,
    "lookahead": 0.05,
    "pin": 0.02,
    "preempt": 0.02,
    "reset": 0.01,
    "store": 0.05,
    "swap": 0.05,
    "trim": 0.02,
    "truncate": 0.03,
    "unpin": 0.05,
}
"""Events besides a request's normal life, with the chance of each in one step."""
OF_STATES = ("advise", "mark")
"""What a call does for checkpoints: it ends where `checkpoint_stop` says, or marks its end."""


def most_drafts(config: Config) -> int:
    """Return how many drafts a step may compute; none if one of its states has no place."""
    places = (group.draft_states for group in config.groups if group.is_state)
    return min((MOST_DRAFTS, *places))


def _draw_config(random: Random, fixed: Fixed) -> Config:
    for _ in range(TRIES):
        try:
            return Config(**_draw_options(random, fixed))
        except KvcoreError:
            continue
    return Config((fixed.num_blocks or 64) + 1, block_size=4, hash_seed=b"simulate")


def _with_further(config: Config, more: Random, names: tuple[str, ...]) -> Config:
    """Return the configuration with what the named draws need, as far as the manager accepts it."""
    changes: dict[str, Any] = {}
    if "retention" in names:
        changes["eviction"] = "retention"
    if "inside" in names:
        common = math.gcd(*(group.block_size for group in config.groups))
        units = [unit for unit in range(1, common) if common % unit == 0]
        if units and config.enable_caching:
            changes["hash_block_size"] = more.choice(units)
            changes["eviction"] = more.choice(["lru", "uncached_first"])
    if config.has_states:
        most = more.choice([0, 1, 2, 4])
        changes["groups"] = tuple(_with_drafts(group, most) for group in config.groups)
    return attrs.evolve(config, **changes)


def _with_drafts(group: Group, most: int) -> Group:
    """Return a group with states after at most this many drafts, if it keeps states."""
    if not group.is_state:
        return group
    return attrs.evolve(group, draft_states=min(most, group.block_size - 1))


def _draw_options(random: Random, fixed: Fixed) -> dict[str, Any]:
    usable = fixed.num_blocks or random.choice([8, 24, 100, 400, 1000, 4000])
    groups = _draw_groups(random, usable)
    if random.random() < CROSS and fixed.cross:
        groups = (*groups, Group(groups[0].block_size, kind="cross_attention"))
    if fixed.states and random.random() < STATES:
        sizes = [groups[0].block_size * random.choice([1, 1, 2, 4])] * random.choice([1, 1, 2])
        groups = (*(Group(size, kind="state") for size in sizes), *groups)
    windowed = any(group.is_windowed for group in groups)
    null_block = windowed or random.random() < 0.7
    host = random.choice([0, 0, usable // 2, 2 * usable])
    in_flight = random.choice([0, 0, 1, 1, 2, 3])
    return {
        "num_blocks": usable + null_block,
        "groups": groups,
        "num_host_blocks": host,
        "max_num_batched_tokens": random.choice([None, None, 64]),
        "enable_caching": random.random() < 0.9 and not groups[-1].is_cross,
        "null_block": null_block,
        "eviction": random.choice(["lru", "lru", *EVICTIONS]),
        "duplicates": random.choice(["keep", "keep", "merge"]),
        "num_preallocate_tokens": random.choice([0, 0, 0, 3, 20]),
        "watermark_blocks": random.choice([0, 0, 1, usable // 50]),
        "use_eagle": random.random() < 0.1,
        "enable_events": random.random() < 0.5,
        "record_new_blocks": random.random() < 0.2,
        "hashing": random.choice(["sha256", "sha256", "xxh3"]),
        "hash_seed": b"simulate",
        "max_in_flight": in_flight,
        "publish": random.choice(["scheduled", "scheduled", "completed"]),
    }


def _draw_groups(random: Random, usable: int) -> tuple[Group, ...]:
    size = random.choice([1, 2, 4, 4] if usable < 64 else [4, 16, 16, 16])
    groups = []
    for _ in range(random.choice([1, 1, 2, 3])):
        kind = random.choice(KINDS)
        block_size = size * random.choice([1, 1, 2])
        windowed = kind in ("sliding_window", "chunked_local")
        window = random.randint(1, 4 * size) if windowed else None
        zero = random.random() < 0.2
        groups.append(Group(block_size, kind=kind, window=window, zero_new_blocks=zero))
    return tuple(groups)
