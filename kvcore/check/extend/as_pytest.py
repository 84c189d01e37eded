# SPDX-License-Identifier: Apache-2.0
"""Writes a violation as files: a failing test for pytest, and a text trace.

The test makes the calls of the story on a checked manager, on both backends, and checks only the
broken property: it fails until the bug is fixed. The trace contains the actual outcomes, so it
passes until the bug is fixed, and must then be rewritten (`pytest --rewrite`).
"""

from __future__ import annotations

import copy
import json
import pickle
import re
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import attrs

from kvcore.check.extend.manager_model import ManagerModel
from kvcore.check.extend.source_of import NotWritable, Parts, importable, parts_of
from kvcore.check.names.collisions import other_request
from kvcore.check.stories.calls import config_words, name_of
from kvcore.check.stories.story import make_story, with_last_outcome
from kvcore.check.world.model import CheckedCall, Violation
from kvcore.check.world.world import World
from kvcore.trace.calls import Call, Misuse
from kvcore.types.config import Config
from kvcore.types.groups import Group
from kvcore.types.values import Hit, Request

HEAD = '''\
"""{name}: {sentence}.

{detail}

Written by `kvcore check`: it fails until the bug is gone.
"""
'''
TEST = """
import pytest

{imports}

CONFIG = {config}
{lines}

@pytest.mark.parametrize("backend", [{backends}])
def test_{function}_holds(backend):
    with {around}CheckedManager(CONFIG, backend, properties=[{selection}], {options}) as manager:
{calls}
"""
OF_A_MANAGER = """
{imports}

CONFIG = {config}
CALLS = [
{calls}
]


def test_{function}_holds():
    model = ManagerModel(
        {make},
        CONFIG,
{options}
    )
    replay(model, CALLS, "{name}")
"""
INDENT = " " * 8
LINE_MAX = 91
PARTIAL = "from functools import partial"
MADE_WITH = {"named": pickle.dumps, "copied": copy.deepcopy}
NAMES = ("Config", "Group", "LoRA", "MediaItem", "PromptEmbeds", "Request", "errors")


def pytest_text(violation: Violation, world: Any) -> str:
    """Return a test that makes the calls of a violation, and fails for its property.

    world: the explored world, or the model of a manager. Raises NotWritable if a user's own part
    cannot be imported.
    """
    if isinstance(world, ManagerModel):
        return _manager_text(violation, world)
    parts, renamed = parts_of(violation, world), not callable(getattr(world, "moves", None))
    steps = with_last_outcome(violation.steps)
    lines = [f"{INDENT}{line}" for line in _other_lines(violation, world)]
    lines += [f"{INDENT}{line}" for step in steps for line in _test_lines(step, renamed=renamed)]
    config, calls = write_config(world.config), "\n".join(lines) or f"{INDENT}pass"
    checked = "from kvcore.check.extend.checked_manager import CheckedManager"
    return (HEAD + TEST).format(
        **_head(violation, world),
        config=config,
        imports=_imports(config + calls, checked, parts),
        lines="".join(f"{line}\n" for line in parts.lines),
        backends=", ".join(f'"{each}"' for each in parts.backends),
        around=parts.around,
        selection=parts.selection,
        options=parts.options,
        calls=calls,
    )


def _manager_text(violation: Violation, model: ManagerModel) -> str:
    """Return a test that makes the calls of a violation on a user's own manager."""
    lines, words = [], []
    for name in ("make", "named", "copied"):
        value = getattr(model, name)
        if value is not MADE_WITH.get(name):
            takes_config = isinstance(value, partial) and value.args == (model.config,)
            line, word = importable(value.func if takes_config else value)
            lines.append(line)
            if takes_config:
                lines.append(PARTIAL)
                word = f"partial({word}, CONFIG)"
            words.append(word if name == "make" else f"{name.replace('named', 'name')}={word}")
    counts = ("num_requests", "num_tokens", "num_prompt", "num_letters")
    words += [f"{name}={getattr(model, name)}" for name in counts]
    words += [f"names={model.names}"] if model.names else []
    calls = "\n".join(f"    {_write_call(step.call)}," for step in violation.steps)
    config = write_config(model.config)
    parts = Parts(("from kvcore.trace.calls import Call", *lines))
    replayed = "from kvcore.check.extend.manager_model import ManagerModel, replay"
    return (HEAD + OF_A_MANAGER).format(
        **_head(violation, model),
        imports=_imports(config + calls, replayed, parts),
        config=config,
        calls=calls,
        make=words[0],
        options="\n".join(f"        {word}," for word in words[1:]),
    )


def _head(violation: Violation, world: Any) -> dict[str, str]:
    """Return the part of a test that names its violation, and the name of its function."""
    story, function = make_story(violation, world), re.sub(r"\W+", "_", violation.name.lower())
    return {
        "name": violation.name,
        "sentence": story.sentence,
        "detail": story.detail,
        "function": function,
    }


