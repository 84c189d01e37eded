# SPDX-License-Identifier: Apache-2.0
"""One call to explore a world, on either language or on both.

Rules: "python" explores over the core, "rust" over the twin, by the same search compiled, and
"both" over the core with each call made on the twin, too. Twin: none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Literal

from kvcore.check import search
from kvcore.check.model import Model
from kvcore.check.parity import Parity
from kvcore.check.properties import Property
from kvcore.check.report import Report
from kvcore.check.twin_search import check_on_twin
from kvcore.check.world import Symmetry, World
from kvcore.errors import WrongArgument

BackendName = Literal["python", "rust", "both"]


def check(
    what: World | Model[Any],
    *,
    backend: BackendName = "python",
    max_depth: int | None = None,
    max_states: int | None = None,
    max_seconds: float | None = None,
    properties: Iterable[str | Property] | None = None,
    symmetry: Symmetry | None = None,
    full_keys: bool = False,
    workers: int = 1,
    progress: Callable[[Report], None] | None = None,
) -> Report:
    """Explore a world, or a model of your own, breadth first; the report has the verdict, and of a
    violation the shortest run.

    max_depth, max_states, max_seconds: where to stop, None for never. properties: names of those
    that count, or some of your own (Python only); all unless given. symmetry: what is renamed, all
    unless given. full_keys: keep whole names instead of 128 bits of them (Python only). workers:
    threads or processes. progress: is told how far it is, now and then. Raises BackendMissing,
    WrongArgument.
    """
    limits: dict[str, Any] = {
        "max_depth": max_depth,
        "max_states": max_states,
        "max_seconds": max_seconds,
    }
    shared: dict[str, Any] = {**limits, "symmetry": symmetry, "progress": progress}
    if backend == "rust":
        named = _only_names(what, properties, full_keys=full_keys)
        assert isinstance(what, World)
        return check_on_twin(what, properties=named, workers=workers, **shared)
    watch = None
    if backend == "both":
        if not isinstance(what, World):
            raise WrongArgument(name="backend", expected="python for a model", value="'both'")
        watch = Parity(what)
    report = search.check(what, properties=properties, full_keys=full_keys, watch=watch, **shared)
    report.backend = backend
    return report


def _only_names(
    what: object, properties: Iterable[str | Property] | None, *, full_keys: bool
) -> list[str] | None:
    """The names of properties for the compiled search, which knows no others."""
    if not isinstance(what, World) or callable(what.moves):
        expected = "python for a model or moves of one's own"
        raise WrongArgument(name="backend", expected=expected, value="'rust'")
    if full_keys:
        raise WrongArgument(name="full_keys", expected="False on the twin", value="True")
    if properties is None:
        return None
    names = []
    for each in properties:
        if not isinstance(each, str):
            expected = "names alone on the twin"
            raise WrongArgument(name="properties", expected=expected, value=repr(each.name))
        names.append(each)
    return names
