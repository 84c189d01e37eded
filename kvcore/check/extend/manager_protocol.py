# SPDX-License-Identifier: Apache-2.0
"""The methods and values required of a user's manager, checked only here.

A missing method or a value of the wrong shape is an InvariantViolation (MANAGER) that names the
method and the expected value; a legal call that raises is NOCRASH. Only what an engine reads is
read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from operator import index
from typing import Any

import attrs

from kvcore.trace.calls import Call
from kvcore.types.config import Config
from kvcore.types.errors import InvariantViolation

NAME = "MANAGER"
METHODS = (
    *("add_request", "allocate_slots", "append", "free", "remove_request", "get_block_ids"),
    "take_batch",
)


@attrs.frozen
class Renamed:
    """A manager under the names of `KVCacheManager`. names: `KVCacheManager`'s name -> its own."""

    manager: Any
    names: Mapping[str, str]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.manager, self.names.get(name, name))


def make_manager(make: Callable[[], Any], names: Mapping[str, str] | None = None) -> Any:
    """Make a new manager, and check that it has the methods that an engine needs.

    Raises InvariantViolation.
    """
    try:
        manager = make()
    except Exception as error:
        raise InvariantViolation(NAME, f"making one raises {error!r}") from error
    names = names or {}
    found = Renamed(manager, names) if names else manager
    missing = [name for name in METHODS if not callable(getattr(found, name, None))]
    if missing:
        what, called = type(manager).__name__, [names.get(name, name) for name in missing]
        raise InvariantViolation(NAME, f"a {what} has no method {', '.join(called)}")
    num_free(found)
    return found


def rings_of(manager: Any, config: Config) -> frozenset[int]:
    """Return the groups whose blocks a manager uses as rings. Raises InvariantViolation."""
    given, num_groups = getattr(manager, "rings", ()), len(config.groups)
    try:
        found = frozenset(map(index, given))
    except TypeError as error:
        raise InvariantViolation(NAME, f"rings is {given!r}, not numbers of groups") from error
    if not found <= set(range(num_groups)):
        detail = f"rings is {given!r}, and the groups are those below {num_groups}"
        raise InvariantViolation(NAME, detail)
    return found


def make_call(manager: Any, call: Call) -> Any:
    """Call a manager's method and return its value. Raises InvariantViolation (NOCRASH)."""
    try:
        method: Callable[..., Any] = getattr(manager, call.name)
        return method(*call.args, **call.options)
    except Exception as error:
        raise InvariantViolation("NOCRASH", f"{call} raises {error!r}") from error


def num_free(manager: Any) -> int:
    """Return how many free blocks a manager counts. Raises InvariantViolation."""
    try:
        given = manager.num_free_blocks
    except Exception as error:
        raise InvariantViolation(NAME, f"num_free_blocks raises {error!r}") from error
    return _count(given, "num_free_blocks is")


def num_hit(manager: Any, name: str, num_tokens: int) -> tuple[Any, int]:
    """Return the hit that a manager finds for a request of this many tokens, and its tokens.

    Raises InvariantViolation.
    """
    call = Call("get_computed_blocks", (name,))
    hit = make_call(manager, call)
    try:
        _, given = hit
    except (TypeError, ValueError) as error:
        raise InvariantViolation(
            NAME, f"{call} gives {hit!r}, not the blocks of a hit and its tokens"
        ) from error
    count = _count(given, f"{call} gives a hit whose tokens are")
    if count > num_tokens:
        raise InvariantViolation(NAME, f"{call} gives a hit of {count} tokens of {num_tokens}")
    return hit, count


def block_ids(manager: Any, name: str, config: Config) -> tuple[tuple[int, ...], ...]:
    """Return a request's block table of each group. Raises InvariantViolation."""
    call = Call("get_block_ids", (name,))
    given = make_call(manager, call)
    num_groups = len(config.groups)
    each_group = "" if num_groups == 1 else f" for each of {num_groups} groups"
    said = f"{call} gives {given!r}, not the ids of blocks{each_group}"
    try:
        tables = list(given)
        flat = num_groups == 1 and all(not isinstance(each, Sequence) for each in tables)
        found = tuple(tuple(map(index, each)) for each in ([tables] if flat else tables))
    except TypeError as error:
        raise InvariantViolation(NAME, said) from error
    if len(found) != num_groups:
        raise InvariantViolation(NAME, said)
    for block in (block for table in found for block in table):
        if not 0 <= block < config.num_blocks:
            detail = f"{call} names block {block}, the pool has {config.num_blocks}"
            raise InvariantViolation(NAME, detail)
    return found


def batch(manager: Any) -> tuple[Any, ...]:
    """Return the commands of the open batch. Raises InvariantViolation."""
    call = Call("take_batch")
    given = make_call(manager, call)
    try:
        commands = tuple(given)
    except TypeError as error:
        raise InvariantViolation(NAME, f"{call} gives {given!r}, not commands") from error
    for command in commands:
        if not (callable(getattr(command, "reads", None)) and hasattr(command, "writes")):
            raise InvariantViolation(NAME, f"{call} gives {command!r}, which is not a command")
    return commands


def _count(given: Any, said: str) -> int:
    try:
        count = index(given)
    except TypeError:
        count = -1
    if count < 0:
        raise InvariantViolation(NAME, f"{said} {given!r}, not a number of them")
    return count
