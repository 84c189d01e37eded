# SPDX-License-Identifier: Apache-2.0
"""A violation written step by step: each call, its result, and its effect on every block.

A story is plain text of at most `width` columns, with colour only if it is requested. A cell that a
step changes is shown as `before > after` behind a `*` at the start of its row; a table that would
be too wide shows a changed row twice, `-` before and `+` after. Each table begins with the state
before the run, so that a reader needs to remember only the last one.
"""

from __future__ import annotations

import os
import re
import sys
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import attrs
from msgspec.structs import replace

from kvcore.check.properties.registry import PROPERTIES, Property
from kvcore.check.stories.calls import Raised, StepWriter, WrittenStep, config_words
from kvcore.check.stories.scenes import Follower, Row, Scene, SceneNames
from kvcore.check.world.model import CheckedCall, Violation
from kvcore.state.state import State, make_state
from kvcore.trace.calls import perform
from kvcore.transitions import TRANSITIONS
from kvcore.types.config import Config

WIDTH = 100
MARK, DIM, BOLD, PLAIN = "\x1b[33m", "\x1b[2m", "\x1b[1m", "\x1b[0m"
LEGEND = (
    "a slot reads as the tokens of the prefix that it holds; ? undefined, ~ rubbish, ! a load"
    " that failed; held by request[place in its table]"
)


@attrs.frozen
class Chapter:
    """One step of a story: its words, and the scenes before and after it."""

    written: WrittenStep
    before: Scene
    after: Scene


@attrs.frozen
class Story:
    """A violation, ready to be shown: the property, the detail, the chapters, the config."""

    name: str
    severity: str
    sentence: str
    detail: str
    start: Scene
    chapters: tuple[Chapter, ...]
    config: Config | None = None


def render(
    violation: Violation, world: Any, *, colour: bool | None = None, width: int = WIDTH
) -> str:
    """Return the whole story of a violation as text.

    world: the one that was explored, or a model with `known`, a user's own properties by name.
    colour: None means if a terminal shows it.
    """
    if colour is None:
        colour = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    return "\n".join(_lines(make_story(violation, world), colour=colour, width=width)) + "\n"


def make_story(violation: Violation, world: Any) -> Story:
    """Make the story of a violation."""
    config = getattr(world, "config", None)
    steps = with_last_outcome(violation.steps)
    if config is None or not all(isinstance(step.before, State) for step in steps):
        return _from_scenes(violation, world)
    follower, writer = Follower(config), StepWriter()
    start = follower.scene(steps[0].before if steps else make_state(config))
    chapters: list[Chapter] = []
    last = start
    for step, following in zip(steps, (*steps[1:], None), strict=False):
        follower.follow(step, following)
        after = follower.scene(step.outcome.state)
        chapters.append(Chapter(writer.write(step), last, after))
        last = after
    if steps and steps[-1].call.name != "take_batch":
        state = steps[-1].outcome.state
        follower.finish(state)
        after = follower.scene(state)
        if after != last:
            written = WrittenStep((), "(the open batch is executed)", (), ())
            chapters.append(Chapter(written, last, after))
    detail = _detail(violation, follower)
    return _story(violation, world, detail, start, chapters, config)


def with_last_outcome(steps: tuple[CheckedCall, ...]) -> tuple[CheckedCall, ...]:
    """Return the steps, the last one made again if it failed before its outcome was kept."""
    last = steps[-1] if steps else None
    if last is None or not isinstance(last.before, State) or last.call.name not in TRANSITIONS:
        return steps
    outcome = last.outcome
    if outcome.commands or outcome.value is not None or outcome.state is not last.before:
        return steps
    try:
        again = perform(last.before, last.call)
    except Exception as error:
        again = replace(outcome, value=Raised(repr(error)))
    return (*steps[:-1], attrs.evolve(last, outcome=again))


def _story(
    violation: Violation,
    world: Any,
    detail: str,
    start: Scene,
    chapters: Sequence[Chapter],
    config: Config | None,
) -> Story:
    known: dict[str, Property] = {**PROPERTIES, **getattr(world, "known", {})}
    found: Property | None = violation.own or known.get(violation.name)
    return Story(
        name=violation.name,
        severity="" if found is None else found.severity,
        sentence="" if found is None else found.sentence,
        detail=detail,
        start=start,
        chapters=tuple(chapters),
        config=config,
    )


def _from_scenes(violation: Violation, world: Any) -> Story:
    """Make the story of a model whose steps bring their own scenes: a step's `before` and its
    outcome's state have `scene`.
    """
    writer = StepWriter()
    chapters = [
        Chapter(writer.write(step), step.before.scene, step.outcome.state.scene)
        for step in violation.steps
    ]
    start = chapters[0].before if chapters else Scene()
    return _story(violation, world, violation.detail, start, chapters, world.config)


def _detail(violation: Violation, follower: Follower) -> str:
    """Describe the fault in tokens, as the ghost of the story found it if it did."""
    names = SceneNames(follower.ghost.prefixes)
    for error in follower.wrong:
        if error.name == violation.name:
            return with_names(names.detail(error.detail))
    return with_names(plain_detail(violation))


def with_names(detail: str) -> str:
    """Return a detail with the story's names of requests."""
    return re.sub(r"request '(\d+)'", r"request r\1", detail)


