# SPDX-License-Identifier: Apache-2.0
"""Hypothesis strategies: configurations, tokens and calls that keep a run going."""

from __future__ import annotations

from typing import Any

import attrs
from hypothesis import assume
from hypothesis import strategies as st

from kvcore import Config, Group, Hit, KvcoreError, Request
from kvcore.hashing.block_hash import hash_blocks, root_hash
from kvcore.state.state import State
from kvcore.transitions.queries import get_computed_blocks
from kvcore.types.config import EVICTIONS as POLICIES
from kvcore.types.config import Duplicates, Eviction, Publish
from kvcore.types.extra_inputs import LoRA, MediaItem
from kvcore.types.groups import Kind
from kvcore.types.keys import Hashing
from kvcore.types.values import Status
from tests.helpers.lockstep import Lockstep

EVICTIONS: list[Eviction] = [*POLICIES]
DUPLICATES: list[Duplicates] = ["keep", "merge"]
PUBLISHES: list[Publish] = ["scheduled", "scheduled", "completed"]
HASHINGS: list[Hashing] = ["sha256", "sha256", "sha256_cbor", "xxh3", "siphash"]
NAMES = ("a", "b", "c", "d", "e")
KINDS: list[Kind] = [
    *("full_attention", "full_attention", "mla"),
    *("sliding_window", "sliding_window", "chunked_local"),
]
LORAS = (LoRA("one"), LoRA("two", "/two"))
SALTS = ("one", "two")
PLACEHOLDER = 7
"""The token that stands in the place of media; nothing else is it."""


def rarely() -> st.SearchStrategy[bool]:
    """Draw True once in a while (`integers` would give its ends far too often)."""
    return st.sampled_from([False, False, False, False, True])


def seldom() -> st.SearchStrategy[bool]:
    """Draw True now and then, for calls that are mostly misuse."""
    return st.integers(0, 14).map(lambda number: number == 7)


@st.composite
def groups(draw: st.DrawFn, block_sizes: list[int], *, cross: bool) -> tuple[Group, ...]:
    """Draw one to three groups of any kinds; a cross-attention group never stands alone."""
    size = draw(st.sampled_from(block_sizes))
    sizes = [size, size, 2 * size, 3 * size] if size <= 4 else [size, size, 2 * size]
    made = []
    for _ in range(draw(st.sampled_from([1, 1, 2, 2, 3]))):
        kind = draw(st.sampled_from(KINDS))
        windowed = kind in ("sliding_window", "chunked_local")
        made.append(
            Group(
                draw(st.sampled_from(sizes)),
                kind=kind,
                window=draw(st.integers(1, 3 * size)) if windowed else None,
                zero_new_blocks=draw(rarely()),
            )
        )
    if cross:
        made.append(Group(draw(st.sampled_from(sizes)), kind="cross_attention"))
    return tuple(made)


