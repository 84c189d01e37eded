# SPDX-License-Identifier: Apache-2.0
"""Shrinks a failing record: leaves calls out and simplifies them while the same failure occurs.

The run is cut after the first failure. Then all but the last requests are removed, then whole
requests, then stretches of calls, then tokens, options and blocks; this repeats until nothing more
can be removed. It uses the delta debugging of `kvcore simulate`.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
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
from kvcore.replay.records.attempt import Broken, Item, Items
from kvcore.replay.records.guarded import Tried, read_in_child, tried
from kvcore.replay.records.rerun import Backend
from kvcore.trace.calls import Call
from kvcore.types.config import Config
from kvcore.types.values import Request

SECONDS = 120.0
KEPT = "kept"
LISTS = {"requests", "request_ids", "block_ids"}
COUNTS = {"num_new_tokens", "num_tokens", "num_computed_tokens", "total_computed_tokens"}
FEW = 40
"""Number of calls up to which the pool and a call are shrunk together."""
ReportLine = Callable[[str], object]


class _TimeIsOver(Exception):
    """The time for the search is over."""


@attrs.frozen
class Shrunk:
    """The shortest run found. num_calls: of the record. first_at: the call that failed there."""

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
    keep_if: str | None = None,
    seconds: float = SECONDS,
    report_line: ReportLine = str,
) -> Shrunk | None:
    """Return the shortest run found in time that fails like the record; None if nothing fails.

    keep: "difference", "exception", "hang", "crash", "refused:later", "refused:never" or an
    invariant's name; None: the first of them but refusals. keep_if: a shell command that gets the
    folder of a run's record; the run counts if it exits with 0. report_line: called with a line of
    progress. Raises as `read_items`.
    """
    ends = time.monotonic() + seconds
    config, items = read_in_child(path, backends[-1])
    report_line(f"{len(items):,} calls")
    search = Search(config, items, backends, keep, ends, report_line, keep_if)
    broken = search.tried(items).broken
    if broken is None:
        return None
    report_line(f"call {broken.at:,}: {broken.name}")
    search.items, search.name = items[: broken.at + 1], broken.name
    with suppress(_TimeIsOver):
        search.go()
    search.ends = float("inf")
    search.rename()
    done = search.tried(search.items, returns_calls=True)
    assert done.broken is not None
    calls = done.calls[: done.broken.at + 1]
    return Shrunk(search.config, calls, done.broken, len(items), broken.at)


@attrs.define
class Search:
    """Searches for the shortest run that fails by a name, or for which a command exits with 0."""

    config: Config
    items: Items
    backends: Sequence[Backend]
    name: str | None
    ends: float
    report_line: ReportLine
    keep_if: str | None = None
    clamps: bool = False
    """Whether allocations are limited to the request's tokens, so that prompts can be cut."""

    def fails(self, items: Items, config: Config | None = None) -> bool:
        """Return whether a run fails in the same way, and keep it if so. Raises _TimeIsOver."""
        if time.monotonic() > self.ends:
            raise _TimeIsOver
        if self.tried(items, config).broken is None:
            return False
        self.items, self.config = items, config or self.config
        return True

    def tried(
        self, items: Items, config: Config | None = None, *, returns_calls: bool = False
    ) -> Tried:
        """Return the result of a run."""
        make = partial(tried, config or self.config, items, self.backends)
        make = partial(make, clamps=self.clamps, returns_calls=returns_calls)
        if self.keep_if is None:
            return make(self.name)
        with tempfile.TemporaryDirectory() as base:
            folder = Path(base, "record")
            done = make(KEPT, folder=folder)
            ended = subprocess.run(
                f"{self.keep_if} {shlex.quote(str(folder))}", shell=True, stdout=subprocess.DEVNULL
            )
        if ended.returncode:
            return attrs.evolve(done, broken=None)
        return attrs.evolve(done, broken=Broken(KEPT, "the command exits with 0", len(items) - 1))

    def go(self) -> None:
        """Shrink until nothing more can be removed. Raises _TimeIsOver."""
        self.items = self._last_requests()
        before = None
        while before != (self.items, self.config):
            before = (self.items, self.config)
            if not self.clamps:
                self.clamps = self._can_clamp()
            self._cut()
            names = [name for item in self.items for name in added(item)]
            self.items = without_requests(self.items, names, named, self.fails)
            self._cut()
            self.items = without_stretches(self.items, self.fails)
            self.report_line(f"{len(self.items):,} calls")
            self.items = with_simpler_items(self.items, simpler, self.fails)
            self.config = simpler_config(self.config, lambda one: self.fails(self.items, one))
            while self._smaller_pool():
                pass

    def rename(self) -> None:
        """Rename the requests to r0, r1 and so on, as in traces."""
        names = dict.fromkeys(name for item in self.items for name in added(item))
        words = {name: f"r{place}" for place, name in enumerate(names)}
        self._keep([_renamed(item, words) for item in self.items])

    def _can_clamp(self) -> bool:
        """Return whether the run also fails if allocations request at most the tokens left."""
        self.clamps = True
        try:
            return self.fails(self.items)
        finally:
            self.clamps = False

    def _last_requests(self) -> Items:
        """Keep only the requests named last, if that still fails: one, two, four."""
        names = list(dict.fromkeys(n for item in reversed(self.items) for n in sorted(named(item))))
        count = 1
        while count < len(names):
            some = set(names[:count])
            fewer = tuple(each for each in self.items if not named(each) or named(each) & some)
            if self.fails(fewer):
                self.report_line(f"{count:,} of {len(names):,} requests: {len(fewer):,} calls")
                return fewer
            count *= 2
        return self.items

    def _cut(self) -> None:
        """Remove calls after the failure, misuse, and batches directly after another one."""
        done = self.tried(self.items, returns_calls=True)
        if done.broken is not None:
            self.items = self.items[: done.broken.at + 1]
        self._keep(
            [item for item, wrong in zip(self.items, done.is_misuse, strict=False) if not wrong]
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
