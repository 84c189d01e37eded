# SPDX-License-Identifier: Apache-2.0
"""The text trace of a run, which both backends replay.

The trace has the calls of a run, and their outcomes on the Python core, which is the specification;
if the core itself fails, the calls stand alone. What the device did between the calls is not part
of a trace.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from textwrap import wrap

from kvcore.check.simulate.runs import Failure
from kvcore.check.stories.calls import config_words, words_of
from kvcore.trace.calls import Call
from kvcore.trace.trace_file import rewrite
from kvcore.types.config import Config
from kvcore.types.errors import InvariantViolation, KvcoreError
from kvcore.types.values import Hit

WIDTH = 98


def trace_text(failure: Failure, config: Config, calls: Sequence[Call], command: str) -> str:
    """Return the calls of a failing run with their outcomes. command: the one to run it again."""
    said = [*wrap(f"{failure.name}: {failure.detail}", WIDTH), *wrap(f"Found by {command}", WIDTH)]
    lines = [*(f"# {line}" for line in said), config_words(config), ""]
    lines += [line for call in calls for line in _lines(call)]
    text = "\n".join(lines) + "\n"
    try:
        return rewrite(text, source=failure.name, backend="python")
    except (InvariantViolation, KvcoreError, AssertionError):
        return text


def _lines(call: Call) -> Iterator[str]:
    if any(isinstance(each, Hit) for each in call.args):
        yield f"get_computed_blocks {call.args[0]}"
    yield words_of(call)