def plain_detail(violation: Violation) -> str:
    """Return a violation's detail without the words of the exception that carried it."""
    text = violation.detail
    for quote in "'\"":
        head, tail = f"InvariantViolation({quote}{violation.name}: ", f"{quote})"
        if text.startswith(head) and text.endswith(tail):
            return text.removeprefix(head).removesuffix(tail)
    return text


def _lines(story: Story, *, colour: bool, width: int) -> Iterator[str]:
    kind = f" ({story.severity})" if story.severity else ""
    calls = sum(chapter.written.is_numbered for chapter in story.chapters)
    head = f"{story.name}{kind} does not hold after {calls} {'call' if calls == 1 else 'calls'}"
    yield f"{BOLD}{head}{PLAIN}" if colour else head
    for text in (story.sentence, story.detail):
        yield from _wrapped(text, "  ", width)
    yield ""
    if story.config is not None:
        yield from _wrapped(config_words(story.config), "", width)
    yield from _wrapped(LEGEND, "", width)
    start = story.start
    yield from _table(start.request_heads, (), start.requests, colour=colour, width=width)
    yield from _table(start.block_heads, (), start.blocks, colour=colour, width=width)
    number = 0
    for chapter in story.chapters:
        number += chapter.written.is_numbered
        yield from _chapter(number, chapter, colour=colour, width=width)


def _chapter(number: int, chapter: Chapter, *, colour: bool, width: int) -> Iterator[str]:
    written, before, after = chapter.written, chapter.before, chapter.after
    if written.is_empty and before == after:
        return
    yield ""
    for line in written.lookup:
        yield f"   {line}"
    words = f"{number if written.is_numbered else '':>2} {written.words}"
    yield f"{BOLD}{words}{PLAIN}" if colour else words
    for line in (*written.value, *written.emitted):
        yield from _wrapped(line, "     ", width)
    if before == after:
        yield "     (no block and no request changes)"
        return
    if before.requests != after.requests:
        yield from _table(
            after.request_heads, before.requests, after.requests, colour=colour, width=width
        )
    if before.blocks != after.blocks:
        yield from _table(
            after.block_heads, before.blocks, after.blocks, colour=colour, width=width
        )
    else:
        yield "     (no block changes)"


def _table(
    heads: Row, before: Iterable[Row], after: Iterable[Row], *, colour: bool, width: int
) -> Iterator[str]:
    """Write the rows after a step; without rows before it nothing counts as changed."""
    known = {row[0]: row for row in before}
    rows = {row[0]: row for row in after}
    if not rows and not known:
        return
    gone = [name for name in known if name not in rows]
    arrows = [
        _arrows(known.get(name, rows[name] if not known else None), rows[name], heads)
        for name in rows
    ]
    arrows += [("*", (name, "(gone)", *("" for _ in heads[2:])), ()) for name in gone]
    sizes = [
        max(len(each[1][at]) for each in (*arrows, ("", heads, ()))) for at in range(len(heads))
    ]
    if sum(sizes) + 2 * len(sizes) + 5 > width:
        yield from _pairs(heads, known, rows, width)
        return
    yield _row("  ", heads, sizes, (), DIM if colour else "")
    for mark, cells, changed in arrows:
        yield _row(f"{mark} ", cells, sizes, changed, MARK if colour else "")


def _arrows(before: Row | None, after: Row, heads: Row) -> tuple[str, Row, tuple[int, ...]]:
    """Write a row with changed cells as `before > after`; return its mark, cells and changes."""
    if before is None:
        return "*", after, tuple(range(len(heads)))
    changed = tuple(at for at in range(len(heads)) if before[at] != after[at])
    cells = tuple(
        f"{before[at]} > {after[at]}" if at in changed else after[at] for at in range(len(heads))
    )
    return "*" if changed else " ", cells, changed


def _pairs(heads: Row, before: dict[str, Row], after: dict[str, Row], width: int) -> Iterator[str]:
    """Write the rows one by one, a changed one twice, with each cell cut to fit."""
    everything = [heads, *before.values(), *after.values()]
    sizes = [max(len(row[at]) for row in everything) for at in range(len(heads))]
    room = width - 5 - 2 * len(heads) - sum(sizes[:-1])
    sizes[-1] = max(8, min(sizes[-1], room))
    yield _row("  ", heads, sizes, (), "")[:width]
    for name in dict.fromkeys((*before, *after)):
        old, new = before.get(name), after.get(name)
        if old == new or not before:
            yield _row("  ", after[name], sizes, (), "")[:width]
            continue
        for sign, row in (("- ", old), ("+ ", new)):
            if row is not None:
                yield _row(sign, row, sizes, (), "")[:width]


def _row(mark: str, cells: Row, sizes: Sequence[int], changed: tuple[int, ...], paint: str) -> str:
    padded = []
    for at, (cell, size) in enumerate(zip(cells, sizes, strict=True)):
        text = cell.ljust(size) if at + 1 < len(cells) else cell
        painted = paint and (at in changed or paint == DIM)
        padded.append(f"{paint}{text}{PLAIN}" if painted else text)
    return f"   {mark}{'  '.join(padded)}".rstrip()


def _wrapped(text: str, indent: str, width: int) -> list[str]:
    return textwrap.wrap(
        text, width, initial_indent=indent, subsequent_indent=f"{indent}  ", break_on_hyphens=False
    )
