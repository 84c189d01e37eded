# SPDX-License-Identifier: Apache-2.0
"""Shrinks a failing record: leaves calls out and simplifies them while the same failure occurs.

The run is cut after the first failure. Then all but the last requests are removed, then whole
requests, then stretches of calls, then tokens, options and blocks; this repeats until nothing more
can be removed. It uses the delta debugging of `kvcore simulate`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import attrs

from kvcore.check.delta import (
    shorter,
    simpler_config,
    with_simpler_items,
    without_requests,
    without_stretches,
)
from kvcore.record.calls import SHAPES
from kvcore.replay.records.attempt import Broken, Item, Items, attempt, read_items
from kvcore.replay.records.rerun import Backend
from kvcore.trace.calls import Call
from kvcore.types.config import Config
from kvcore.types.values import Request

SECONDS = 120.0
LISTS = {"requests", "request_ids", "block_ids"}
COUNTS = {"num_new_tokens", "num_tokens", "num_computed_tokens", "total_computed_tokens"}
FEW = 40
"""Number of calls up to which the pool and a call are shrunk together."""
Told = Callable[[str], object]


@attrs.frozen
class Shrunk:
    """The shortest run found. num_calls: of the record. first_at: the call that failed in it."""

    config: Config
    calls: tuple[Call, ...]
    broken: Broken
    num_calls: int
    first_at: int


def shrink(
    path: str | os.PathLike[str],
    backends: Sequence[Backend],
    keep: str | None = None,
    *,
    seconds: float = SECONDS,
    tell: Told = str,
) -> Shrunk | None:
    """Return the shortest run found in time that fails like the record; None if nothing fails.

    keep: "difference", "exception", "refused:later", "refused:never" or an invariant's name; None:
    the first failure other than a refusal. tell: called with lines of progress. Raises as
    `read_items`.
    """
    ends = time.monotonic() + seconds
    config, items = read_items(path, backends[-1])
    tell(f"{len(items):,} calls")
    _, broken = attempt(config, items, backends, keep)
    if broken is None:
        return None
    tell(f"call {broken.at:,}: {broken.name}")
    search = Search(config, items[: broken.at + 1], backends, broken.name, ends, tell)
    search.go()
    search.rename()
    run, found = attempt(search.config, search.items, backends, broken.name, clamps=search.clamps)
    assert found is not None
    return Shrunk(search.config, tuple(run.calls[: found.at + 1]), found, len(items), broken.at)


@attrs.define
class Search:
    """The shortest run so far with this failure."""

    config: Config
    items: Items
    backends: Sequence[Backend]
    name: str
    ends: float
    tell: Told
    clamps: bool = False
    """Whether allocations are limited to the request's tokens, so that prompts can be cut."""

    def fails(self, items: Items, config: Config | None = None) -> bool:
        """Whether a run has the same failure; False once the time is over."""
        if time.monotonic() > self.ends:
            return False
        _, broken = attempt(
            config or self.config, items, self.backends, self.name, clamps=self.clamps
        )
        return broken is not None

    def go(self) -> None:
        """Shrink until nothing more can be removed, or the time is over."""
        self.items = self._last_requests()
        before = None
        while before != (self.items, self.config):
            before = (self.items, self.config)
            if not self.clamps:
                self.clamps = True
                self.clamps = self.fails(self.items)
            self._cut()
            names = [name for item in self.items for name in added(item)]
            self.items = without_requests(self.items, names, named, self.fails)
            self._cut()
            self.items = without_stretches(self.items, self.fails)
            self.tell(f"{len(self.items):,} calls")
            self.items = with_simpler_items(self.items, simpler, self.fails)
            self.config = simpler_config(self.config, lambda one: self.fails(self.items, one))
            while self._smaller_pool():
                pass

    def rename(self) -> None:
        """Rename the requests to r0, r1 and so on, as in traces."""
        names = dict.fromkeys(name for item in self.items for name in added(item))
        words = {name: f"r{place}" for place, name in enumerate(names)}
        self._keep([_renamed(item, words) for item in self.items])

    def _last_requests(self) -> Items:
        """Keep only the requests named last, if that still fails: one, two, four."""
        names = list(dict.fromkeys(n for item in reversed(self.items) for n in sorted(named(item))))
        count = 1
        while count < len(names):
            some = set(names[:count])
            fewer = tuple(each for each in self.items if not named(each) or named(each) & some)
            if self.fails(fewer):
                self.tell(f"{count:,} of {len(names):,} requests: {len(fewer):,} calls")
                return fewer
            count *= 2
        return self.items

    def _cut(self) -> None:
        """Remove everything after the failure, misuse, and a batch right after another."""
        run, broken = attempt(self.config, self.items, self.backends, self.name, clamps=self.clamps)
        if broken is not None:
            self.items = self.items[: broken.at + 1]
        self._keep(
            [item for item, wrong in zip(self.items, run.is_misuse, strict=False) if not wrong]
        )
        before = ("", *(item.name for item in self.items))
        pairs = zip(self.items, before, strict=False)
        self._keep([item for item, last in pairs if not item.name == last == "take_batch"])

    def _keep(self, items: list[Item]) -> None:
        if tuple(items) != self.items and self.fails(tuple(items)):
            self.items = tuple(items)

    def _smaller_pool(self) -> bool:
        """Remove one or a few blocks, and drop or simplify calls that no longer fit."""
        if len(self.items) > FEW:
            return False
        for fewer in range(1, min(3, self.config.num_blocks - 1)):
            config = attrs.evolve(self.config, num_blocks=self.config.num_blocks - fewer)
            for at, item in enumerate(self.items):
                forms = [(one,) for one in simpler(item) if item.name == "add_request"]
                for less in ((), *forms):
                    items = (*self.items[:at], *less, *self.items[at + 1 :])
                    if self.fails(items, config):
                        self.items, self.config = items, config
                        return True
        return False


