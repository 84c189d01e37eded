# SPDX-License-Identifier: Apache-2.0
"""Settings of all tests: Hypothesis profiles, backends, facts shown, the rewriting of traces."""

from __future__ import annotations

import gc
import os
from collections import Counter, defaultdict
from collections.abc import Callable
from typing import Literal

import pytest
from hypothesis import HealthCheck, settings

from kvcore import _twin
from tests.helpers.amount import examples

Backend = Literal["python", "rust"]
MaxStates = Callable[[int, int], int | None]
FEW_EDGES = 400
"""How many edges of a world either language explores in some seconds."""

SLOW_MACHINE = [HealthCheck.too_slow, HealthCheck.data_too_large]
settings.register_profile(
    "dev", deadline=None, max_examples=examples(20), suppress_health_check=SLOW_MACHINE
)
settings.register_profile(
    "ci", parent=settings.get_profile("dev"), derandomize=True, print_blob=True
)
settings.load_profile("ci" if os.environ.get("CI") else "dev")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add --rewrite."""
    parser.addoption(
        "--rewrite",
        action="store_true",
        help="write the real outcomes into tests/traces: commit only what you understand",
    )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Note on each test the numbers of its `seed` markers, for the readers of its report."""
    for item in items:
        for marker in item.iter_markers("seed"):
            item.user_properties += (("seed", number) for number in marker.args)


def pytest_collection_finish() -> None:
    """Collect garbage rarely, and not in modules and tests: a fifth of some folders' time."""
    leave_out_of_collections()
    gc.set_threshold(20_000)


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Leave what the tests of a folder keep out of later collections: caches, pytest's reports."""
    if nextitem is not None and nextitem.path.parent != item.path.parent:
        leave_out_of_collections()


def leave_out_of_collections() -> None:
    """Collect garbage, and let no later collection walk what is left."""
    gc.collect()
    gc.freeze()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """One closing line per folder of tests: the log of a run shows which room failed."""
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    seconds: Counter[str] = Counter()
    for outcome in ("passed", "failed", "error", "skipped"):
        for report in terminalreporter.stats.get(outcome, ()):
            folder = "/".join(report.nodeid.partition("::")[0].split("/")[:2])
            counts[folder][outcome] += 1
            seconds[folder] += getattr(
                report, "duration", 0
            )  # a file that fails to import has none
    for folder, found in sorted(counts.items()):
        words = ", ".join(f"{number} {outcome}" for outcome, number in found.items())
        terminalreporter.write_line(f"{folder}: {words} in {seconds[folder]:.0f} s")


def need_twin() -> None:
    """Skip if the compiled twin is missing, with the reason; on CI that is a failure."""
    if not _twin.available():
        reason = "the compiled twin kvcore._rust is not built: `make setup` builds it"
        if os.environ.get("CI"):
            pytest.fail(reason)
        pytest.skip(reason)


@pytest.fixture(
    params=[
        pytest.param(False, id="first states"),
        pytest.param(True, id="all states", marks=pytest.mark.slow),
    ]
)
def max_states(request: pytest.FixtureRequest) -> MaxStates:
    """Gives the number of states to explore, from the states and edges that a world has.

    None, for all of them, if the edges are few, and in `make explore`.
    """

    def most(num_states: int, num_edges: int) -> int | None:
        few = num_edges <= FEW_EDGES or request.param
        return None if few else max(10, FEW_EDGES * num_states // num_edges)

    return most


@pytest.fixture(params=["rust", pytest.param("python", marks=pytest.mark.slow)])
def backend_of_engine(request: pytest.FixtureRequest) -> Backend:
    """Return the twin, and Python in `make explore`: for engines that run long on either."""
    name: Backend = request.param
    if name == "rust":
        need_twin()
    return name


@pytest.fixture(params=["python", "rust"])
def backend(request: pytest.FixtureRequest) -> Backend:
    """Return each backend in turn."""
    name: Backend = request.param
    if name == "rust":
        need_twin()
    return name
