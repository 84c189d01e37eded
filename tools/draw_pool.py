# SPDX-License-Identifier: Apache-2.0
"""Draw docs/images/pool.svg: three requests in one pool share, copy on write, leave and evict.

The picture shows what a manager returns, so it cannot differ from the code. Colours have a
light and a dark form, chosen by the reader's system. `python -m tools.draw_pool` writes the file.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import attrs

from kvcore import Config, CopyOnWrite, Evict, KVCacheManager, Request
from tools.svg import picture, rect, style, text

PICTURE = Path(__file__).resolve().parents[1] / "docs" / "images" / "pool.svg"
SIZE, NUM_BLOCKS = 4, 7
PROMPT = ["You", "are", "a", "sad", "poet", ".", "Write", "of"]
WORDS = {
    "a": [*PROMPT, *["rain", "and", "the", "sea"]],
    "b": [*PROMPT, *["snow", ".", "Then"]],
}
NEXT = {"b": "ice", "c": "fog"}
MORE = ["on", "a", "roof", ",", "and", "it", "is", "all", "so", "very", "still", "."]
SHARED, KEPT, UNUSED = "shared", "kept", "unused"

# Name, light fill, dark fill.
FILLS = (
    ("a", "#9cc6f0", "#2a5a8c"),
    ("b", "#f3d08b", "#7d5a17"),
    ("c", "#dcc4ee", "#5d4379"),
    (SHARED, "#a5d6b0", "#2f6b43"),
    (KEPT, "#d0d4da", "#4a4f57"),
    (UNUSED, "none", "none"),
)
STYLE = (
    [
        "text { font: 12px sans-serif; fill: #24292f; } .word { font-size: 9.5px; }",
        ".mid { text-anchor: middle; } .word { text-anchor: middle; }",
        ".box { stroke: #6b7280; fill: none; }",
    ],
    "text { fill: #e6edf3; } .box { stroke: #9aa4b0; }",
)
SAID = {SHARED: "shared", KEPT: "no owner, can still be found", UNUSED: "unused"}
CELL, BOX, LEFT, TOP, ROW = 27, 114, 12, 44, 70
WIDTH = 2 * LEFT + BOX * NUM_BLOCKS - (BOX - SIZE * CELL)


@attrs.frozen
class Moment:
    """The pool after a step. blocks: kind, owners and words of each usable block."""

    title: str
    blocks: tuple[tuple[str, str, tuple[str, ...]], ...]


class Story:
    """Plays the story on a manager, and records the words that its blocks hold."""

    def __init__(self) -> None:
        """Begin with an empty pool."""
        self.manager = KVCacheManager(
            Config(num_blocks=NUM_BLOCKS + 1, block_size=SIZE), backend="python"
        )
        self.words: dict[str, list[str]] = {}
        self.held: dict[int, tuple[str, ...]] = {}
        self.moments: list[Moment] = []

    def admit(self, name: str) -> int:
        """Add a request and give it slots; returns the number of tokens found in the cache."""
        self.words[name] = list(WORDS[name])
        self.manager.add_request(Request(name, [number(word) for word in WORDS[name]]))
        hit = self.manager.get_computed_blocks(name)
        assert self.manager.allocate_slots(name, len(WORDS[name]) - hit.num_tokens, hit)
        return hit.num_tokens

    def draw_moment(self, title: str) -> None:
        """Record the current state of the pool as a moment."""
        owners: dict[int, str] = {}
        for name, words in sorted(self.words.items()):
            for position, block in enumerate(self.manager.get_block_ids(name)[0]):
                owners[block] = owners.get(block, "") + name
                self.held[block] = tuple(words[position * SIZE : (position + 1) * SIZE])
        blocks: list[tuple[str, str, tuple[str, ...]]] = []
        for block in range(1, NUM_BLOCKS + 1):
            names, held = owners.get(block, ""), self.held.get(block, ())
            blocks.append((kind_of(names, has_words=bool(held)), names, held))
        self.moments.append(Moment(title, tuple(blocks)))


def number(word: str) -> int:
    """Return the token of a word."""
    return int.from_bytes(word.encode()[:3], "big")


def kind_of(owners: str, *, has_words: bool) -> str:
    """Return the kind of a block, which selects its colour."""
    if owners:
        return owners if len(owners) == 1 else SHARED
    return KEPT if has_words else UNUSED


def play() -> list[Moment]:
    """Play the story, asserting what happens, and return its moments."""
    story = Story()
    story.admit("a")
    story.draw_moment("a is computed: 12 tokens in 3 blocks")
    assert story.admit("b") == len(PROMPT)
    story.draw_moment(
        "b begins with the same 8 tokens: blocks 1 and 2 are shared, not computed again"
    )
    story.manager.take_batch()
    story.manager.fork("b", "c")
    story.words["c"] = list(story.words["b"])
    story.manager.append(["b", "c"], [number(NEXT[name]) for name in "bc"])
    for name, word in NEXT.items():
        story.words[name].append(word)
    (copy,) = (each for each in story.manager.take_batch() if isinstance(each, CopyOnWrite))
    story.draw_moment(
        f"c is a fork of b, and both write: block {copy.source} is copied to {copy.target} first"
    )
    story.manager.free("a")
    story.words.pop("a")
    story.draw_moment("a has left: block 3 has no owner, and can still be found")
    story.manager.add_tokens("b", [number(word) for word in MORE])
    assert story.manager.allocate_slots("b", len(MORE))
    story.words["b"] += MORE
    (evicted,) = (each for each in story.manager.take_batch() if isinstance(each, Evict))
    story.draw_moment(
        f"b grows: unused blocks are taken first, then block {evicted.block} is evicted"
    )
    return story.moments


def to_svg(moments: Sequence[Moment]) -> str:
    """Draw the moments as one SVG."""
    body = [*legend()]
    for place, moment in enumerate(moments):
        body += draw(moment, TOP + ROW * place)
    label = "Three requests in one pool of seven blocks"
    return picture(WIDTH, TOP + ROW * len(moments), label, style(*STYLE, FILLS), body)


def legend() -> Iterator[str]:
    """Draw the legend of the colours."""
    x = LEFT
    for name, _, _ in FILLS:
        words = SAID.get(name, f"request {name}")
        yield rect(x, 8, 14, 14, name)
        yield rect(x, 8, 14, 14, "box")
        yield text(x + 20, 19, words)
        x += 36 + 7 * len(words)


def draw(moment: Moment, top: int) -> Iterator[str]:
    """Draw one moment: its sentence, and the blocks with their words and owners."""
    yield text(LEFT, top, moment.title)
    for place, (kind, owners, words) in enumerate(moment.blocks):
        x, y = LEFT + place * BOX, top + 8
        yield rect(x, y, CELL * SIZE, 22, kind)
        yield rect(x, y, CELL * SIZE, 22, "box")
        for cell, word in enumerate(words):
            yield text(x + CELL * cell + CELL / 2, y + 15, word, "word")
        label = f"{place + 1}" + (f": {', '.join(owners)}" if owners else "")
        yield text(x + CELL * SIZE / 2, y + 36, label, "word")


if __name__ == "__main__":
    PICTURE.write_text(to_svg(play()), encoding="utf-8")
