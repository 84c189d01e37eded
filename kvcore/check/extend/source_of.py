# SPDX-License-Identifier: Apache-2.0
"""A user's own parts of a violation, as code that a generated test can import.

A test names a function, a class or an object by its module and its name there; if that does not
find it again, it is refused in one sentence. An object without a name is created again if its class
needs no arguments.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import attrs

from kvcore.check.properties.registry import PROPERTIES, Property
from kvcore.check.properties.schedulers import Guarded
from kvcore.check.world.model import Violation
from kvcore.check.world.world import World


class NotWritable(ValueError):
    """The violation cannot be written as a file; the message says why in one sentence."""


@attrs.frozen
class Parts:
    """The parts of a test for a user's own code: imports, lines before the test, the selected
    property, options of the checked manager, the context around it, the backends.
    """

    imports: tuple[str, ...] = ()
    lines: tuple[str, ...] = ()
    selection: str = ""
    options: str = ""
    around: str = ""
    backends: tuple[str, ...] = ("python", "rust")


def parts_of(violation: Violation, world: Any) -> Parts:
    """Return the parts of a test for a violation. Raises NotWritable."""
    options = f"num_tokens={getattr(world, 'num_tokens', 0)}"
    parts = Parts(selection=f'"{violation.name}"', options=options)
    own = violation.own
    if own is not None:
        parts = _with_property(parts, own)
    elif violation.name not in PROPERTIES:
        raise NotWritable(
            f"{violation.name} is not a property of kvcore, and nothing says what checks it"
        )
    if isinstance(world, World) and callable(world.moves):
        parts = _with_moves(parts, world)
    if violation.policy is not None:
        line, name = importable(violation.policy)
        parts = attrs.evolve(
            parts,
            imports=(*parts.imports, "from kvcore.check.extend.policies import installed", line),
            around=f"installed({name}), ",
            backends=("python",),
        )
    return parts


def importable(value: Any) -> tuple[str, str]:
    """Return the line that imports a user's object, and its name then. Raises NotWritable."""
    value = value.moves if isinstance(value, Guarded) else value
    kind = value if hasattr(value, "__qualname__") else type(value)
    where, name = getattr(kind, "__module__", None), kind.__qualname__
    module = sys.modules.get(str(where))
    if where == "__main__" or module is None:
        raise NotWritable(f"a test cannot import {name}: put it into a module of its own")
    if kind is not value:
        for known, each in vars(module).items():
            if each is value:
                return f"from {where} import {known}", known
        if getattr(value, "__dict__", None) or hasattr(value, "__slots__"):
            said = f"a test cannot make this {name} again"
            raise NotWritable(f"{said}: give it a name in {where}")
    found: Any = module
    for part in name.split("."):
        found = getattr(found, part, None)
    if found is not kind:
        raise NotWritable(f"a test cannot import {name}: put it at the top of {where}")
    return f"from {where} import {name.partition('.')[0]}", name + "()" * (kind is not value)


def write_world(world: World, moves: str) -> Iterator[str]:
    """Yield lines that make a world with a scheduler again."""
    yield "WORLD = World("
    yield "    config=CONFIG,"
    for field in attrs.fields(World):
        value = getattr(world, field.name)
        if field.name in ("config", "moves") or value == field.default:
            continue
        words = f"frozenset({sorted(value)})" if isinstance(value, frozenset) else repr(value)
        yield f"    {field.name}={words},"
    yield f"    moves={moves},"
    yield ")"


def _with_property(parts: Parts, own: Property) -> Parts:
    line, name = importable(own.holds)
    made = [
        "OWN = Property(",
        *(f"    {n}={getattr(own, n)!r}," for n in ("name", "sentence", "scope", "severity")),
        f"    holds={name},",
        *(["    reads_prefixes=True,"] if own.reads_prefixes else []),
        ")",
    ]
    imports = (*parts.imports, "from kvcore.check.properties.registry import Property", line)
    return attrs.evolve(parts, imports=imports, lines=(*parts.lines, *made), selection="OWN")


def _with_moves(parts: Parts, world: World) -> Parts:
    line, name = importable(world.moves)
    return attrs.evolve(
        parts,
        imports=(*parts.imports, "from kvcore.check.world.world import World", line),
        lines=(*parts.lines, *write_world(world, name)),
        options="world=WORLD",
    )
