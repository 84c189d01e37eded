# SPDX-License-Identifier: Apache-2.0
"""What the blocks of a cache of transformers hold, step by step, and a picture of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import numpy as np
from kvcore_runtime.generate.picture import (
    CACHED_COLOUR,
    FREE_COLOUR,
    SHARED_COLOUR,
    request_colours,
)
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Patch

FREE, CACHED, SHARED, OWNED = range(4)
NUM_RESERVED = 2
"""Leading blocks that transformers reserves for padding."""


@attrs.define
class Pools:
    """A row per step, which says what each block holds.

    A number from OWNED on says that one request holds the block, and its kind.
    """

    title: str
    kind_of: Callable[[str], int]
    rows: list[list[int]] = attrs.field(factory=list)
    computed: list[int] = attrs.field(factory=list)
    """Tokens in forward passes up to each step."""

    def add(self, cache: Any, num_computed: int) -> None:
        """Note what the blocks hold now."""
        allocator = next(iter(cache.cache_allocators.values()))
        row = [FREE] * (NUM_RESERVED + allocator.num_blocks)
        for block in self._cached(cache, allocator):
            row[block] = CACHED
        owners: dict[int, list[str]] = {}
        for request_id, table in allocator.block_table.items():
            for block in table:
                owners.setdefault(block, []).append(request_id)
        for block, ids in owners.items():
            row[block] = SHARED if len(ids) > 1 else OWNED + self.kind_of(ids[0])
        self.rows.append(row[NUM_RESERVED:])
        self.computed.append(num_computed)

    def _cached(self, cache: Any, allocator: Any) -> list[int]:
        """Return the blocks whose content can be found."""
        manager = getattr(cache, "manager", None)
        if manager is None:
            return list(allocator.ledger.cached_blocks)
        return [
            block + 1 for block in range(1, manager.config.num_blocks) if manager.has_key(block)
        ]


def draw(pools: list[Pools], kinds: list[str], path: Path) -> None:
    """Write a PNG: each pool over its steps, and below them the number of computed tokens."""
    colours = request_colours(len(kinds))
    palette = [FREE_COLOUR, CACHED_COLOUR, SHARED_COLOUR, *colours]
    figure = Figure(figsize=(12, 9), layout="constrained")
    axes = figure.subplots(len(pools) + 1, 1, sharex=True, height_ratios=[3] * len(pools) + [1.6])
    for panel, each in zip(axes, pools, strict=False):
        panel.imshow(
            np.array(each.rows).T,
            cmap=ListedColormap(palette),
            vmin=-0.5,
            vmax=len(palette) - 0.5,
            aspect="auto",
            interpolation="nearest",
            origin="lower",
        )
        panel.set_title(each.title, loc="left")
        panel.set_ylabel("block")
        axes[-1].plot(each.computed, label=each.title.split(":")[0])
    axes[-1].set_ylabel("tokens computed")
    axes[-1].set_xlabel("step")
    axes[-1].set_ylim(0)
    axes[-1].legend(frameon=False)
    axes[-1].spines[["top", "right"]].set_visible(False)
    named = [
        Patch(facecolor=colour, label=kind) for colour, kind in zip(colours, kinds, strict=True)
    ]
    figure.legend(
        handles=[
            *named,
            Patch(facecolor=SHARED_COLOUR, label="held by several"),
            Patch(facecolor=CACHED_COLOUR, label="cached, held by none"),
            Patch(facecolor=FREE_COLOUR, edgecolor="grey", label="free"),
        ],
        loc="outside lower center",
        ncols=3,
        frameon=False,
    )
    FigureCanvasAgg(figure)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, format="png", dpi=110)
