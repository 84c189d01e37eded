# SPDX-License-Identifier: Apache-2.0
"""Assigns the layers of a model to cache groups.

A pool has one page size: blocks of all groups have the same size in bytes, so layers times tokens
per block are equal in all groups. Layers of one visibility are distributed, in order, over the
groups that keep what they see; if there is no such group they go to the full-attention groups,
which keep everything, and their window becomes a mask. States lie only in groups of states, whose
blocks hold them whatever their tokens are. Pure: nothing here touches a tensor.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import attrs

from kvcore import Group
from kvcore_runtime.attention.visibility import FULL, Visibility
from kvcore_runtime.cache.errors import GroupsDoNotHoldModel, UnequalPages


@attrs.frozen
class GroupedLayer:
    """The place of a layer: its group, its index among the group's layers, and its visibility."""

    group_id: int
    layer: int
    visibility: Visibility


@attrs.frozen(kw_only=True)
class LayerGroups:
    """The layers of a model, split over cache groups.

    places: of each layer, in the model's order. num_layers, block_sizes, kept: for each group, the
    number of its layers, tokens per block, and what it keeps for a query.
    """

    places: tuple[GroupedLayer, ...]
    num_layers: tuple[int, ...]
    block_sizes: tuple[int, ...]
    kept: tuple[Visibility, ...]

    @property
    def num_groups(self) -> int:
        """Number of cache groups."""
        return len(self.kept)


def make_groups(
    visibilities: Sequence[Visibility], block_size: int, draft_states: int = 0
) -> tuple[Group, ...]:
    """Make cache groups of one block size for layers with these visibilities: the fewest of equal
    layer counts. draft_states: of groups of states.
    """
    counts = {each: visibilities.count(each) for each in dict.fromkeys(visibilities)}
    num_layers = math.gcd(*counts.values())
    return tuple(
        Group(
            block_size,
            kind=each.kind,
            window=each.window,
            draft_states=draft_states if each.is_state else 0,
        )
        for each, count in counts.items()
        for _ in range(count // num_layers)
    )


def place_layers(visibilities: Sequence[Visibility], groups: Sequence[Group]) -> LayerGroups:
    """Split layers with these visibilities over a manager's groups.

    Raises GroupsDoNotHoldModel if a layer has no group, a group no layer, or the layers of a
    visibility do not split evenly, or no group is of attention; UnequalPages if blocks of two
    groups differ in size.
    """
    kept = [kept_by(group_id, group) for group_id, group in enumerate(groups)]
    layers: list[list[int]] = [[] for _ in groups]
    for wanted in dict.fromkeys(visibilities):
        chosen = [index for index, each in enumerate(kept) if each == wanted]
        if not (chosen or wanted.is_state):
            chosen = [index for index, each in enumerate(kept) if each == FULL]
        if not chosen:
            reason = f"no group keeps what {_name(wanted)} layers see"
            raise GroupsDoNotHoldModel(reason=reason, visibility=wanted)
        mine = [index for index, each in enumerate(visibilities) if each == wanted]
        if len(mine) % len(chosen):
            raise GroupsDoNotHoldModel(
                reason=f"{len(mine)} {_name(wanted)} layers do not split over {len(chosen)} groups",
                visibility=wanted,
                num_layers=len(mine),
                num_groups=len(chosen),
            )
        share = len(mine) // len(chosen)
        for part, group_id in enumerate(chosen):
            layers[group_id] += mine[part * share : (part + 1) * share]
    if [] in layers:
        group_id = layers.index([])
        raise GroupsDoNotHoldModel(reason=f"no layer lies in group {group_id}", group_id=group_id)
    _check_pages(layers, groups)
    places = {
        layer: GroupedLayer(group_id, place, visibilities[layer])
        for group_id, members in enumerate(layers)
        for place, layer in enumerate(sorted(members))
    }
    return LayerGroups(
        places=tuple(places[layer] for layer in range(len(visibilities))),
        num_layers=tuple(len(members) for members in layers),
        block_sizes=tuple(group.block_size for group in groups),
        kept=tuple(kept),
    )


def kept_by(group_id: int, group: Group) -> Visibility:
    """Return the positions that a group keeps for a query. Raises GroupsDoNotHoldModel."""
    match group.kind:
        case "full_attention":
            return FULL
        case "sliding_window" | "chunked_local" | "state":
            return Visibility(kind=group.kind, window=group.window)
    reason = f"group {group_id} is {group.kind}, which no layer here is"
    raise GroupsDoNotHoldModel(reason=reason, group_id=group_id, kind=group.kind)


def _check_pages(layers: Sequence[Sequence[int]], groups: Sequence[Group]) -> None:
    """Raise UnequalPages unless layers times tokens per block are equal in all groups of attention;
    GroupsDoNotHoldModel if there is none, so that nothing gives the size of a page.
    """
    chosen = [index for index, group in enumerate(groups) if not group.is_state]
    if not chosen:
        raise GroupsDoNotHoldModel(reason="no group is of attention, so a page has no size")
    first = chosen[0]
    for index in chosen:
        members, group = layers[index], groups[index]
        if len(members) * group.block_size != len(layers[first]) * groups[first].block_size:
            raise UnequalPages(
                group_id=index,
                layers=len(members),
                block_size=group.block_size,
                first=first,
                first_layers=len(layers[first]),
                first_block_size=groups[first].block_size,
            )


def _name(visibility: Visibility) -> str:
    if visibility.window is None:
        return visibility.kind
    return f"{visibility.kind} {visibility.window}"
