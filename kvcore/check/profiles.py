# SPDX-License-Identifier: Apache-2.0
"""Named worlds, each with the states and edges that a complete exploration has.

Rules: a count that changes means that the core can reach other states, or that another world is
explored; the commit that changes one says which. "standard" ones are explored by every test run,
"long" ones by `make explore`. Usable blocks x requests x tokens; blocks of two tokens unless the
groups say otherwise. Twin: none.
"""

from __future__ import annotations

from typing import Any

import attrs

from kvcore.check.world import BASIC_CALLS, World
from kvcore.config import Config
from kvcore.groups import Group

SEED = b"explored"
FULL = Group(2)
SLOT = Group(1)
WINDOW = Group(1, kind="sliding_window", window=2)
CHUNKS = Group(1, kind="chunked_local", window=2)
OF_WORLD = {each.name for each in attrs.fields(World)} - {"config", "calls"}


@attrs.frozen(kw_only=True)
class Profile:
    """A world with a name. num_states, num_edges: of its complete exploration."""

    name: str
    sentence: str
    world: World
    num_states: int
    num_edges: int
    is_long: bool = False


def world(
    num_blocks: int,
    num_requests: int,
    num_tokens: int,
    *more: str,
    without: tuple[str, ...] = (),
    **options: Any,
) -> World:
    """A world of so many usable blocks.

    There is a null block where a group needs one, or where it is asked for. more, without: calls
    that are tried besides the basic ones, or left out of them. options: of the world or its config.
    """
    of_world = {name: options.pop(name) for name in OF_WORLD & set(options)}
    of_world.setdefault("num_prompt", num_tokens)
    options.setdefault("groups", (FULL,))
    windowed = any(group.is_windowed for group in options["groups"])
    null_block = options.setdefault("null_block", windowed)
    options.setdefault("hash_seed", SEED)
    return World(
        config=Config(num_blocks + null_block, **options),
        num_requests=num_requests,
        num_tokens=num_tokens,
        calls=BASIC_CALLS.union(more).difference(without),
        **of_world,
    )


def engine(num_blocks: int, num_requests: int, num_tokens: int, num_prompt: int) -> World:
    """A world of the moves that an engine makes."""
    return world(num_blocks, num_requests, num_tokens, num_prompt=num_prompt, moves="engine")


_SWAPS = ("swap_out", "swap_in")
_ALONE = ("fork", "append", "reset_prefix_cache")
_SMALL: dict[str, Any] = {"moves": "engine", "without": ("reset_prefix_cache",)}

_STANDARD: tuple[tuple[str, str, World, int, int], ...] = (
    ("engine-3x2x4", "what an engine does, 3 blocks", engine(3, 2, 4, 4), 0, 0),
    (
        "calls-3x2x4",
        "every call by itself, with events",
        world(3, 2, 4, enable_events=True),
        0,
        0,
    ),
    ("groups", "a full and a windowed group", world(4, 2, 3, groups=(SLOT, WINDOW)), 0, 0),
    ("chunks", "chunked local attention", world(2, 2, 3, groups=(CHUNKS,), without=_ALONE), 0, 0),
    ("host", "a host tier, swaps", world(2, 2, 3, *_SWAPS, num_host_blocks=2), 0, 0),
    ("drafts", "drafts accepted in any number", world(2, 2, 3, num_drafts=2), 0, 0),
    (
        "merge",
        "duplicates that merge, two calls a batch",
        world(2, 2, 2, duplicates="merge", calls_per_batch=2),
        0,
        0,
    ),
    ("truncate", "requests that are cut", world(2, 2, 3, "truncate"), 0, 0),
    (
        "external",
        "external tokens that come or fail",
        world(4, 2, 2, groups=(SLOT, WINDOW), num_external=1, loads_fail=True),
        0,
        0,
    ),
    (
        "loads",
        "stores, and loads that fail at each block",
        world(2, 2, 3, "load", "store", groups=(SLOT,), loads_fail=True, without=_ALONE),
        0,
        0,
    ),
    ("pins", "blocks that are pinned", world(3, 2, 3, "pin", "unpin", moves="engine"), 0, 0),
    ("evict", "keys that are forgotten", world(3, 2, 3, "evict_blocks", moves="engine"), 0, 0),
    ("uncached-first", "the other policy", world(2, 2, 3, eviction="uncached_first"), 0, 0),
    ("watermark", "a block that stays free", world(2, 2, 3, watermark_blocks=1), 0, 0),
)


def _profile(row: tuple[str, str, World, int, int], *, is_long: bool) -> Profile:
    name, sentence, where, num_states, num_edges = row
    return Profile(
        name=name,
        sentence=sentence,
        world=where,
        num_states=num_states,
        num_edges=num_edges,
        is_long=is_long,
    )
