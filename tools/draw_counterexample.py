# SPDX-License-Identifier: Apache-2.0
"""Draw docs/images/counterexample.svg: a seeded bug's shortest run to wrong KV, block by block.

The picture shows what the checker finds, so it cannot differ from the code. The bug is row 18 of
the catalogue: blocks are taken before the blocks of the hit have their owner. Colours and text have
a light and a dark form, chosen by the reader's system. `python -m
tools.draw_counterexample` writes the file and prints the same story for terminals.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import attrs

from kvcore import Config
from kvcore.check.mutants import MUTANTS, Patcher
from kvcore.check.search.search import check
from kvcore.check.stories.scenes import Row, Scene
from kvcore.check.stories.story import Story, make_story, render
from kvcore.check.world.model import Violation
from kvcore.check.world.world import World
from tools.svg import picture, rect, style, text

PICTURE = Path(__file__).resolve().parents[1] / "docs" / "images" / "counterexample.svg"
BUG = "m_touch_after_alloc"
WORLD = World(
    config=Config(3, 2, hash_seed=b"drawn"),
    num_requests=2,
    num_tokens=3,
    num_prompt=3,
    moves="engine",
)
WIDTH, LEFT, CARD, CELL = 780, 250, 245, 74
TOP, CALL_HEIGHT, WORDS_HEIGHT, BOX = 92, 70, 26, 24
MARKS = (
    "0,0 is what a token 0 behind a token 0 left; ? is what is not known;  "
    "r1[0] is first in r1's table; free 1 is taken next"
)
STYLE = (
    [
        "text { font: 12px sans-serif; fill: #24292f; } .mid { text-anchor: middle; }",
        ".head { font-weight: bold; } .none { fill: none; }",
        ".card { fill: none; stroke: #8c959f; } .line { stroke: #d0d7de; }",
        ".edge { stroke: #8c959f; } text.bad { fill: #b42318; }",
    ],
    "text { fill: #e6edf3; } .line { stroke: #373e47; } text.bad { fill: #ff9492; }",
)
# Name, light fill, dark fill.
FILLS = (
    ("dim", "#57606a", "#9aa4b0"),
    ("same", "#eaeef2", "#30363d"),
    ("new", "#f3d08b", "#7d5a17"),
    ("wrong", "#f0a3a3", "#8e2a2a"),
)
HELD, KEY, QUEUE, SLOTS = 1, 2, 3, 4
"""Columns of a block's row in a scene."""


@attrs.frozen
class Moment:
    """A call, and the pool before it and after its batch was executed."""

    words: str
    value: str
    before: Scene
    after: Scene


def play() -> tuple[Violation, Story]:
    """Return the violation that the checker finds in the seeded code, and its story."""
    bug = next(each for each in MUTANTS if each.name == BUG)
    with Patcher() as patcher:
        bug.patch(patcher)
        violation = check(WORLD, properties=["KV-READ"]).violation
        assert violation is not None
        return violation, make_story(violation, WORLD)


def moments(story: Story) -> list[Moment]:
    """Return the calls of a story; the effect of a batch belongs to its last call."""
    found: list[Moment] = []
    for chapter in story.chapters:
        heading = chapter.written
        if heading.is_numbered:
            hit = "".join(line.strip().removeprefix("= ") for line in heading.lookup[1:])
            value = " ".join(line.removeprefix("= ") for line in heading.value)
            words = f"{value} ({hit})" if hit else value
            found.append(Moment(heading.words, words, chapter.before, chapter.after))
        elif found:
            found[-1] = attrs.evolve(found[-1], after=chapter.after)
    return found


def to_svg(story: Story) -> str:
    """Draw the story as one SVG."""
    steps = moments(story)
    body = [text(14, 22, f"{story.name}: {story.sentence}", "head"), *legend()]
    y = TOP
    for number, moment in enumerate(steps, 1):
        body += draw(number, moment, y, is_last=number == len(steps))
        y += height_of(moment)
    body.append(text(14, y + 16, f"Wrong: {story.detail}.", "head bad"))
    label = f"{story.name} broken in {len(steps)} calls"
    return picture(WIDTH, y + 50, label, style(*STYLE, FILLS), body)


def legend() -> Iterator[str]:
    """Draw the legend of the colours."""
    x = 14
    for kind, words in (
        ("same", "a slot: tokens of the prefix that it holds"),
        ("new", "changed by the call or its batch"),
        ("wrong", "read, and wrong"),
    ):
        yield rect(x, 36, 14, 14, f"{kind} edge")
        yield text(x + 20, 47, words, "dim")
        x += 40 + round(6.1 * len(words))
    yield text(14, 66, MARKS, "dim")


def height_of(moment: Moment) -> int:
    """Return the height of a call; one that changes no block needs only a line."""
    return CALL_HEIGHT if moment.before.blocks != moment.after.blocks else WORDS_HEIGHT


def draw(number: int, moment: Moment, top: int, *, is_last: bool) -> Iterator[str]:
    """Draw a call on the left and the blocks after it on the right."""
    yield f'<path class="line" d="M 14 {top} H {WIDTH - 14}"/>'
    yield text(14, top + 18, f"{number}  {moment.words}", "head")
    if height_of(moment) == WORDS_HEIGHT:
        return
    yield text(30, top + 36, moment.value, "dim")
    before = {row[0]: row for row in moment.before.blocks}
    for place, row in enumerate(moment.after.blocks):
        x = LEFT + place * (CARD + 14)
        yield from draw_block(row, before[row[0]], x, top + 8, is_last=is_last)


def draw_block(row: Row, before: Row, x: int, top: int, *, is_last: bool) -> Iterator[str]:
    """Draw a block: its holders or its position in the queue, its key, and its slots."""
    yield f'<rect class="card" x="{x}" y="{top}" width="{CARD}" height="54" rx="4"/>'
    held = row[HELD] if row[HELD] != "-" else row[QUEUE]
    said = f"block {row[0]}: {held}"
    moved = row[HELD] != before[HELD]
    if moved:
        yield rect(x + 4, top + 4, 8 + round(6.2 * len(said)), 17, "new")
    yield text(x + 8, top + 17, said)
    slots = row[SLOTS].split(" | ") if row[SLOTS] != "-" else ["", ""]
    known = before[SLOTS].split(" | ") if before[SLOTS] != "-" else ["", ""]
    for at, (slot, old) in enumerate(zip(slots, known, strict=True)):
        changed = "wrong" if is_last and at == 0 else "new"
        kind = (changed if slot != old else "same") if slot else "none"
        yield rect(x + 6 + at * CELL, top + 25, CELL - 4, BOX, f"{kind} edge")
        yield text(x + 4 + at * CELL + CELL / 2, top + 41, slot, "mid")
    if row[KEY] != "-" or before[KEY] != "-":
        key = f"key {row[KEY]}" if row[KEY] != "-" else "no key"
        if row[KEY] != before[KEY]:
            yield rect(x + 10 + 2 * CELL, top + 27, 8 + round(6.6 * len(key)), 19, "new")
        yield text(x + 14 + 2 * CELL, top + 41, key)


if __name__ == "__main__":
    found, heading = play()
    PICTURE.write_text(to_svg(heading), encoding="utf-8")
    print(render(found, WORLD), end="")
