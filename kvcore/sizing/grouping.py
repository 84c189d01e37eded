# SPDX-License-Identifier: Apache-2.0
"""Makes groups of equal blocks for a model whose layers keep their cache in several ways.

Layers of one kind are split, in the model's order, into groups with the same number of slots, so
that every group's block has the same size in bytes. With at most `NUM_GROUPS_MAX` groups, the
number of slots is chosen to leave the fewest slots empty: first in groups that keep everything,
where the cost of an empty slot grows with the request, then in all groups; ties go to the fewest
groups. If tokens of two kinds have different sizes, blocks of the smaller kind hold more tokens. If
sizes cannot be made equal in this way, the model is refused. A state has a size of its own: blocks
of attention get enough tokens to reach the largest state, and all states are padded to that size.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import attrs

from kvcore.sizing.errors import NoInterval, NoLayers, NoStates, UnevenHashes
from kvcore.sizing.layout import KVCacheGroupSpec, check_pages, create_kv_cache_group_specs
from kvcore.sizing.memory import Specs
from kvcore.sizing.specs import LayerSpec, StateSpec, blocks_of, check_count

NUM_GROUPS_MAX = 8
"""More groups cost time in every step; with more kinds than this, each has one group."""
NUM_GROUPS_MAX_WITH_STATES = 16
"""Models with states have few layers of attention: fewer groups would leave slots of them empty."""


def group_layers(
    specs: Specs, checkpoint_interval: int | None = None
) -> tuple[KVCacheGroupSpec, ...]:
    """Make groups for these layers, those that keep everything first.

    checkpoint_interval: tokens between kept states; None: the tokens of a block of attention. Does
    not modify specs. Raises NoLayers, NoInterval, NoStates, GroupsDoNotFit.
    """
    if not specs:
        raise NoLayers
    resized = _fit_states(specs, checkpoint_interval)
    kinds = _kinds(resized)
    num_slots = choose_num_slots({spec: len(names) for spec, names in kinds.items()})
    parts = [
        names[start : start + num_slots]
        for names in kinds.values()
        for start in range(0, len(names), num_slots)
    ]
    return create_kv_cache_group_specs(resized, parts)


def choose_hash_block_size(
    groups: Sequence[KVCacheGroupSpec], block_size: int, given: int | None
) -> int | None:
    """Return the tokens of a hash if hits may end inside blocks; None for hits at whole blocks.

    block_size: tokens of a block of attention without states; beside states a hash has at most as
    many. given: use this many instead. A hash of the most tokens that divide all blocks leaves hits
    at whole blocks. Raises WrongArgument, InvalidCount, UnevenHashes.
    """
    sizes = [group.spec.block_size for group in groups]
    common = math.gcd(*sizes)
    if given is not None:
        check_count("hash_block_size", given)
        if common % given:
            raise UnevenHashes(hash_block_size=given, block_sizes=sorted(set(sizes)))
    elif any(isinstance(group.spec, StateSpec) for group in groups):
        given = math.gcd(block_size, common)
    return None if given == common else given


def choose_num_slots(num_layers: dict[LayerSpec, int]) -> int:
    """Choose the layers per group from the number of layers of each kind; see the rules above."""
    has_states = any(isinstance(spec, StateSpec) for spec in num_layers)
    bound = NUM_GROUPS_MAX_WITH_STATES if has_states else NUM_GROUPS_MAX
    most_groups = max(bound, len(num_layers))

    def cost(num_slots: int) -> tuple[int, int, int]:
        groups = {spec: blocks_of(count, num_slots) for spec, count in num_layers.items()}
        empty = {spec: groups[spec] * num_slots - count for spec, count in num_layers.items()}
        kept = sum(count for spec, count in empty.items() if spec.keeps_all)
        return kept, sum(empty.values()), sum(groups.values())

    largest = max(num_layers.values())
    choices = [slots for slots in range(1, largest + 1) if cost(slots)[2] <= most_groups]
    return min(choices, key=cost)


def _fit_states(specs: Specs, interval: int | None) -> dict[str, LayerSpec]:
    """Return the layers with one page size: blocks of attention large enough for the largest state,
    and padded states.
    """
    states = {name: spec for name, spec in specs.items() if isinstance(spec, StateSpec)}
    if not states:
        if interval is not None:
            raise NoStates(interval=interval)
        return _equal_pages(specs)
    largest = max(spec.state_bytes for spec in states.values())
    resized = _equal_pages({name: spec for name, spec in specs.items() if name not in states})
    if resized:
        factor = blocks_of(largest, next(iter(resized.values())).page_bytes)
        resized = {
            name: attrs.evolve(spec, block_size=spec.block_size * factor)
            for name, spec in resized.items()
        }
        largest = next(iter(resized.values())).page_bytes
    if interval is None:
        full = [spec for spec in resized.values() if spec.keeps_all]
        if not full:
            raise NoInterval
        interval = full[0].block_size
    padded = {
        name: attrs.evolve(spec, block_size=interval, padded_bytes=largest)
        for name, spec in states.items()
    }
    return {name: padded.get(name) or resized[name] for name in specs}


def _equal_pages(specs: Specs) -> dict[str, LayerSpec]:
    """Return the layers with block sizes that give all of them the largest page."""
    largest = max((spec.page_bytes for spec in specs.values()), default=0)
    if any(largest % spec.page_bytes for spec in specs.values()):
        check_pages(list(_kinds(specs)))
    return {
        name: attrs.evolve(spec, block_size=spec.block_size * (largest // spec.page_bytes))
        for name, spec in specs.items()
    }


def _kinds(specs: Specs) -> dict[LayerSpec, list[str]]:
    """Return layer names by kind, those that keep everything first."""
    kinds: dict[LayerSpec, list[str]] = {}
    for keeps_all in (True, False):
        for name, spec in specs.items():
            if spec.keeps_all is keeps_all:
                kinds.setdefault(spec, []).append(name)
    return kinds
