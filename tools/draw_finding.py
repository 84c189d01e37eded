# SPDX-License-Identifier: Apache-2.0
"""Draw docs/images/finding.svg: the content of mini-sglang's blocks at each step to a wrong read.

The picture shows what the sanitizer is told when the world of docs/found.md runs again, so this
needs mini-sglang: `KVCORE_MINI_SGLANG=CHECKOUT python -m tools.draw_finding` writes the file and
prints the finding.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import attrs

from kvcore.sanitizer import Sanitizer
from kvcore.sanitizer.hunter import run
from kvcore.sanitizer.hunter.adapter import load
from kvcore.sanitizer.hunter.world import world_from_json
from tools.svg import picture, rect, style, text

ROOT = Path(__file__).resolve().parents[1]
WORLD = ROOT / "tests" / "sanitizer" / "found" / "mini_sglang_equal_prompts.json"
PICTURE = ROOT / "docs" / "images" / "finding.svg"
LEFT, TOP, WIDTH, HEIGHT = 84, 92, 62, 26
STYLE = (
    [
        "text { font: 12px sans-serif; fill: #24292f; } .mid { text-anchor: middle; }",
        ".head { font-weight: bold; } .edge { stroke: #8c959f; } .empty { fill: none; }",
        ".new { stroke: #24292f; stroke-width: 2; } text.bad { fill: #b42318; }",
    ],
    "text { fill: #e6edf3; } .new { stroke: #e6edf3; } text.bad { fill: #ff9492; }",
)
FILLS = (
    ("dim", "#57606a", "#9aa4b0"),
    ("first", "#a5d6b0", "#2f6b43"),
    ("second", "#9cc6f0", "#2a5a8c"),
    ("wrong", "#f0a3a3", "#8e2a2a"),
)


@attrs.frozen
class Step:
    """What a step writes, and what each block holds after it: a request and a position."""

    number: int
    rows: tuple[tuple[str, int, int], ...]
    tables: dict[str, tuple[int, ...]]
    held: dict[int, tuple[str, int]]


class Recorded(Sanitizer):
    """A sanitizer that records the tables and steps that it is told."""

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        self.steps: list[Step] = []
        self.tables: dict[str, list[int]] = {}
        RECORDED.append(self)

    def extend(self, name: str, group_id: int, blocks: Sequence[int], *args: Any) -> None:
        super().extend(name, group_id, blocks, *args)
        self.tables.setdefault(name, []).extend(blocks)

    def drop(self, name: str) -> None:
        super().drop(name)
        self.tables[name] = []

    def issue(self, step: int, rows: Sequence[Any]) -> None:
        super().issue(step, rows)
        held = dict(self.steps[-1].held) if self.steps else {}
        for row in rows:
            for position in range(row.start, row.start + row.num_tokens):
                held[self.tables[row.name][position]] = (row.name, position)
        written = tuple((row.name, row.start, row.num_tokens) for row in rows)
        tables = {name: tuple(table) for name, table in self.tables.items()}
        self.steps.append(Step(step, written, tables, held))


RECORDED: list[Recorded] = []


def play() -> tuple[Any, list[Step]]:
    """Run the world; return its finding, and the steps up to it."""
    vars(run)["Sanitizer"] = Recorded  # the run creates its own sanitizer
    outcome = run.run(load("mini-sglang"), world_from_json(json.loads(WORLD.read_text())["world"]))
    assert outcome.found is not None
    return outcome.found, RECORDED[-1].steps


def to_svg(found: Any, steps: Sequence[Step]) -> str:
    """Draw the blocks over time as one SVG."""
    line = found.text.splitlines()[0]
    match = re.search(r"(\w+) \(.*reads token (\d+) in block (\d+)", line)
    assert match is not None
    name, position, block = match[1], int(match[2]), int(match[3])
    first = next(at for at, step in enumerate(steps) if name in {row[0] for row in step.rows})
    steps = steps[max(0, first - 1) :]
    blocks = sorted({each for step in steps for each in step.held})
    bottom = TOP + len(blocks) * HEIGHT
    body = [text(14, 22, "mini-sglang: two prompts with one prefix in a radix tree", "head")]
    body += legend(name)
    body += [text(14, TOP + at * HEIGHT + 17, f"block {each}") for at, each in enumerate(blocks)]
    for column, step in enumerate(steps):
        wrong = block if step is steps[-1] else None
        body += draw(step, LEFT + column * (WIDTH + 4), blocks, name, wrong)
    table = ", ".join(map(str, steps[-1].tables[name]))
    watched = (
        f"The table of {name} is {table}: block {block} was freed as a double and given out again."
    )
    body.append(text(14, bottom + 24, watched))
    holder = steps[-1].held[block]
    read = f"{found.name}: {name} reads its token {position} in block {block}"
    words = f"{read}, which holds token {holder[1]} of {holder[0]}."
    body.append(text(14, bottom + 44, words, "head bad"))
    wide = max(LEFT + len(steps) * (WIDTH + 4) + 14, 640)
    return picture(wide, bottom + 60, "blocks over time", style(*STYLE, FILLS), body)


def legend(name: str) -> Iterator[str]:
    """Draw the legend of the colours."""
    x = 14
    for kind, words in (
        ("first", "another request's token"),
        ("second", f"a token of {name}"),
        ("empty new", "written in this step"),
        ("wrong", "read, and wrong"),
    ):
        yield rect(x, 36, 14, 14, f"{kind} edge")
        yield text(x + 20, 47, words, "dim")
        x += 40 + round(6.4 * len(words))


def draw(step: Step, x: int, blocks: Sequence[int], name: str, wrong: int | None) -> Iterator[str]:
    """Draw one step: the content of each block after it."""
    yield text(x + WIDTH / 2, TOP - 12, f"step {step.number}", "dim mid")
    written = {
        step.tables[of][position]
        for of, start, count in step.rows
        for position in range(start, start + count)
    }
    for at, block in enumerate(blocks):
        holder = step.held.get(block)
        kind = "empty" if holder is None else "second" if holder[0] == name else "first"
        if block == wrong:
            kind = "wrong"
        edge = "new" if block in written else "edge"
        yield rect(x, TOP + at * HEIGHT, WIDTH, HEIGHT - 4, f"{kind} {edge}")
        if holder is not None:
            said = f"{holder[0]} [{holder[1]}]"
            yield text(x + WIDTH / 2, TOP + at * HEIGHT + 15, said, "mid")


if __name__ == "__main__":
    finding, watched = play()
    PICTURE.write_text(to_svg(finding, watched), encoding="utf-8")
    print(finding.text)
