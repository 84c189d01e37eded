# SPDX-License-Identifier: Apache-2.0
"""Draws a pool record: the blocks over time, and below them what each request does.

A request has one colour in both halves; the lower half names it, so the upper one needs no legend
of its own. Blocks of several owners are dark, cached ones grey, free ones white.
"""

import colorsys
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from numpy.typing import NDArray

from kvcore_runtime.generate.pool_record import Life, PoolRecord

Colour = tuple[float, float, float]

FREE_COLOUR: Colour = (1.0, 1.0, 1.0)
CACHED_COLOUR: Colour = (0.80, 0.80, 0.80)
SHARED_COLOUR: Colour = (0.16, 0.18, 0.24)
GOLDEN_RATIO = 0.618034
DPI = 130


def draw_pool(record: PoolRecord, path: Path, *, title: str, first_block: int = 0) -> None:
    """Write a PNG of a run with at least one step.

    first_block: blocks below it are not drawn (the null block).
    """
    blocks = record.blocks()[:, first_block:]
    num_steps, num_blocks = blocks.shape
    num_requests = len(record.request_ids)
    heights = (max(3.0, 0.055 * num_blocks), max(1.2, 0.19 * num_requests))
    figure = Figure(figsize=(13, sum(heights) + 1.4), layout="constrained")
    pool, requests = figure.subplots(2, 1, sharex=True, height_ratios=heights)
    colours = request_colours(num_requests)
    _draw_blocks(pool, blocks, colours, first_block)
    _draw_lives(requests, record, colours)
    requests.set_xlim(-0.5, num_steps - 0.5)
    requests.set_xlabel("step")
    figure.suptitle(title, fontsize=13)
    _draw_legend(figure, colours)
    FigureCanvasAgg(figure)
    figure.savefig(path, format="png", dpi=DPI)


def request_colours(num_requests: int) -> list[Colour]:
    """Choose this many colours, neighbours far apart in hue; none is dark or grey."""
    colours = []
    for index in range(num_requests):
        hue = (0.58 + index * GOLDEN_RATIO) % 1.0
        lightness = (0.58, 0.70, 0.52)[index % 3]
        colours.append(colorsys.hls_to_rgb(hue, lightness, 0.70))
    return colours


def _draw_blocks(
    axes: Axes, blocks: NDArray[np.int16], colours: list[Colour], first_block: int
) -> None:
    palette = [FREE_COLOUR, CACHED_COLOUR, SHARED_COLOUR, *colours]
    num_steps, num_blocks = blocks.shape
    axes.imshow(
        blocks.T,
        cmap=ListedColormap(palette),
        vmin=-0.5,
        vmax=len(palette) - 0.5,
        aspect="auto",
        interpolation="nearest",
        origin="lower",
        extent=(-0.5, num_steps - 0.5, first_block - 0.5, first_block + num_blocks - 0.5),
    )
    axes.set_ylabel("block")


def _draw_lives(axes: Axes, record: PoolRecord, colours: list[Colour]) -> None:
    """Draw a line per request: a bar while it runs, hollow if swapped out, dots while it waits."""
    for number, colour in enumerate(colours):
        for life, first, last in _spans(record, number):
            place, width = first - 0.5, last - first + 1
            if life is Life.RUNNING:
                axes.barh(number, width, 0.72, place, color=colour)
            elif life is Life.SWAPPED:
                axes.barh(
                    number, width, 0.72, place, color="white", edgecolor=colour, hatch="/////"
                )
            else:
                axes.plot([first - 0.5, last + 0.5], [number, number], color=colour, linestyle=":")
    axes.set_yticks(range(len(colours)), record.request_ids, fontsize=8)
    axes.set_ylim(len(colours) - 0.4, -0.6)
    axes.spines[["top", "right"]].set_visible(False)


def _spans(record: PoolRecord, number: int) -> list[tuple[Life, int, int]]:
    """List the activities of a request in order, each with its first and last step."""
    spans: list[tuple[Life, int, int]] = []
    for step, lives in enumerate(record.lives):
        life = lives.get(number)
        if life is None:
            continue
        if spans and spans[-1][0] is life and spans[-1][2] == step - 1:
            life, first, _ = spans.pop()
            spans.append((life, first, step))
        else:
            spans.append((life, step, step))
    return spans


def _draw_legend(figure: Figure, colours: list[Colour]) -> None:
    own = colours[0] if colours else FREE_COLOUR
    figure.legend(
        handles=[
            Patch(facecolor=own, label="held by the request of this colour"),
            Patch(facecolor=SHARED_COLOUR, label="shared by several"),
            Patch(facecolor=CACHED_COLOUR, label="cached, no owner"),
            Patch(facecolor=FREE_COLOUR, edgecolor="grey", label="free"),
            Patch(facecolor="white", edgecolor=own, hatch="/////", label="swapped out"),
            Patch(facecolor="none", edgecolor=own, linestyle=":", label="to be recomputed"),
        ],
        loc="outside lower center",
        ncols=6,
        frameon=False,
        fontsize=9,
    )
