# SPDX-License-Identifier: Apache-2.0
"""Draw the pictures of docs/replay.md: the replay that its example runs, and its sweep.

The pictures show what the example's commands give, on a light ground; of the run over time
one sample in THINNED is drawn, to keep the file small. Run: python -m tools.draw_replay.
"""

from __future__ import annotations

from pathlib import Path

import attrs

from kvcore.cli.page_style import LIGHT
from kvcore.replay.loop import replay
from kvcore.replay.plots import draw_course, draw_sweep, with_colours
from kvcore.replay.results import Options, Result
from kvcore.replay.summary import Report
from kvcore.replay.synthetic import generate

ROOT = Path(__file__).parents[1]
COURSE = ROOT / "docs" / "images" / "replay_course.svg"
SWEEP = ROOT / "docs" / "images" / "replay_sweep.svg"
KIND, NUM_REQUESTS, SEED = "documents", 200, 7
NUM_BLOCKS, SIZES = 8192, (2048, 4096, 16384, 32768)
THINNED = 4


def play(num_blocks: int) -> Result:
    """Run the example on a pool of num_blocks blocks."""
    return replay(generate(KIND, NUM_REQUESTS, SEED), Options(num_blocks=num_blocks))


def draw() -> tuple[str, str]:
    """Draw two pictures: the run over time, and the sweep."""
    result = play(NUM_BLOCKS)
    runs = [result, *map(play, SIZES)]
    runs.sort(key=lambda each: each.options.num_blocks)
    thin = attrs.evolve(result, samples=result.samples[::THINNED])
    drawn = draw_course(thin), draw_sweep(Report(result, tuple(runs)))
    course, sweep = (f"{with_colours(each, LIGHT)}\n" for each in drawn)
    return course, sweep


if __name__ == "__main__":
    for path, text in zip((COURSE, SWEEP), draw(), strict=True):
        path.write_text(text, encoding="utf-8")
        print(f"{path}: {len(text):,} bytes")