def named(item: Item) -> set[str]:
    """Return the requests that an item names."""
    options = item.options
    several = options.get("requests", options.get("request_ids", ()))
    one = [options[each] for each in ("request_id", "parent_id", "child_id") if each in options]
    return {*several, *one, *added(item)}


def added(item: Item) -> list[str]:
    """Return the request that an item adds."""
    if item.name == "add_request":
        return [item.options["request"].request_id]
    return [item.options["child_id"]] if item.name == "fork" else []


def _renamed(item: Item, words: Mapping[str, str]) -> Item:
    """Return a call with its requests renamed."""
    options = dict(item.options)
    if item.name == "add_request":
        request = options["request"]
        options["request"] = attrs.evolve(request, request_id=words[request.request_id])
    for field in options.keys() & {"request_id", "parent_id", "child_id"}:
        options[field] = words.get(options[field], options[field])
    for field in options.keys() & {"requests", "request_ids"}:
        options[field] = [words.get(each, each) for each in options[field]]
    return attrs.evolve(item, options=options)


def simpler(item: Item) -> Iterator[Item]:
    """Yield simpler forms of a call."""
    options, shape = item.options, SHAPES[item.name]
    if item.name == "add_request":
        for request in _simpler_request(options["request"]):
            yield attrs.evolve(item, options={"request": request})
    for name in options.keys() & shape.options.keys() - {"tokens", "batch", "epoch", "done"}:
        yield attrs.evolve(item, options={n: v for n, v in options.items() if n != name})
    for name in sorted(options.keys() & COUNTS):
        for count in dict.fromkeys((1, options[name] // 2, options[name] - 1)):
            if 0 < count < options[name]:
                yield attrs.evolve(item, options=options | {name: count})
    for name in sorted(options.keys() & LISTS):
        for at in range(len(options[name]) if len(options[name]) > 1 else 0):
            yield _without_one(item, name, at)
    if item.name in ("add_tokens", "add_drafts"):
        for tokens in shorter(options["tokens"]):
            yield attrs.evolve(item, options=options | {"tokens": tokens})


def _without_one(item: Item, name: str, at: int) -> Item:
    """Return a call without the element at an index of its lists."""
    lists = [name] + ["tokens"] * (item.options.get("tokens") is not None)
    fewer = {each: [*item.options[each][:at], *item.options[each][at + 1 :]] for each in lists}
    keys = (*item.keys[:at], *item.keys[at + 1 :]) if item.keys else ()
    gave = (*item.gave[:at], *item.gave[at + 1 :]) if item.name == "store" else item.gave
    return attrs.evolve(item, options=item.options | fewer, keys=keys, gave=gave)


def _simpler_request(request: Request) -> Iterator[Request]:
    """Yield simpler forms of a request: fewer tokens, fewer other fields."""
    tokens = list(request.tokens)
    for fewer in shorter(tokens):
        media = [each for each in request.media if each.offset + each.length <= len(fewer)]
        yield attrs.evolve(request, tokens=fewer, media=media)
    if tokens != list(range(len(tokens))):
        yield attrs.evolve(request, tokens=list(range(len(tokens))))
    for field in attrs.fields(Request):
        if field.name not in ("request_id", "tokens") and getattr(request, field.name):
            values: dict[str, Any] = {field.name: field.default}
            yield attrs.evolve(request, **values)
