# SPDX-License-Identifier: Apache-2.0
"""Groups of equal blocks for a model whose layers keep their cache in several ways.

Layers that are kept alike are split, in the model's order, into groups of equally many
slots, so that every group's block has the same bytes. The number of slots is the one, with at most
`NUM_GROUPS_MAX` groups, that leaves the fewest slots empty: first in groups that keep everything,
where an empty slot costs as much as the request is long, then in all; of equals, the one with the
fewest groups. Where one token takes different bytes, the blocks of the smaller kind hold more
tokens. What cannot be made equal so is refused.
"""

from __future__ import annotations

import attrs

from kvcore.sizing.errors import NoLayers
from kvcore.sizing.layout import KVCacheGroupSpec, check_pages, create_kv_cache_group_specs
from kvcore.sizing.memory import Specs
from kvcore.sizing.specs import LayerSpec, blocks_of

NUM_GROUPS_MAX = 8
"""More groups cost every step time; more kinds than that have a group each."""


def group_layers(specs: Specs) -> tuple[KVCacheGroupSpec, ...]:
    """Groups for these layers, those that keep everything first.

    Does not modify specs. Raises NoLayers, GroupsDoNotFit.
    """
    if not specs:
        raise NoLayers
    resized = _equal_pages(specs)
    kinds = _kinds(resized)
    num_slots = choose_num_slots({spec: len(names) for spec, names in kinds.items()})
    parts = [
        names[start : start + num_slots]
        for names in kinds.values()
        for start in range(0, len(names), num_slots)
    ]
    return create_kv_cache_group_specs(resized, parts)


def choose_num_slots(num_layers: dict[LayerSpec, int]) -> int:
    """Layers per group, from how many layers each kind has; see the rules above."""
    most_groups = max(NUM_GROUPS_MAX, len(num_layers))

    def cost(num_slots: int) -> tuple[int, int, int]:
        groups = {spec: blocks_of(count, num_slots) for spec, count in num_layers.items()}
        empty = {spec: groups[spec] * num_slots - count for spec, count in num_layers.items()}
        kept = sum(count for spec, count in empty.items() if spec.keeps_all)
        return kept, sum(empty.values()), sum(groups.values())

    largest = max(num_layers.values())
    choices = [slots for slots in range(1, largest + 1) if cost(slots)[2] <= most_groups]
    return min(choices, key=cost)


def _equal_pages(specs: Specs) -> dict[str, LayerSpec]:
    """The layers with block sizes that give all of them the largest page."""
    largest = max(spec.page_bytes for spec in specs.values())
    if any(largest % spec.page_bytes for spec in specs.values()):
        check_pages(list(_kinds(specs)))
    return {
        name: attrs.evolve(spec, block_size=spec.block_size * (largest // spec.page_bytes))
        for name, spec in specs.items()
    }


def _kinds(specs: Specs) -> dict[LayerSpec, list[str]]:
    """Layer names by how the layers are kept, those that keep everything first."""
    kinds: dict[LayerSpec, list[str]] = {}
    for keeps_all in (True, False):
        for name, spec in specs.items():
            if spec.keeps_all is keeps_all:
                kinds.setdefault(spec, []).append(name)
    return kinds
