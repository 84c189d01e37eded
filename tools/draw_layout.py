# SPDX-License-Identifier: Apache-2.0
"""Draw docs/images/layout.svg: how two calls of one request place their tokens in blocks.

The picture shows what a manager returns, so it cannot differ from the code. Colours and text have a
light and a dark form, chosen by the reader's system. `python -m tools.draw_layout` writes the file
and prints the same picture for terminals.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import attrs

from kvcore import Config, Group, Hit, KVCacheBlocks, KVCacheManager, Request
from tools.svg import picture, rect, style, text

PICTURE = Path(__file__).resolve().parents[1] / "docs" / "images" / "layout.svg"
SIZE, WINDOW, NUM_TOKENS, LOOKAHEAD = 4, 6, 26, 4
GROUPS = (Group(SIZE), Group(SIZE, kind="sliding_window", window=WINDOW))
GROUP_NAMES = ("full attention", f"window of {WINDOW}")
NULL = "null"

# Name, light fill, dark fill.
ZONES = (
    ("computed", "#c9ccd1", "#4a4f57"),
    ("hit", "#a5d6b0", "#2f6b43"),
    ("external", "#f3d08b", "#7d5a17"),
    ("new", "#9cc6f0", "#2a5a8c"),
    ("lookahead", "#dcc4ee", "#5d4379"),
)
CELL, ROW, LEFT, TOP, WIDTH = 20, 26, 110, 40, 770
CALL_HEIGHT = 155
STYLE = (
    [
        "text { font: 12px sans-serif; fill: #24292f; } .line { stroke: #6b7280; fill: none; }",
        ".head { font-weight: bold; } .mid { text-anchor: middle; } .end { text-anchor: end; }",
        ".null { fill: none; stroke: #6b7280; stroke-dasharray: 3 3; } .edge { stroke: #6b7280; }",
    ],
    "text { fill: #e6edf3; } .line, .null, .edge { stroke: #9aa4b0; }",
)


@attrs.frozen
class Scene:
    """One call and the tables after it.

    zones: (name, number of tokens) in order. returned: the blocks that the call returned, per
    group.
    """

    title: str
    zones: tuple[tuple[str, int], ...]
    num_computed: int
    tables: tuple[list[int], ...]
    returned: tuple[list[int], ...]


def play() -> list[Scene]:
    """Make the two calls on a manager that has the request's first eight tokens cached."""
    manager = KVCacheManager(Config(num_blocks=32, groups=GROUPS), backend="python")
    manager.add_request(Request("before", range_of(9)))
    manager.allocate_slots("before", 9)
    manager.take_batch()
    manager.free("before")
    manager.add_request(Request("r", range_of(NUM_TOKENS)))
    hit = manager.get_computed_blocks("r")
    first = schedule(manager, "first call", 6, hit, num_external=6)
    manager.take_batch()
    left = NUM_TOKENS - manager.num_computed_tokens("r")
    return [first, schedule(manager, "next call", left, None, num_external=0)]


def range_of(num_tokens: int) -> list[int]:
    """Return num_tokens tokens, equal on each call."""
    return list(range(num_tokens))


def schedule(
    manager: KVCacheManager, title: str, num_new: int, hit: Hit | None, num_external: int
) -> Scene:
    """Call `allocate_slots` for request r and return the scene."""
    computed = manager.num_computed_tokens("r")
    got = manager.allocate_slots(
        "r",
        num_new,
        hit,
        num_external_computed_tokens=num_external,
        num_lookahead_tokens=LOOKAHEAD,
    )
    assert isinstance(got, KVCacheBlocks)
    counts = (computed, 0 if hit is None else hit.num_tokens, num_external, num_new, LOOKAHEAD)
    named = zip((name for name, _, _ in ZONES), counts, strict=True)
    return Scene(
        title=title,
        zones=tuple((name, count) for name, count in named if count),
        num_computed=manager.num_computed_tokens("r"),
        tables=manager.get_block_ids("r"),
        returned=got.get_block_ids(),
    )