def _imports(text: str, line: str, parts: Parts) -> str:
    """Return the imports of a test, those of the user's modules last."""
    standard = [f"{PARTIAL}\n"] if PARTIAL in parts.imports else []
    names = ", ".join(each for each in NAMES if re.search(rf"\b{each}\b", text))
    ours = [each for each in (line, *parts.imports) if each.startswith("from kvcore.")]
    theirs = [each for each in parts.imports if each not in (*ours, PARTIAL)]
    return "\n".join(
        [*standard, f"from kvcore import {names}", *sorted(set(ours)), *sorted(set(theirs))]
    )


def trace_text(violation: Violation, world: Any) -> str:
    """Return the calls of a violation with their outcomes, as a text trace.

    Raises NotWritable if both backends could not replay it.
    """
    if isinstance(world, ManagerModel):
        raise NotWritable("a trace is replayed on kvcore's own managers: write a test instead")
    if violation.policy is not None:
        raise NotWritable("a trace is replayed without your policy: write a test instead")
    story = make_story(violation, world)
    lines = [f"# {violation.name}: {story.sentence}.", f"# Behind the last call: {story.detail}"]
    lines += [config_words(world.config), ""]
    for chapter in story.chapters:
        if chapter.written.words.startswith(("(", "execute")):
            lines.append(f"# {chapter.written.words.strip('()')}")
        else:
            lines += chapter.written.lines
    return "\n".join(lines) + "\n"


def write_config(config: Config) -> str:
    """Write a config as Python code, without defaults."""
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
                words.append(
                    f"groups=({', '.join(_write(each, renamed=False) for each in value)}{behind})"
                )
        else:
            words.append(f"{field.alias}={_plain(value)}")
    line = f"Config({', '.join(words)})"
    if len(line) <= LINE_MAX:
        return line
    return f"Config(\n{''.join(f'    {word},{chr(10)}' for word in words)})"


def _other_lines(violation: Violation, world: World) -> Iterator[str]:
    """Yield lines that make the identity of a hash known, if the story does not."""
    other = other_request(violation, world)
    if other is not None:
        yield f"manager.add_request({_write(other, renamed=False)})"
        yield f"manager.remove_request({_write(other.request_id, renamed=False)})"


def _test_lines(step: CheckedCall, *, renamed: bool) -> Iterator[str]:
    """Yield the lines of a test for a step. renamed: requests get the names of the story."""
    write = partial(_write, renamed=renamed)
    call, value = step.call, step.outcome.value
    words = []
    for name, each in [*(("", arg) for arg in call.args), *call.options.items()]:
        if isinstance(each, Hit):
            yield f"hit = manager.get_computed_blocks({write(call.args[0])})"
        word = "hit" if isinstance(each, Hit) else write(each)
        words.append(f"{name}={word}" if name else word)
    made = f"manager.{call.name}({', '.join(words)})"
    if isinstance(value, Misuse):
        yield f"with pytest.raises(errors.{value.error}):"
        yield f"    {made}"
    else:
        yield made


def _write_call(call: Call) -> str:
    """Write a call of an engine on a user's manager; hits are looked up again."""
    args = call.args[:1] if call.name == "allocate_slots" else call.args
    words = ", ".join(_write(each, renamed=False) for each in args)
    given = f", ({words}{',' * (len(args) == 1)})" if args else ""
    return f'Call("{call.name}"{given})'


def _write(value: Any, *, renamed: bool) -> str:
    """Write a value of a call as Python code. renamed: requests get the names of the story."""
    if isinstance(value, str):
        return json.dumps(name_of(value) if renamed else value)
    if isinstance(value, Request):
        shown = [_write(value.request_id, renamed=renamed), repr(list(value.tokens))]
        return f"Request({', '.join([*shown, *_options(value, ('request_id', 'tokens'))])})"
    if isinstance(value, Group):
        shown = [str(value.block_size), *_options(value, ("block_size",))]
        return f"Group({', '.join(shown)})"
    if isinstance(value, list | tuple):
        return f"[{', '.join(_write(each, renamed=renamed) for each in value)}]"
    return repr(value)


def _options(value: Any, without: Sequence[str]) -> Iterator[str]:
    """Yield the fields of a value that differ from their defaults."""
    for field in attrs.fields(type(value)):
        found = getattr(value, field.name)
        if field.init and field.name not in without and found != field.default:
            yield f"{field.name}={_plain(found)}"


def _plain(value: Any) -> str:
    if isinstance(value, bytes) and value.isalnum():
        return f"b{json.dumps(value.decode())}"
    return json.dumps(value) if isinstance(value, str) else repr(value)
