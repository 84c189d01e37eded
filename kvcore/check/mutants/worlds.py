# SPDX-License-Identifier: Apache-2.0
"""The small worlds in which seeded bugs show.

Rules: each is as small as its bugs allow, so that the shortest run to a bug is found in a moment.
Blocks hold two tokens unless groups say otherwise, and are counted without the null block. Twin:
none.
"""

from __future__ import annotations

from typing import Any

from kvcore.check.world import BASIC_CALLS, World
from kvcore.config import Config
from kvcore.extra_keys import LoRA, MediaItem
from kvcore.groups import Group

SEED = b"explored"
FULL = Group(2)
SLOT = Group(1)
WINDOW = Group(1, kind="sliding_window", window=2)
OF_WORLD = frozenset(
    {"num_letters", "num_drafts", "num_lookahead", "num_external", "num_encoder", "moves"}
    | {"delays", "kinds_of_requests", "calls_per_batch", "loads_fail"}
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
    """A world of so many usable blocks.

    There is a null block where a group needs one, or where it is asked for. more, without: calls
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


BASIC = world(2, 2, 3, enable_events=True)
ONE = world(2, 1, 4, enable_events=True)
NULL = world(3, 1, 2, null_block=True)
CUT = world(2, 2, 3, "truncate", enable_events=True)
SWAP = world(2, 2, 3, "swap_out", "swap_in", num_host_blocks=2)
PAIRS = world(2, 2, 3, "truncate", calls_per_batch=2)
TRIPLES = world(3, 2, 3, calls_per_batch=3, without=("append", "remove_request"))
SIBLINGS = world(
    *(2, 2, 4),
    num_letters=1,
    calls_per_batch=2,
    without=("append", "remove_request", "reset_prefix_cache"),
)
SWAP_TRIPLES = world(
    *(1, 2, 2, "swap_out", "swap_in"),
    num_host_blocks=1,
    calls_per_batch=3,
    without=("append", "fork", "remove_request", "reset_prefix_cache"),
)

ALONE = world(3, 1, 4, "remove_skipped_blocks", groups=(WINDOW,))
CAPPED = world(4, 1, 5, groups=(WINDOW,), max_num_batched_tokens=1, num_letters=1)
FORKS = world(3, 2, 3, groups=(WINDOW,), num_letters=1)
BOTH = world(4, 2, 3, groups=(SLOT, WINDOW), enable_events=True)
WIDE = world(5, 2, 3, groups=(SLOT, WINDOW))
TWINS = world(4, 2, 3, groups=(SLOT, SLOT))
SIZES = world(4, 1, 3, groups=(FULL, SLOT))
EAGLE = world(3, 1, 4, use_eagle=True, groups=(SLOT,))
ENCODER = world(
    *(4, 2, 2, "truncate"),
    groups=(SLOT, Group(2, kind="cross_attention")),
    num_encoder=3,
    enable_caching=False,
)
ZEROED = world(2, 1, 3, groups=(Group(2, zero_new_blocks=True),))
WATERMARK = world(2, 2, 3, watermark_blocks=1)

DRAFTS = world(3, 1, 4, num_drafts=2)
LOADS = world(2, 2, 3, num_external=2, loads_fail=True)
WINDOW_LOADS = world(3, 2, 3, groups=(WINDOW,), num_external=1)
LOAD_PAIRS = world(2, 2, 2, groups=(SLOT,), num_external=1, loads_fail=True, calls_per_batch=2)
LOAD_FORKS = world(2, 2, 2, groups=(SLOT,), num_external=1, loads_fail=True)
LOAD_SWAPS = world(
    *(2, 2, 2, "swap_out", "swap_in"),
    groups=(SLOT,),
    num_host_blocks=2,
    num_external=1,
    loads_fail=True,
)
STORES = world(3, 2, 3, "load", "store", loads_fail=True, groups=(SLOT,))
COPIES = world(3, 2, 3, enable_events=True)
SALTED = world(
    *(2, 2, 2),
    kinds_of_requests=({}, {"cache_salt": "one"}, {"lora": LoRA("one")}),
    num_letters=1,
)
PICTURED = world(
    *(2, 2, 3, "truncate"),
    kinds_of_requests=(
        {"media": (MediaItem("cat", 0, 2),)},
        {"media": (MediaItem("cat cut at 1", 0, 1),)},
    ),
    num_letters=1,
    moves="engine",
)

EVICTED = world(2, 2, 3, "evict_blocks")
MERGES = world(2, 2, 2, duplicates="merge", calls_per_batch=2)
PREALLOCATED = world(2, 1, 4, num_preallocate_tokens=2)
DRAFTS_CUT = world(2, 1, 3, "rewind", num_drafts=2)
FORKED_DRAFTS = world(3, 2, 3, num_drafts=1)
ADAPTERS = world(
    *(3, 2, 2, "load"),
    groups=(SLOT,),
    kinds_of_requests=({}, {"lora": LoRA("one")}),
    num_letters=1,
)
LOAD_PAIRS_OF_CALLS = world(*(2, 1, 2, "load"), groups=(SLOT,), loads_fail=True, calls_per_batch=2)
SWAP_PAIRS = world(
    *(2, 2, 2, "swap_out", "swap_in"),
    num_host_blocks=2,
    calls_per_batch=2,
    without=("append", "fork", "reset_prefix_cache"),
)
SWAP_WATERMARK = world(2, 2, 3, "swap_out", "swap_in", num_host_blocks=2, watermark_blocks=1)
CUT_TWICE = world(2, 1, 4, "truncate", groups=(Group(3),))

FLYING = world(2, 2, 3, max_in_flight=1)
FLYING_TWICE = world(2, 2, 2, max_in_flight=2)
FLYING_SWAPS = world(
    *(2, 2, 2, "swap_out", "swap_in"),
    num_host_blocks=2,
    max_in_flight=1,
    without=("fork", "reset_prefix_cache"),
)
COMPLETED = world(
    *(3, 1, 3),
    groups=(SLOT,),
    max_in_flight=2,
    publish="completed",
    without=("fork", "append", "reset_prefix_cache"),
)
KEYS_EVICTED = world(2, 1, 4, "evict_blocks", without=("fork", "reset_prefix_cache"))
SIZES_TWICE = world(
    *(7, 1, 3),
    groups=(FULL, SLOT),
    moves="engine",
    without=("fork", "append", "reset_prefix_cache"),
)
SALTED_HITS = world(
    *(2, 2, 3),
    kinds_of_requests=({}, {"cache_salt": "one"}, {"lora": LoRA("one")}),
    num_letters=1,
    moves="engine",
)
LEAVING = world(
    *(2, 1, 3, "truncate"),
    num_letters=1,
    calls_per_batch=4,
    without=("fork", "append", "remove_request", "reset_prefix_cache"),
)
DRAFTS_TOLD = world(2, 1, 4, num_drafts=1, moves="engine")
FLYING_LOADS = world(2, 1, 2, "load", groups=(SLOT,), max_in_flight=2, loads_fail=True)
COPY_CHAINS = world(
    *(2, 2, 2, "swap_out", "swap_in"),
    num_host_blocks=1,
    calls_per_batch=2,
    without=("append", "reset_prefix_cache"),
)
TIGHT = world(1, 2, 3)
SWAP_ONE = world(
    *(1, 2, 2, "swap_out", "swap_in"),
    num_host_blocks=1,
    calls_per_batch=2,
    without=("append", "fork", "reset_prefix_cache"),
)
COPIES_EVICTED = world(
    *(2, 2, 3, "evict_blocks"),
    moves="engine",
    without=("fork", "append", "reset_prefix_cache"),
)
SWAP_CHAIN = world(
    *(1, 2, 2, "swap_out", "swap_in"),
    num_host_blocks=2,
    calls_per_batch=2,
    without=("append", "fork", "free", "remove_request", "reset_prefix_cache"),
)
FLYING_FORKS = world(
    *(2, 2, 3),
    num_letters=1,
    max_in_flight=1,
    without=("remove_request", "reset_prefix_cache"),
)
FLYING_SWAPPED = world(
    *(2, 2, 1, "swap_out", "swap_in"),
    groups=(SLOT,),
    enable_caching=False,
    num_letters=1,
    num_host_blocks=2,
    max_in_flight=2,
    calls_per_batch=2,
    without=("append", "free", "remove_request", "reset_prefix_cache"),
)
FLYING_FAMILY = world(
    *(2, 2, 1),
    groups=(SLOT,),
    num_letters=1,
    max_in_flight=3,
    without=("append", "reset_prefix_cache"),
)
FLYING_WINDOW = world(
    *(3, 1, 3), groups=(WINDOW,), num_letters=1, max_in_flight=2, without=("fork", "append")
)
FLYING_LEFT = world(1, 1, 1, max_in_flight=2, without=("fork", "append", "reset_prefix_cache"))
