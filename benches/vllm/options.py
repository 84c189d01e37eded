# SPDX-License-Identifier: Apache-2.0
"""The command-line options of `python -m benches.vllm`; needs no vLLM."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import attrs


@attrs.frozen
class Mode:
    """The mode of a scheduler, and whether its requests are sessions with further inputs.

    has_windows: a group has a sliding window. has_loads: a connector loads parts of prompts, and
    some of its loads fail. has_states: two groups have recurrent states. has_parts: hits may end
    inside blocks. has_interruptions: the caches are reset now and then, and the scheduler pauses.
    has_images: prompts have images, which an encoder computes. watermark: share of the pool that
    stays free when requests are admitted beside others.
    """

    is_async: bool
    has_drafts: bool
    has_sessions: bool = False
    has_windows: bool = False
    has_loads: bool = False
    has_states: bool = False
    has_parts: bool = False
    has_interruptions: bool = False
    has_images: bool = False
    watermark: float = 0.0


MODES = {
    "async": Mode(is_async=True, has_drafts=False),
    "async-drafts": Mode(is_async=True, has_drafts=True),
    "async-sessions": Mode(is_async=True, has_drafts=True, has_sessions=True),
    "sync": Mode(is_async=False, has_drafts=False),
    "sync-drafts": Mode(is_async=False, has_drafts=True),
    "async-windows": Mode(is_async=True, has_drafts=False, has_windows=True),
    "async-windows-drafts": Mode(is_async=True, has_drafts=True, has_windows=True),
    "sync-windows": Mode(is_async=False, has_drafts=False, has_windows=True),
    "async-loads": Mode(is_async=True, has_drafts=False, has_loads=True),
    "sync-loads": Mode(is_async=False, has_drafts=False, has_loads=True),
    "async-drafts-loads": Mode(is_async=True, has_drafts=True, has_loads=True),
    "sync-drafts-loads": Mode(is_async=False, has_drafts=True, has_loads=True),
    "sync-states": Mode(is_async=False, has_drafts=False, has_states=True),
    "sync-states-windows": Mode(
        is_async=False, has_drafts=False, has_windows=True, has_states=True
    ),
    "sync-parts": Mode(is_async=False, has_drafts=False, has_states=True, has_parts=True),
    "sync-resets": Mode(is_async=False, has_drafts=False, has_interruptions=True),
    "async-drafts-resets": Mode(is_async=True, has_drafts=True, has_interruptions=True),
    "async-windows-resets": Mode(
        is_async=True, has_drafts=False, has_windows=True, has_interruptions=True
    ),
    "async-loads-resets": Mode(
        is_async=True, has_drafts=False, has_loads=True, has_interruptions=True
    ),
    "sync-states-resets": Mode(
        is_async=False, has_drafts=False, has_states=True, has_interruptions=True
    ),
    "sync-watermark": Mode(is_async=False, has_drafts=False, watermark=0.15),
    "async-drafts-watermark": Mode(is_async=True, has_drafts=True, watermark=0.15),
    "async-windows-watermark": Mode(
        is_async=True, has_drafts=False, has_windows=True, watermark=0.15
    ),
    "sync-images": Mode(is_async=False, has_drafts=False, has_images=True),
    "async-drafts-images": Mode(is_async=True, has_drafts=True, has_images=True),
    "async-images-resets": Mode(
        is_async=True, has_drafts=False, has_images=True, has_interruptions=True
    ),
}


@attrs.frozen
class Options:
    """The runs to compare; is_shadow: use one scheduler, with kvcore in the shadow."""

    modes: list[str]
    seeds: range
    steps: int
    is_shadow: bool


def read_options(arguments: Sequence[str] | None = None) -> Options:
    """Read the options of a command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benches.vllm",
        description="Run vLLM 0.33.0's schedulers over its own manager and over kvcore.",
    )
    parser.add_argument("--modes", default=",".join(MODES), metavar="NAME,...", help="%(default)s")
    parser.add_argument("--seeds", type=int, default=20, help="runs of each mode")
    parser.add_argument("--first", type=int, default=0, help="seed of the first run")
    parser.add_argument("--steps", type=int, default=300, help="steps per run")
    parser.add_argument(
        "--shadow", action="store_true", help="run kvcore in the shadow of vLLM's manager"
    )
    given = parser.parse_args(arguments)
    modes = given.modes.split(",")
    if given.shadow and given.modes == ",".join(MODES):
        modes = [mode for mode in modes if not MODES[mode].has_parts]  # rules.py has no such rule
    unknown = set(modes) - set(MODES)
    if unknown:
        parser.error(f"no modes are called {', '.join(sorted(unknown))}")
    return Options(modes, range(given.first, given.first + given.seeds), given.steps, given.shadow)