@st.composite
def configs(draw: st.DrawFn, *, least: int = 3, most: int = 8) -> Config:
    """Draw any configuration whose device pool has this many usable blocks."""
    usable = draw(st.integers(least, most))
    caching = draw(st.sampled_from([True, True, True, False]))
    cross = not caching and draw(st.booleans())
    kinds = draw(groups([1, 2, 2, 3, 3, 4] if most < 64 else [1, 4, 16], cross=cross))
    windowed = any(group.is_windowed for group in kinds)
    null_block = windowed or draw(st.booleans())
    eagle = draw(rarely())
    if eagle and draw(st.booleans()):
        kinds = (attrs.evolve(kinds[0], eagle=True), *kinds[1:])
    usable = max(usable, 3 * len(kinds))
    limit = usable // len(kinds) * min(group.block_size for group in kinds)
    longest = draw(st.sampled_from([None, None, None, limit, 1 + limit // 2]))
    floor = 0 if longest is None else draw(st.sampled_from([0, 1, 2]))
    try:
        return Config(
            usable + null_block,
            groups=kinds,
            num_host_blocks=draw(st.sampled_from([0, usable // 2, usable])),
            max_model_len=longest,
            max_num_batched_tokens=draw(st.sampled_from([None, None, 1, 2, 5])),
            enable_caching=caching,
            null_block=null_block,
            eviction=draw(st.sampled_from(EVICTIONS)),
            duplicates=draw(st.sampled_from(DUPLICATES)),
            max_in_flight=draw(st.sampled_from([0, 0, 1, 2, 3])),
            publish=draw(st.sampled_from(PUBLISHES)),
            num_preallocate_tokens=draw(st.sampled_from([0, 0, 0, 1, 5])),
            watermark_blocks=draw(st.sampled_from([0, 0, 0, 0, 0, 1, 2])),
            use_eagle=eagle,
            enable_events=draw(st.booleans()),
            record_new_blocks=draw(rarely()),
            hide_salts=draw(rarely()),
            floors={SALTS[0]: floor} if floor else {},
            hashing=draw(st.sampled_from(HASHINGS)),
            hash_seed=b"tests",
        )
    except KvcoreError:
        assume(False)
        raise


@st.composite
def inside_blocks(draw: st.DrawFn, drawn: st.SearchStrategy[Config]) -> Config:
    """Draw a configuration whose hits may end inside blocks, as near as can be to one of these."""
    config = draw(drawn.filter(lambda config: config.enable_caching))
    kept = ("lru", "uncached_first")
    groups, common = config.groups, config.hash_block_size
    if common == 1:
        groups = tuple(attrs.evolve(each, block_size=2 * each.block_size) for each in groups)
        common = 2
    return attrs.evolve(
        config,
        block_size=groups[0].block_size,
        groups=groups,
        eviction=config.eviction if config.eviction in kept else "lru",
        floors={},
        hash_block_size=draw(st.sampled_from([n for n in range(1, common) if common % n == 0])),
    )


def tokens(config: Config, *, most: int) -> st.SearchStrategy[list[int]]:
    """Draw prompts of two letters, so that prefixes meet; for large blocks, of whole equal runs."""
    if most <= 16:
        return st.lists(st.integers(0, 1), min_size=1, max_size=most)
    size = config.block_size
    runs = st.lists(st.sampled_from([0, 1, 2]), min_size=1, max_size=max(1, most // size))
    return st.tuples(runs, st.integers(0, size)).map(
        lambda pair: [letter for letter in pair[0] for _ in range(size)] + [9] * pair[1]
    )


@st.composite
def requests(draw: st.DrawFn, state: State, name: str, *, most: int) -> Request:
    """Draw a request, plain more often than not; else with extra keys, flags or hashes of its
    own.

    Its prompt often begins as another request does, or follows it.
    """
    config = state.config
    prompt = draw(tokens(config, most=most))
    known = sorted(state.requests)
    if draw(st.booleans()) and known:
        other = list(state.requests[draw(st.sampled_from(known))].tokens)
        prompt = (other + prompt)[: draw(st.integers(max(1, len(other) // 2), most))]
    if draw(st.sampled_from([True, True, True, False])):
        return Request(name, prompt)
    options: dict[str, Any] = {}
    if draw(rarely()):
        options["skip_reading_prefix_cache"] = True
    kind = draw(st.sampled_from(["lora", "salt", "media", "media", "own", "none"]))
    match kind:
        case "lora":
            options["lora"] = draw(st.sampled_from(LORAS))
        case "salt":
            options["cache_salt"] = draw(st.sampled_from(SALTS))
        case "media":
            start = draw(st.integers(0, len(prompt) - 1))
            end = draw(st.integers(start + 1, len(prompt)))
            prompt[start:end] = [PLACEHOLDER] * (end - start)
            item = f"{draw(st.sampled_from(['cat', 'dog']))} of {end - start}"
            options["media"] = (MediaItem(item, start, end - start),)
        case "own":
            options["block_hashes"] = own_hashes(config, prompt)[: draw(st.integers(0, 2))]
    return Request(name, prompt, **options)


def own_hashes(config: Config, prompt: list[int]) -> list[bytes]:
    """Draw an engine's hashes of full blocks, of another chain than the core's."""
    root = root_hash(b"the engine's")
    return list(hash_blocks(root, prompt, config.hash_block_size))


@st.composite
def allocations(
    draw: st.DrawFn, run: Lockstep, stale: list[Hit], names: list[str] | None = None
) -> tuple[Any, ...]:
    """Draw arguments and options of `allocate_slots`, legal more often than not.

    names: requests to choose from, all unless given.
    """
    state = run.state
    request_id = draw(st.sampled_from(names or sorted(state.requests)))
    request = state.requests[request_id]
    hit: Hit | None = None
    if not any(request.tables) and not draw(rarely()):
        hit = get_computed_blocks(state, request_id)
        stale.append(hit)
    elif draw(seldom()) and stale:
        hit = draw(st.sampled_from(tuple(stale)))
    start = request.num_computed + (0 if hit is None else hit.num_tokens)
    left = max(0, len(request.tokens) - start)
    external = draw(st.integers(0, left)) if draw(st.sampled_from([0, 0, 1])) else 0
    rest = left - external + len(request.drafts)
    count = draw(st.sampled_from([rest, rest, max(1, rest // 2), 1, 1]))
    return request_id, count, hit, draw(options_of(state, request_id, external))


@st.composite
def options_of(draw: st.DrawFn, state: State, request_id: str, external: int) -> dict[str, Any]:
    """Draw the options of an allocation, each left out more often than not."""
    options: dict[str, Any] = {}
    if external:
        options["num_external_computed_tokens"] = external
    if draw(rarely()):
        options["num_lookahead_tokens"] = draw(st.integers(0, 2 * state.config.block_size))
    for flag in ("delay_cache_blocks", "full_sequence_must_fit"):
        if draw(rarely()):
            options[flag] = True
    if draw(seldom()):
        options["reserved_blocks"] = draw(st.integers(0, 3))
    if any(group.is_cross for group in state.config.groups):
        fresh = not state.requests[request_id].num_computed
        options["num_encoder_tokens"] = draw(st.integers(0, 5)) if fresh else 0
    return options


def by_status(state: State, *statuses: Status) -> list[str]:
    """Return the ids of the requests in one of these statuses, sorted."""
    return sorted(name for name, each in state.requests.items() if each.status in statuses)
