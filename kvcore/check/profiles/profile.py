# SPDX-License-Identifier: Apache-2.0
"""The form of a named world, and the function that makes one.

Blocks hold two tokens unless groups say otherwise, and are counted without the null block. The
named worlds are in registry.py, features.py and loads.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import attrs

from kvcore.check.world.world import BASIC_CALLS, World
from kvcore.types.config import Config
from kvcore.types.groups import Group

SEED = b"explored"
FULL = Group(2)
SLOT = Group(1)
WINDOW = Group(1, kind="sliding_window", window=2)
STATE = Group(2, kind="state")
OF_WORLD = frozenset(attrs.fields_dict(World)) - {"config", "calls"}
SWAPS = ("swap_out", "swap_in")
SHARING = ("fork", "append", "reset_prefix_cache")
STAYING = (*SHARING, "remove_request")
"""Calls that many worlds leave out to stay small."""
FLYING: dict[str, Any] = {"max_in_flight": 1, "num_letters": 1}
FLYING_SLOTS: dict[str, Any] = {"groups": (SLOT,), **FLYING}
TWO_FLYING: dict[str, Any] = {**FLYING_SLOTS, "max_in_flight": 2}
"""Options of worlds with batches in flight."""


@attrs.frozen
class Profile:
    """A named world: its options, its numbers of states and edges, and what it must show.

    slow: whether it is explored whole only by `make explore`. backend: the one that explores it
    unless another is requested. shows: what it must show besides all that worlds with its options
    show (coverage.py), such as "call free: HitInOpenBatch", "command Zero" or "goal merge".
    not_shown: what worlds with its options show and this one cannot, with the reason.
    """

    sentence: str
    world: World
    num_states: int
    num_edges: int
    slow: bool = False
    backend: Literal["python", "rust", "both"] = "python"
    shows: tuple[str, ...] = ()
    not_shown: Mapping[str, str] = {}

    def with_reason(self, missing: str) -> str:
        """Return an entry of what the world never shows, with the reason if it has one."""
        reason = self.not_shown.get(missing)
        return missing if reason is None else f"{missing} ({reason})"


def world(
    num_blocks: int,
    num_requests: int,
    num_tokens: int,
    num_prompt: int,
    *more: str,
    without: tuple[str, ...] = (),
    **options: Any,
) -> World:
    """Make a world of this many usable blocks, explored by an engine's moves.

    more, without: calls that are tried besides the basic ones, or left out of them. options: of the
    world or its config.
    """
    of_world = {name: options.pop(name) for name in OF_WORLD & set(options)}
    of_world.setdefault("moves", "engine")
    options.setdefault("groups", (FULL,))
    null_block = any(group.is_windowed for group in options["groups"])
    return World(
        config=Config(num_blocks + null_block, null_block=null_block, hash_seed=SEED, **options),
        num_requests=num_requests,
        num_tokens=num_tokens,
        num_prompt=num_prompt,
        calls=BASIC_CALLS.union(more).difference(without),
        **of_world,
    )
