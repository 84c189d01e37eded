# SPDX-License-Identifier: Apache-2.0
"""`kvcore check --facade NAME`: explores every state of an older manager's small worlds.

Results go to standard output, errors to standard error; the exit code is that of the worst world.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from functools import partial
from typing import Any

import attrs

from kvcore.check.cli.options import BadOptions, check_hunt, given_of_world, option
from kvcore.check.facades.engine import FacadeWorld
from kvcore.check.facades.model import FacadeModel
from kvcore.check.facades.mutants import run_mutants
from kvcore.check.facades.profiles import FACADES, Facade, make_engine
from kvcore.check.search.report import INTERRUPTED, Report
from kvcore.check.search.search import check
from kvcore.check.search.text import to_text
from kvcore.check.stories.story import render

SIZES = {
    **{name: f"num_{name}" for name in ("blocks", "tokens", "prompt", "letters", "host_blocks")},
    "requests": "num_sequences",
    "block_size": "block_size",
}
"""The field of a facade's world that each option sets."""
ELSEWHERE = ("properties", "full_keys", "no_symmetry", "write_test", "write_trace")


def run_facade(
    options: argparse.Namespace, progress: Callable[[Report], None], end: Callable[[], None]
) -> int:
    """Explore the worlds of a facade, one by one; return the exit code.

    progress: called with each report so far; end: called after each world. Raises BadOptions,
    BackendMissing.
    """
    facade = _facade(options)
    if options.list:
        print(_listed(facade, as_json=options.json))
        return 0
    if options.mutants:
        return _hunt(options, facade)
    worlds, backend = _worlds(options, facade), options.backend or "python"
    reports, code = {}, 0
    for name, world in worlds.items():
        model = FacadeModel(partial(make_engine, world, backend), facade.known)
        report = check(
            model,
            max_depth=options.depth,
            max_states=options.limit,
            max_seconds=options.time,
            progress=progress,
        )
        end()
        report.backend = backend
        reports[name] = report
        if not options.json:
            print(f"== {facade.name}, {name}: {_said(world)}")
            print(to_text(report))
        if report.violation is not None:
            code = 1
            if not options.json:
                print(f"\n{render(report.violation, model)}")
        if report.verdict == INTERRUPTED:
            code = code or 130
            break
    if options.json:
        print(json.dumps(_as_data(facade, reports), indent=2))
    else:
        print("\n".join(_checked(facade)))
    return code


def _hunt(options: argparse.Namespace, facade: Facade) -> int:
    """Hunt the seeded bugs of a facade; return 1 if one survives. Raises BadOptions."""
    check_hunt(options, "json")
    killed = []
    for line, is_killed in run_mutants([facade.name]):
        killed.append(is_killed)
        print(line, flush=True)
    print(f"{sum(killed)} of {len(killed)} seeded bugs are killed")
    return int(not all(killed))


def _facade(options: argparse.Namespace) -> Facade:
    found = FACADES.get(options.facade)
    if found is None:
        raise BadOptions(f"there is no facade {options.facade!r}; there are {', '.join(FACADES)}")
    if options.backend == "both":
        raise BadOptions("a facade runs on one backend at a time: use python or rust")
    for name in ELSEWHERE:
        if getattr(options, name):
            raise BadOptions(f"--facade has its own worlds: omit {option(name)}")
    return found


def _worlds(options: argparse.Namespace, facade: Facade) -> dict[str, FacadeWorld]:
    """Return the worlds to explore: all, the named one, or one with the given sizes."""
    zeros = [name for name in SIZES if getattr(options, name) == 0 and name != "host_blocks"]
    if zeros:
        raise BadOptions(f"{option(zeros[0])} must be at least 1")
    given = given_of_world(options)
    sizes = {SIZES[name]: getattr(options, name) for name in given if name in SIZES}
    unknown = [name for name in given if name not in SIZES and name != "profile"]
    if unknown:
        raise BadOptions(f"--facade does not take {option(unknown[0])}")
    if options.profile is not None:
        if options.profile not in facade.worlds:
            known = ", ".join(facade.worlds)
            raise BadOptions(f"{facade.name} has no world {options.profile!r}; it has {known}")
        if sizes:
            raise BadOptions(f"--profile names a whole world: leave {option(given[-1])} out")
        return {options.profile: facade.worlds[options.profile]}
    if not sizes:
        return dict(facade.worlds)
    first: Any = next(iter(facade.worlds.values()))
    wrong = [name for name in sizes if not hasattr(first, name)]
    if wrong:
        raise BadOptions(f"tokens do not matter to {facade.name}: leave --letters out")
    return {"given": attrs.evolve(first, **sizes)}


def _listed(facade: Facade, *, as_json: bool) -> str:
    """List the worlds of a facade, one per line."""
    if as_json:
        return json.dumps({name: _plain(facade, name) for name in facade.worlds})
    width = max(map(len, facade.worlds))
    return "\n".join(f"{name:<{width}}  {_said(each)}" for name, each in facade.worlds.items())


def _said(world: FacadeWorld) -> str:
    """Describe a world in words."""
    fields = attrs.asdict(world)
    fields["calls"] = " ".join(sorted(fields["calls"])) or "no more"
    return ", ".join(f"{name} {value}" for name, value in fields.items() if value is not None)


def _checked(facade: Facade) -> list[str]:
    lines = [f"checked: {', '.join(facade.checked)}", "not checked:"]
    return lines + [f"  {name}: {reason}" for name, reason in sorted(facade.reasons.items())]


def _as_data(facade: Facade, reports: dict[str, Report]) -> dict[str, Any]:
    worlds = {
        name: {**report.to_json(), "world": _plain(facade, name)}
        for name, report in reports.items()
    }
    return {
        "facade": facade.name,
        "checked": list(facade.checked),
        "lifted": facade.reasons,
        "worlds": worlds,
    }


def _plain(facade: Facade, name: str) -> dict[str, Any]:
    world = facade.worlds.get(name)
    return {} if world is None else attrs.asdict(world, value_serializer=_sorted)


def _sorted(_: Any, __: Any, value: Any) -> Any:
    return sorted(value) if isinstance(value, frozenset) else value
