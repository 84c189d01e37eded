# SPDX-License-Identifier: Apache-2.0
"""The small worlds that are explored to their end."""

from __future__ import annotations

from typing import Any

from kvcore import Config, Group
from kvcore.check.world.world import BASIC_CALLS, World

SEED = b"explored"
FULL = Group(2)
WINDOW = Group(2, kind="sliding_window", window=2)
CHUNKS = Group(2, kind="chunked_local", window=2)
OF_WORLD = frozenset(
    {"num_letters", "num_drafts", "num_lookahead", "num_external", "num_encoder", "num_pins"}
    | {"delays", "kinds_of_requests", "moves_per_batch", "loads_fail", "moves"}
)


def world(
    num_blocks: int,
    num_requests: int,
    num_tokens: int,
    *more: str,
    num_prompt: int | None = None,
    without: tuple[str, ...] = (),
    **options: Any,
) -> World:
    """Return a world of this many usable blocks, of 2 tokens unless groups say otherwise.

    There is a null block if a group needs one, or if it is asked for. more, without: calls
    that are tried besides the basic ones, or left out of them. options: of the world or its config.
    """
    of_world = {name: options.pop(name) for name in OF_WORLD & set(options)}
    windowed = any(group.is_windowed for group in options.get("groups", ()))
    null_block = options.setdefault("null_block", windowed)
    options.setdefault("groups", (FULL,))
    return World(
        config=Config(num_blocks + null_block, hash_seed=SEED, **options),
        num_requests=num_requests,
        num_tokens=num_tokens,
        num_prompt=num_prompt or num_tokens,
        calls=BASIC_CALLS.union(more).difference(without),
        **of_world,
    )
