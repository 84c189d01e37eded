# SPDX-License-Identifier: Apache-2.0
"""Delta debugging: removes parts of a failing run as long as it still fails.

The items are moves or calls; any subset of them is a run. `fails` tells whether a run still fails.
Source: Zeller and Hildebrandt, "Simplifying and Isolating Failure-Inducing Input" (2002).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

import attrs

from kvcore.types.config import Config
from kvcore.types.errors import KvcoreError

T = TypeVar("T")
Items = tuple[T, ...]


def without_requests(
    items: Items[T],
    names: Sequence[str],
    named: Callable[[T], set[str]],
    fails: Callable[[Items[T]], bool],
) -> Items[T]:
    """Leave out all items of some requests: half of the requests at a time, then fewer.

    named: the requests that an item names; an item is removed once all of them are left out.
    """
    size = max(1, len(names) // 2)
    while names:
        kept: list[str] = []
        for first in range(0, len(names), size):
            some = set(names[first : first + size])
            fewer = tuple(each for each in items if not named(each) or not named(each) <= some)
            if len(fewer) < len(items) and fails(fewer):
                items = fewer
            else:
                kept += names[first : first + size]
        if size == 1:
            break
        names, size = kept, max(1, min(size, len(kept)) // 2)
    return items


def without_stretches(items: Items[T], fails: Callable[[Items[T]], bool]) -> Items[T]:
    """Leave out stretches of items, the last first, in rounds of half the length."""
    size = max(1, len(items) // 2)
    while True:
        first = max(0, len(items) - size)
        while first >= 0:
            fewer = items[:first] + items[first + size :]
            if len(fewer) < len(items) and fails(fewer):
                items = fewer
            first -= size
        if size == 1:
            return items
        size = max(1, size // 2)


def with_simpler_items(
    items: Items[T], forms: Callable[[T], Iterable[T]], fails: Callable[[Items[T]], bool]
) -> Items[T]:
    """Replace each item by its first simpler form that fails, until there is none.

    forms: simpler forms of an item, the simplest first.
    """
    for at in range(len(items)):
        going = True
        while going:
            going = False
            for form in forms(items[at]):
                tried = (*items[:at], form, *items[at + 1 :])
                if form != items[at] and fails(tried):
                    items, going = tried, True
                    break
    return items


def shorter(tokens: Sequence[int]) -> Iterator[list[int]]:
    """Yield the tokens cut to one, to half, and by one."""
    for length in dict.fromkeys((1, len(tokens) // 2, len(tokens) - 1)):
        if 0 < length < len(tokens):
            yield list(tokens[:length])


def simpler_config(config: Config, fails: Callable[[Config], bool]) -> Config:
    """Simplify a configuration: use defaults wherever the run still fails, and fewer blocks."""
    for field in attrs.fields(Config):
        if not field.init or field.name in ("num_blocks", "block_size", "groups", "hash_seed"):
            continue
        if getattr(config, field.name) != field.default:
            config = _tried(config, {field.alias or field.name: field.default}, fails)
    for count in (config.num_blocks // 4, config.num_blocks // 2):
        config = _tried(config, {"num_blocks": max(2, count)}, fails)
    for at in range(len(config.groups) if len(config.groups) > 1 else 0):
        groups = (*config.groups[:at], *config.groups[at + 1 :])
        if groups:
            config = _tried(config, {"groups": groups}, fails)
    return config


def _tried(config: Config, changes: dict[str, object], fails: Callable[[Config], bool]) -> Config:
    values = {
        field.alias or field.name: getattr(config, field.name)
        for field in attrs.fields(Config)
        if field.init and field.name != "block_size"
    }
    try:
        simpler = Config(**{**values, **changes})
    except KvcoreError:
        return config
    return simpler if fails(simpler) else config
