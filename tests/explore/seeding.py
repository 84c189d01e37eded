# SPDX-License-Identifier: Apache-2.0
"""How a seeded bug is written down, and the ways to put one in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import pytest

from kvcore import calls
from kvcore.check.actions import World
from kvcore.commands import Command
from kvcore.effects import Effects
from kvcore.state import RequestState

Patch = Callable[[pytest.MonkeyPatch], None]


@attrs.frozen
class Mutant:
    """A seeded bug, where it shows, and what must find it."""

    name: str
    patch: Patch
    world: World
    broken: tuple[str, ...]

    def __str__(self) -> str:
        return self.name


MUTANTS: list[Mutant] = []


def mutant(where: World, *broken: str) -> Callable[[Patch], Patch]:
    """Add a patch to the mutants."""

    def add(patch: Patch) -> Patch:
        MUTANTS.append(Mutant(patch.__name__, patch, where, broken))
        return patch

    return add


def without(patcher: pytest.MonkeyPatch, *kinds: type[Command]) -> None:
    """Keep commands of these kinds out of batches."""
    emit = Effects.emit

    def emit_some(self: Effects, command: Command) -> None:
        if not isinstance(command, kinds):
            emit(self, command)

    patcher.setattr(Effects, "emit", emit_some)


def after(patcher: pytest.MonkeyPatch, name: str, change: Callable[[Any, Any, Any], Any]) -> None:
    """Change the state that a transition gives: change(before, after, request id)."""
    transition = calls.TRANSITIONS[name]

    def changed(before: Any, *args: Any, **options: Any) -> Any:
        outcome = transition(before, *args, **options)
        return attrs.evolve(outcome, state=change(before, outcome.state, args[0]))

    patcher.setitem(calls.TRANSITIONS, name, changed)


def put(where: Any, request: RequestState) -> Any:
    """A state with a request's form in the place of its old one."""
    return attrs.evolve(where, requests=where.requests.set(request.request_id, request))
