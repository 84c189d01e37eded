# SPDX-License-Identifier: Apache-2.0
"""`kvcore check --manager MODULE:FACTORY`: explores every state of a user's manager.

The factory, for example a class, is called with the world's `kvcore.Config`, which contains the
size of the pool and the groups. Errors go to standard error, with exit code 2.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from kvcore.check.cli.options import BadOptions, given_of_world, groups_of, option
from kvcore.check.extend.as_pytest import pytest_text
from kvcore.check.extend.manager_model import ManagerModel
from kvcore.check.profiles.profile import world
from kvcore.check.search.report import INTERRUPTED, Report
from kvcore.check.search.search import check
from kvcore.check.search.text import to_text
from kvcore.check.stories.story import render
from kvcore.types.errors import InvariantViolation, WrongArgument

USUAL = {"blocks": 2, "requests": 2, "tokens": 3, "letters": 2, "moves_per_batch": 1}
SIZES = (*USUAL, "prompt", "block_size", "groups")
ELSEWHERE = (
    *("facade", "mutants", "list", "properties", "full_keys", "no_symmetry", "write_trace"),
    "backend",
)


def run_manager(
    options: argparse.Namespace, progress: Callable[[Report], None], end: Callable[[], None]
) -> int:
    """Explore a manager's world; return the exit code.

    progress: called with the report so far; end: called at the end. Raises BadOptions.
    """
    model = model_of(options)
    report = check(
        model,
        max_depth=options.depth,
        max_states=options.limit,
        max_seconds=options.time,
        progress=progress,
    )
    end()
    found = report.violation
    if found is not None and options.write_test:
        Path(options.write_test).write_text(pytest_text(found, model), encoding="utf-8")
    print(json.dumps(report.to_json(), indent=2) if options.json else to_text(report))
    if found is not None and not options.json:
        print(f"\n{render(found, model)}")
    if found is not None:
        return 1
    return 130 if report.verdict == INTERRUPTED else 0


def model_of(options: argparse.Namespace) -> ManagerModel:
    """Return the world of the manager that the options name. Raises BadOptions."""
    for name in ELSEWHERE:
        if getattr(options, name):
            raise BadOptions(f"--manager explores your own manager: omit {option(name)}")
    unknown = [name for name in given_of_world(options) if name not in SIZES]
    if unknown:
        raise BadOptions(f"--manager does not take {option(unknown[0])}")
    size = {name: getattr(options, name) or usual for name, usual in USUAL.items()}
    prompt = options.prompt or size["tokens"]
    if prompt > size["tokens"]:
        raise BadOptions(f"a prompt of {prompt} tokens is longer than a request may be")
    counts = size["blocks"], size["requests"], size["tokens"], prompt
    config = world(*counts, groups=groups_of(options)).config
    make = partial(factory(options.manager), config)
    try:
        model = ManagerModel(
            make,
            config,
            num_requests=size["requests"],
            num_tokens=size["tokens"],
            num_prompt=prompt,
            num_letters=size["letters"],
            moves_per_batch=size["moves_per_batch"],
            names=other_names(options.names or ()),
        )
        model.name(model.start())
    except InvariantViolation as error:
        raise BadOptions(f"--manager {options.manager}: {error.detail}") from error
    except WrongArgument as error:
        what = (
            "copied: give it __deepcopy__"
            if error.fields["name"] == "copied"
            else "named: see state_name"
        )
        said = f"a new manager cannot be {what} ({error.fields['value']!r})"
        raise BadOptions(f"--manager {options.manager}: {said}") from error
    return model


def factory(text: str) -> Callable[..., Any]:
    """Import the factory MODULE:FACTORY, also from the working folder. Raises BadOptions."""
    where, _, name = text.partition(":")
    if not where or not name:
        raise BadOptions(f"--manager {text}: use MODULE:FACTORY, for example mine.pool:Manager")
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        found: Any = importlib.import_module(where)
    except Exception as error:
        raise BadOptions(f"--manager {text}: importing {where} raises {error!r}") from error
    for part in name.split("."):
        if not hasattr(found, part):
            raise BadOptions(f"--manager {text}: {where} has no {name}")
        found = getattr(found, part)
    if not callable(found):
        raise BadOptions(f"--manager {text}: {name} is a {type(found).__name__}, not a factory")
    made: Callable[..., Any] = found
    return made


def other_names(words: tuple[str, ...]) -> dict[str, str]:
    """Read the manager's own method names, from OURS=THEIRS. Raises BadOptions."""
    names = {}
    for word in words:
        ours, _, theirs = word.partition("=")
        if not ours.isidentifier() or not theirs.isidentifier():
            raise BadOptions(f"--names {word!r}: use OURS=THEIRS, for example free=release")
        names[ours] = theirs
    return names
