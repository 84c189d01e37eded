# SPDX-License-Identifier: Apache-2.0
"""The scope of an exploration, for its report: its world and its properties.

A report contains its scope, so that it can be read alone: every option of the world, each selected
property and each that could have been selected. Values become plain data; a function is given by
its name.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import attrs

from kvcore.check.properties.facts import FAR_PROPERTIES
from kvcore.check.properties.registry import PROPERTIES, Property, select
from kvcore.check.properties.schedulers import Guarded
from kvcore.check.world.world import World
from kvcore.types.config import Config

BACKENDS = ("python", "rust", "both")


def check_search(backend: str, workers: int, limits: Mapping[str, float | None]) -> None:
    """Raise ValueError for a search that is not possible. limits: by their names."""
    if backend not in BACKENDS:
        raise ValueError(f"there is no backend {backend!r}: say {', '.join(BACKENDS)}")
    for name, value in {"workers": workers, **limits}.items():
        if value is not None and not value > 0:
            raise ValueError(f"{name} is {value}, it must be above 0")


def checked_in(
    what: Any, chosen: Iterable[str | Property] | None, *, parity: bool
) -> tuple[dict[str, Property], tuple[str, ...]]:
    """Return the selected properties of a world or model, and those that could be selected and are
    not.

    chosen: as passed to `check`. parity: whether both languages are compared. Raises ValueError.
    """
    if not isinstance(what, World):
        return dict(getattr(what, "known", {})), ()
    everything = select(None, what.calls)
    if parity:
        everything |= select(frozenset({"REFINE"}), what.calls)
    beyond = out_of_reach(what, parity=parity)
    everything = {n: each for n, each in everything.items() if n not in (*beyond, "POLICY")}
    if chosen is None:
        return everything, ()
    given = list(chosen)
    for each in given:
        if not isinstance(each, str | Property):
            raise ValueError(f"a property is named, or is a Property, and not {each!r}")
    for name in beyond.keys() & {each for each in given if isinstance(each, str)}:
        raise ValueError(f"{name} is not checked here: {beyond[name]}")
    named = select(frozenset(each for each in given if isinstance(each, str)), what.calls)
    own = [each for each in given if isinstance(each, Property) and each not in named.values()]
    _check_own(own)
    checked = named | {each.name: each for each in given if isinstance(each, Property)}
    return checked, tuple(name for name in everything if name not in checked)


def out_of_reach(world: World, *, parity: bool = False) -> dict[str, str]:
    """Return the properties that an exploration of a world cannot check, with the reasons."""
    found = {"MANAGER": "a world has kvcore's own manager"}
    if not callable(world.moves):
        found["SCHEDULER"] = "the moves are kvcore's own"
    if world.far is None:
        found |= dict.fromkeys(FAR_PROPERTIES, "the world has no far tier")
    if not parity:
        found["REFINE"] = "it compares both languages, so explore with the backend both"
    if world.config.max_in_flight:
        found["OWNER-MIRROR"] = "with batches in flight a cancel drops what says who owns a block"
    return found


def _check_own(own: list[Property]) -> None:
    """Raise ValueError if two of a user's own properties share a name, or one checks nothing."""
    for each in own:
        if each.holds is None and PROPERTIES.get(each.name) is not each:
            raise ValueError(f"the property {each.name} checks nothing: give it holds")
        if sum(other.name == each.name for other in own) > 1:
            raise ValueError(f"two properties are named {each.name}")


def plain_world(world: Any) -> dict[str, Any] | None:
    """Return a world as plain data, with its config's options; for a model, its own name."""
    if world is None:
        return None
    if not isinstance(world, World):
        config = getattr(world, "config", None)
        return {"model": type(world).__name__, "config": _plain(config)}
    found: dict[str, Any] = _plain(world)
    return found


def plain_property(each: Property) -> dict[str, Any]:
    """Return a property's name, sentence, scope and severity."""
    return {
        "name": each.name,
        "sentence": each.sentence,
        "scope": each.scope,
        "severity": each.severity,
    }


def named(value: Any) -> str:
    """Return the name of a function, a class or the class of an object, with its module."""
    value = value.moves if isinstance(value, Guarded) else value
    found = value if hasattr(value, "__qualname__") else type(value)
    return f"{found.__module__}.{found.__qualname__}"


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, Mapping):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, set | frozenset):
        return sorted(map(str, value))
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    if callable(value):
        return named(value)
    if isinstance(value, Config) or attrs.has(type(value)):
        fields = (field.name for field in attrs.fields(type(value)) if field.init)
        return {name: _plain(getattr(value, name)) for name in fields}
    return repr(value)
