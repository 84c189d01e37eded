# SPDX-License-Identifier: Apache-2.0
"""The registry: every property that the checker knows, as a named value.

A property has one name and one sentence, in code, messages and docs/invariants.md alike. Its scope
says what it is checked on: a state, one call (transition), the commands of a batch, or a run that
starts in a state. Its severity says what a break costs: wrong KV, a crash, a leak, progress, or
only hits and work (quality). A break of an observable property can be seen without reading the
manager's state. If `holds` is None, the search checks the property by the contents that it follows
along an edge.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, get_args

import attrs

from kvcore.check.properties import closure, fair_scheduler, liveness, schedulers, transitions
from kvcore.check.properties.facts import FACTS, FAR_PROPERTIES, SENTENCES, Fact, Severity
from kvcore.check.properties.outcomes import OUTCOME_PROPERTIES
from kvcore.invariants import pool_and_state
from kvcore.oracle import hazards
from kvcore.oracle.prefixes import PREFIX_PROPERTIES
from kvcore.state.state import State
from kvcore.types.errors import InvariantViolation

Scope = Literal["state", "transition", "batch", "run"]


@attrs.frozen(kw_only=True)
class Property:
    """A property of the checker, or a user's own.

    holds: yields what is wrong, in words with numbers. Its arguments depend on the scope: (state),
    or (state, prefixes) if `reads_prefixes`; (state before, call, outcome); (state before,
    commands, segments); (world, state). rows: those of `catalogue.py`.
    """

    name: str
    sentence: str
    scope: Scope
    severity: Severity
    observable: bool = False
    rows: tuple[int, ...] = ()
    holds: Callable[..., Iterator[str]] | None = None
    reads_prefixes: bool = False
    on_request: bool = False
    """Whether it is checked only if it is named."""

    def __attrs_post_init__(self) -> None:
        for name, known in (("scope", get_args(Scope)), ("severity", get_args(Severity))):
            if getattr(self, name) not in known:
                given = getattr(self, name)
                raise ValueError(f"{name} of {self.name} is {given!r}, not {', '.join(known)}")
        if self.holds is not None and not callable(self.holds):
            raise ValueError(f"holds of {self.name} is {self.holds!r}, which is not a function")


class BrokenProperty(Exception):
    """A user's own property raised, or yielded no words, which is a finding too.

    args: the arguments of the property, the state among them.
    """

    def __init__(self, name: str, said: str, args: Sequence[Any]) -> None:
        self.name = name
        states = [each for each in args if isinstance(each, State)]
        where = f", in {schedulers.summary(states[0])}" if states else ""
        super().__init__(f"{name} {said}{where}")


def first_found(name: str, holds: Callable[..., Any], args: Sequence[Any]) -> str | None:
    """Return the first error that a property finds. Raises InvariantViolation, BrokenProperty."""
    try:
        given = holds(*args)
        found = next(iter(given), None)
    except InvariantViolation:
        raise
    except Exception as error:
        raise BrokenProperty(name, f"raised {type(error).__name__}: {error}", args) from error
    if found is None:
        return None
    if isinstance(given, str) or not isinstance(found, str):
        said = f"gives {given!r}" if isinstance(given, str) else f"yields {found!r}"
        raise BrokenProperty(name, f"{said}: it must yield what is wrong, in words", args)
    return found


def broken(
    properties: Mapping[str, Property], scope: Scope, *args: Any
) -> Iterator[tuple[str, str]]:
    """Yield name and detail of each property of a scope that fails, among those that are checked by
    themselves. Raises BrokenProperty. For states, args are the state and the prefixes.
    """
    for name, each in properties.items():
        if each.scope != scope or each.holds is None:
            continue
        given = args if scope != "state" or each.reads_prefixes else args[:1]
        detail = first_found(name, each.holds, given)
        if detail is not None:
            yield name, detail


def select(
    names: frozenset[str] | None, calls: frozenset[str], *, observable: bool = False
) -> dict[str, Property]:
    """Return the properties to check a world of such calls by: the named ones, or all that it can
    express.

    observable: only those whose break a user can see.
    """
    if names is not None:
        unknown = sorted(names - set(PROPERTIES))
        if unknown:
            said = f"there is no property {', '.join(unknown)}"
            raise ValueError(f"{said}; `kvcore check --properties list` names them all")
        return {name: PROPERTIES[name] for name in PROPERTIES if name in names}
    lifted = set() if closure.holds_after(calls) else set(closure.CLOSURE_CHECKS)
    return {
        name: each
        for name, each in PROPERTIES.items()
        if not each.on_request and name not in lifted and (each.observable or not observable)
    }


def chosen(
    properties: Iterable[str | Property] | None, calls: frozenset[str]
) -> dict[str, Property]:
    """Return the selected properties of a world of such calls, by name: the named ones, and a
    user's own; default: all that the world can express.
    """
    given = None if properties is None else list(properties)
    names = None if given is None else frozenset(each for each in given if isinstance(each, str))
    own = {each.name: each for each in given or () if isinstance(each, Property)}
    return select(names, calls) | own


def sentence_of(name: str, holds: Callable[..., Any] | None) -> str:
    """Return a property's sentence, from the table or from its function's docstring."""
    known = SENTENCES | PREFIX_PROPERTIES | OUTCOME_PROPERTIES
    if name in known:
        return known[name]
    paragraph = ((holds.__doc__ if holds is not None else "") or "").split("\n\n")[0]
    return " ".join(paragraph.split()).partition(": ")[2].rstrip(".")


def _make(name: str, scope: Scope, holds: Callable[..., Iterator[str]] | None) -> Property:
    fact = FACTS.get(name, Fact("wrong KV"))
    return Property(
        name=name,
        sentence=sentence_of(name, holds),
        scope=scope,
        severity=fact.severity,
        observable=fact.observable,
        rows=fact.rows,
        holds=holds,
        reads_prefixes=name in closure.CLOSURE_CHECKS,
        on_request=name in ON_REQUEST,
    )


ON_REQUEST = ("DETERMINISM", "REFINE", "NO-THRASH")
"""Properties that make every call twice, or run a scheduler to its end in every state."""

BY_SCOPE: tuple[tuple[Scope, Mapping[str, Callable[..., Iterator[str]]]], ...] = (
    ("state", pool_and_state.PROPERTIES),
    ("state", closure.CLOSURE_CHECKS),
    ("transition", transitions.TRANSITION_CHECKS),
    ("batch", hazards.BATCH_CHECKS),
    ("run", {**liveness.RUN_CHECKS, "DEADLOCK-FREE": schedulers.deadlock_free}),
    ("run", {"NO-THRASH": fair_scheduler.no_thrash}),
)

HOLDS = {name: (scope, holds) for scope, group in BY_SCOPE for name, holds in group.items()}

FOLLOWED: dict[str, Scope] = {
    **dict.fromkeys(("KV-READ", "CACHE-KV", "LOAD-FAILED", "TABLE-MIRROR"), "batch"),
    **dict.fromkeys(("OWNER-MIRROR", "COMPUTED-RULE", "ZEROED", "CAP", "CMD-INFLIGHT"), "batch"),
    **dict.fromkeys(("STATE-READ", "STATE-KEY"), "batch"),
    **dict.fromkeys(
        ("NOCRASH", "OUTPUT-ONCE", "REFINE", "POLICY", "SCHEDULER", "MANAGER", *OUTCOME_PROPERTIES),
        "transition",
    ),
    **dict.fromkeys((*PREFIX_PROPERTIES, *FAR_PROPERTIES), "state"),
}
"""Properties that the search checks by the contents that it follows along an edge."""

PROPERTIES: dict[str, Property] = {
    **{name: _make(name, scope, holds) for name, (scope, holds) in HOLDS.items()},
    **{name: _make(name, scope, None) for name, scope in FOLLOWED.items()},
}
