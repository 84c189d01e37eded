# SPDX-License-Identifier: Apache-2.0
"""A violation as files: a test for pytest that fails, and a text trace.

Rules: the test makes the calls of the story on a judged manager, on both backends, and asks for the
one property: it fails until the bug is gone, and passes then. The trace holds what the calls really
gave, so it is replayed as it is until the bug is gone, and then written anew (`pytest --rewrite`).
Twin: none.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from typing import Any

import attrs

from kvcore.calls import Misuse
from kvcore.check.model import Step, Violation
from kvcore.check.story import tell, with_last_outcome
from kvcore.check.story_calls import config_words, name_of
from kvcore.config import Config
from kvcore.groups import Group
from kvcore.values import Hit, Request

TEST = '''\
"""{name}: {sentence}.

{detail}

Written by `kvcore check`: it fails until the bug is gone.
"""

import pytest

from kvcore import {names}
from kvcore.check.judged import JudgedManager

CONFIG = {config}


@pytest.mark.parametrize("backend", ["python", "rust"])
def test_{function}_holds(backend):
    with JudgedManager(CONFIG, backend, properties=["{name}"], num_tokens={num_tokens}) as manager:
{calls}
'''
INDENT = " " * 8
LINE_MAX = 91
NAMES = ("Config", "Group", "LoRA", "MediaItem", "PromptEmbeds", "Request", "errors")


def pytest_text(violation: Violation, world: Any) -> str:
    """A test that makes the calls of a violation, and fails for its property."""
    story = tell(violation, world)
    steps = with_last_outcome(violation.steps)
    lines = [f"{INDENT}{line}" for step in steps for line in _test_lines(step)]
    config, calls = write_config(world.config), "\n".join(lines) or f"{INDENT}pass"
    return TEST.format(
        name=violation.name,
        sentence=story.sentence or "a property of its own",
        detail=story.detail,
        config=config,
        function=re.sub(r"\W+", "_", violation.name.lower()),
        num_tokens=getattr(world, "num_tokens", 0),
        names=", ".join(each for each in NAMES if re.search(rf"\b{each}\b", config + calls)),
        calls=calls,
    )


def trace_text(violation: Violation, world: Any) -> str:
    """The calls of a violation with what they gave, as a text trace."""
    story = tell(violation, world)
    lines = [f"# {violation.name}: {story.sentence}.", f"# Behind the last call: {story.detail}"]
    lines += [config_words(world.config), ""]
    for chapter in story.chapters:
        if chapter.told.words.startswith(("(", "execute")):
            lines.append(f"# {chapter.told.words.strip('()')}")
        else:
            lines += chapter.told.lines
    return "\n".join(lines) + "\n"


def write_config(config: Config) -> str:
    """A config as Python makes it, defaults left out."""
    words = [f"num_blocks={config.num_blocks}"]
    for field in attrs.fields(Config):
        value = getattr(config, field.name)
        if not field.init or field.name == "num_blocks" or value == field.default:
            continue
        if field.name == "block_size":
            words += [f"block_size={value}"] if config.groups == (Group(value),) else []
        elif field.name == "groups":
            if value != (Group(config.block_size),):
                behind = "," * (len(value) == 1)
                words.append(f"groups=({', '.join(map(_write, value))}{behind})")
        else:
            words.append(f"{field.name}={_plain(value)}")
    line = f"Config({', '.join(words)})"
    if len(line) <= LINE_MAX:
        return line
    return f"Config(\n{''.join(f'    {word},{chr(10)}' for word in words)})"


def _test_lines(step: Step) -> Iterator[str]:
    """The lines of a test that make a step."""
    call, value = step.call, step.outcome.value
    words = []
    for each in call.args:
        if isinstance(each, Hit):
            yield f"hit = manager.get_computed_blocks({_write(call.args[0])})"
            words.append("hit")
        else:
            words.append(_write(each))
    for name, each in call.options.items():
        if isinstance(each, Hit):
            yield f"hit = manager.get_computed_blocks({_write(call.args[0])})"
        words.append(f"{name}={'hit' if isinstance(each, Hit) else _write(each)}")
    made = f"manager.{call.name}({', '.join(words)})"
    if isinstance(value, Misuse):
        yield f"with pytest.raises(errors.{value.error}):"
        yield f"    {made}"
    else:
        yield made


def _write(value: Any) -> str:
    """A value of a call as Python makes it; requests get the names of the story."""
    if isinstance(value, str):
        return json.dumps(name_of(value))
    if isinstance(value, Request):
        shown = [_write(value.request_id), repr(list(value.tokens))]
        return f"Request({', '.join([*shown, *_options(value, ('request_id', 'tokens'))])})"
    if isinstance(value, Group):
        shown = [str(value.block_size), *_options(value, ("block_size",))]
        return f"Group({', '.join(shown)})"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_write, value))}]"
    return repr(value)


def _options(value: Any, without: Sequence[str]) -> Iterator[str]:
    """The fields of a value that differ from their defaults."""
    for field in attrs.fields(type(value)):
        found = getattr(value, field.name)
        if field.name not in without and found != field.default:
            yield f"{field.name}={_plain(found)}"


def _plain(value: Any) -> str:
    if isinstance(value, bytes) and value.isalnum():
        return f"b{json.dumps(value.decode())}"
    return json.dumps(value) if isinstance(value, str) else repr(value)