def to_text(scenes: Sequence[Scene]) -> str:
    """Format the scenes for a terminal: a letter per token, a column per block."""
    lines = []
    for scene in scenes:
        letters = "".join(name[0] * count for name, count in scene.zones)
        blocks = [letters[at : at + SIZE] for at in range(0, len(letters), SIZE)]
        zones = "  ".join(f"{name[0]} {name} {count}" for name, count in scene.zones)
        lines += [f"{scene.title}:  {zones}", text_row("tokens", blocks)]
        lines += [text_row("position", [str(place) for place in range(len(blocks))])]
        for name, table, returned in zip(GROUP_NAMES, scene.tables, scene.returned, strict=True):
            marked = [f"{label(block)}{'*' * (block in returned)}" for block in table]
            lines.append(text_row(name, marked))
        lines += [f"  count after the call: {scene.num_computed}; * returned as new", ""]
    return "\n".join(lines).rstrip() + "\n"


def text_row(name: str, words: Sequence[str]) -> str:
    """Format one line of the text form."""
    return f"  {name:<16}" + "".join(f"{word:<6}" for word in words).rstrip()


def label(block: int) -> str:
    """Return the label of a block in a table."""
    return str(block) if block else NULL


def to_svg(scenes: Sequence[Scene]) -> str:
    """Draw the scenes as one SVG."""
    body = [*legend()]
    for number, scene in enumerate(scenes):
        body += draw_call(scene, TOP + CALL_HEIGHT * number)
    height = TOP + CALL_HEIGHT * len(scenes)
    return picture(WIDTH, height, "Tokens and blocks of two calls", style(*STYLE, ZONES), body)


def legend() -> Iterator[str]:
    """Draw the legend of the colours, in the order of the tokens."""
    x = LEFT
    for name, _, _ in ZONES:
        yield rect(x, 10, 14, 14, f"{name} edge")
        yield text(x + 20, 21, name)
        x += 34 + 8 * len(name)
    yield rect(x, 10, 14, 14, "null")
    yield text(x + 20, 21, "null block")
    yield f'<rect class="line" stroke-width="2.5" x="{x + 100}" y="10" width="14" height="14"/>'
    yield text(x + 120, 21, "returned as new")


def draw_call(scene: Scene, top: int) -> Iterator[str]:
    """Draw one call: its tokens, a table per group, and the counts."""
    yield text(LEFT - 10, top + 32, scene.title, "head end")
    zone_of = [name for name, count in scene.zones for _ in range(count)]
    x = LEFT
    for name, count in scene.zones:
        yield text(x + count * CELL / 2, top + 14, f"{name} {count}", "mid")
        x += count * CELL
    for place, name in enumerate(zone_of):
        yield rect(LEFT + place * CELL, top + 20, CELL, 18, f"{name} edge")
        yield text(LEFT + place * CELL + CELL / 2, top + 33, str(place), "mid")
    y = top + 50
    bottom = y + (ROW + 6) * len(scene.tables)
    end = LEFT + scene.num_computed * CELL
    yield f'<path class="line" d="M {end} {top + 20} V {bottom + 8}"/>'
    for name, table, returned in zip(GROUP_NAMES, scene.tables, scene.returned, strict=True):
        yield text(LEFT - 10, y + 17, name, "end")
        for position, block in enumerate(table):
            yield from draw_block(zone_of, position, block, y, is_new=block in returned)
        y += ROW + 6
    yield text(end - 6, bottom + 8, f"count after the call: {scene.num_computed}", "end")


def draw_block(
    zone_of: Sequence[str], position: int, block: int, y: int, *, is_new: bool
) -> Iterator[str]:
    """Draw one block of a table, in the colours of its tokens."""
    x, width = LEFT + position * SIZE * CELL + 2, SIZE * CELL - 4
    if block:
        share = width / SIZE
        for offset, name in enumerate(zone_of[position * SIZE : (position + 1) * SIZE]):
            yield rect(x + offset * share, y, share, ROW, name)
    kind = "line" if block else "null"
    stroke = ' stroke-width="2.5"' if is_new else ""
    yield f'<rect class="{kind}"{stroke} x="{x}" y="{y}" width="{width}" height="{ROW}" rx="3"/>'
    yield text(x + width / 2, y + 17, label(block), "mid")


if __name__ == "__main__":
    drawn = play()
    PICTURE.write_text(to_svg(drawn), encoding="utf-8")
    print(to_text(drawn), end="")
