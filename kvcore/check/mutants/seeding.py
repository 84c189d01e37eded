# SPDX-License-Identifier: Apache-2.0
"""The form of a seeded bug, and the ways to put one into the core.

A seeded bug is a function that patches the production transitions through a `Patcher`, with the
named world in which it shows, and the properties that must find it, each on its own. Its docstring
says in one sentence what goes wrong. A patch keeps nothing between calls, since the order in which
an exploration tries calls is not that of a run. The twin's own bugs are in rust/src/mutants.rs.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import attrs
from msgspec.structs import replace

from kvcore.check.profiles.registry import PROFILES
from kvcore.check.world.world import World
from kvcore.state.state import RequestState
from kvcore.state.transaction import Transaction
from kvcore.transitions import TRANSITIONS
from kvcore.types.commands import Command


class Patcher(ExitStack):
    """Replaces objects, and restores the old ones at its end."""

    def replace(self, owner: Any, name: str, value: Any) -> None:
        """Replace an existing attribute or dictionary item."""
        if isinstance(owner, dict):
            self.callback(owner.__setitem__, name, owner[name])
            owner[name] = value
        else:
            owner = definer(owner, name)
            self.callback(setattr, owner, name, vars(owner)[name])
            setattr(owner, name, value)

    def around(self, owner: Any, name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """Replace a function by the decorated one, whose first argument is the original."""
        old = owner[name] if isinstance(owner, dict) else vars(definer(owner, name))[name]

        def put(function: Callable[..., Any]) -> Callable[..., Any]:
            self.replace(owner, name, lambda *args, **options: function(old, *args, **options))
            return function

        return put

    def during(self, owner: Any, name: str, inner: Any, inner_name: str, value: Any) -> None:
        """Replace something else, but only while a function runs."""

        @self.around(owner, name)
        def call(function: Any, *args: Any) -> Any:
            with Patcher() as patcher:
                patcher.replace(inner, inner_name, value)
                return function(*args)


def definer(owner: Any, name: str) -> Any:
    """Return the class that defines an attribute of a class; other owners are returned as they
    are.
    """
    bases = owner.__mro__ if isinstance(owner, type) else ()
    return next((base for base in bases if name in vars(base)), owner)


Patch = Callable[[Patcher], None]


@attrs.frozen(kw_only=True)
class Mutant:
    """A seeded bug, the world in which it shows, and the properties that must find it.

    rows: the rows of the catalogue that it stands for. profile: the named world in which each
    property of `broken` finds it, on its own; None if no named world shows it, with the reason in
    unnamed. shows: the world in which a property of what users can observe finds it. costs: why
    none does, if the bug changes only the number of hits.
    """

    patch: Patch
    world: World
    broken: tuple[str, ...]
    profile: str | None = None
    unnamed: str | None = None
    rows: tuple[int, ...] = ()
    shows: World | None = None
    costs: str | None = None
    trace: str | None = None

    def __str__(self) -> str:
        return self.name

    @property
    def name(self) -> str:
        """Return the name of its function."""
        return self.patch.__name__

    @property
    def sentence(self) -> str:
        """Return the fault as one sentence, the docstring of its function."""
        return " ".join((self.patch.__doc__ or "").split())


MUTANTS: list[Mutant] = []


def mutant(
    where: str | World,
    *broken: str,
    rows: tuple[int, ...] = (),
    unnamed: str | None = None,
    shows: World | None = None,
    costs: str | None = None,
    trace: str | None = None,
) -> Callable[[Patch], Patch]:
    """Add a patch to the mutants.

    where: the name of a world, or a world of its own, with the reason why no named one shows the
    bug.
    """
    world = PROFILES[where].world if isinstance(where, str) else where

    def add(patch: Patch) -> Patch:
        MUTANTS.append(
            Mutant(
                patch=patch,
                world=world,
                broken=broken,
                profile=where if isinstance(where, str) else None,
                unnamed=unnamed,
                rows=rows,
                shows=None if costs is not None else shows or world,
                costs=costs,
                trace=trace,
            )
        )
        return patch

    return add


def emitting(patcher: Patcher, change: Callable[[Command], Command | None]) -> None:
    """Change commands on their way into the batch; None removes one."""

    @patcher.around(Transaction, "freeze")
    def freeze_changed(freeze: Any, self: Transaction) -> Any:
        changed = map(change, self.effects.commands)
        self.effects.commands[:] = [command for command in changed if command is not None]
        return freeze(self)


def without(patcher: Patcher, *kinds: type[Command]) -> None:
    """Keep commands of these kinds out of batches."""
    emitting(patcher, lambda command: None if isinstance(command, kinds) else command)


def after(patcher: Patcher, name: str, change: Callable[[Any, Any, Any], Any]) -> None:
    """Change the state that a transition returns: change(before, after, its first argument)."""

    @patcher.around(TRANSITIONS, name)
    def changed(transition: Any, before: Any, *args: Any, **options: Any) -> Any:
        outcome = transition(before, *args, **options)
        first = args[0] if args else None
        return replace(outcome, state=change(before, outcome.state, first))


def put(where: Any, request: RequestState) -> Any:
    """Return the state with a request replaced."""
    return replace(where, requests=where.requests.set(request.request_id, request))
