# SPDX-License-Identifier: Apache-2.0
"""The checker: makes calls, checks the selected properties on each, and counts what was reached.

A property that fails raises `Broken` with the steps so far. If only some properties are selected, a
step that breaks another one is left out, and an error without a property's name is NOCRASH. What
the properties of a state read is computed once for each recently met state, and once for each pool
or request if they read nothing else; properties that read the open batch are checked at every call.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

from kvcore.check.names.canonical import CanonicalNames
from kvcore.check.names.digest import Digest, Digests, Lately
from kvcore.check.properties.hits import hit_of
from kvcore.check.properties.outcomes import check_events, check_hit, check_outcome
from kvcore.check.properties.registry import BrokenProperty, Property, chosen, first_found, select
from kvcore.check.properties.transitions import OF_HITS
from kvcore.check.world.model import Broken, CheckedCall
from kvcore.check.world.world import World
from kvcore.invariants.pool_and_state import OF_POOLS
from kvcore.invariants.requests import OF_REQUESTS
from kvcore.oracle.prefixes import Prefixes
from kvcore.state.state import RequestState, State
from kvcore.trace.calls import Call, Misuse, perform
from kvcore.transitions.prefix_lookup import aligned
from kvcore.transitions.queries import get_computed_blocks
from kvcore.types.commands import SetTable, segments
from kvcore.types.config import Config
from kvcore.types.errors import InvariantViolation
from kvcore.types.values import Appended, Hit, Outcome, Refused

T = TypeVar("T")
Notes = Counter[tuple[str, str]]
Checks = tuple[tuple[str, Callable[..., Iterable[str]]], ...]
Watch = Callable[[State, Call, Outcome[State, Any]], None]

READ_THE_BATCH = ("OPEN-BATCH", "OPERATIONS", "IN-FLIGHT", "QUARANTINE")
"""State properties that read the open batch, which a digest leaves out."""
RECENT_STATES_MAX = 15_000


class Checker:
    """Checks all selected properties, and keeps the notes.

    properties: names of the selected ones, or a user's own; default: all. watch: called with each
    call, to compare another implementation.
    """

    def __init__(
        self,
        world: World,
        prefixes: Prefixes,
        names: CanonicalNames,
        properties: Iterable[str | Property] | None = None,
        watch: Watch | None = None,
    ) -> None:
        self.world = world
        self.prefixes = prefixes
        self.notes: Notes = Counter()
        self._names = names
        self._remembers = world.config.tracks_batches
        self._watch = watch
        known = chosen(properties, world.calls)
        if watch is not None and properties is None:
            known |= select(frozenset({"REFINE"}), world.calls)
        self._known = frozenset(known)
        self._of_hits = _of_scope(known, "transition")
        self._of_calls = tuple(each for each in self._of_hits if each[1] not in OF_HITS)
        self._of_batches = _of_scope(known, "batch")
        self._of_runs = _of_scope(known, "run")
        reading = {name: each for name, each in known.items() if each.reads_prefixes}
        self._of_prefixes = _of_scope(reading, "state")
        alone = {name: each for name, each in known.items() if not each.reads_prefixes}
        states = _of_scope(alone, "state")
        self._of_open = tuple(each for each in states if each[0] in READ_THE_BATCH)
        self._of_states = _without_known(
            tuple(each for each in states if each[0] not in READ_THE_BATCH)
        )
        self._checked: Lately[bool] = Lately(RECENT_STATES_MAX)
        self._checked_closure: Lately[bool] = Lately(RECENT_STATES_MAX)
        self._checked_pools: Lately[bool] = Lately(RECENT_STATES_MAX)
        self._checked_requests: Lately[bool] = Lately(RECENT_STATES_MAX)
        self._digests = Digests()
        self._last: tuple[State | None, Digest] = (None, Digest(b"", b"", ()))
        self._in_check: CheckedCall | None = None
        self._hit: tuple[State | None, str] = (None, "")

    def counts(self, name: str) -> bool:
        """Return whether a property is selected."""
        return name in self._known

    def run_guarded(self, steps: Sequence[CheckedCall], make: Callable[[], T]) -> T | None:
        """Return the value of `make`; None if it breaks a property not selected. Raises Broken."""
        try:
            return make()
        except Broken:
            raise
        except Exception as error:
            self._raise_if_selected(error, tuple(steps))
            return None

    def _raise_if_selected(self, error: Exception, steps: tuple[CheckedCall, ...]) -> None:
        """Raise Broken for an error that counts; its steps end with the checked call."""
        last, self._in_check = self._in_check, None
        found = broken(error, steps if last is None else (*steps, last))
        if isinstance(error, BrokenProperty) or self.counts(found.name):
            raise found from error

    def run_check(self, check: Callable[..., None], *args: Any) -> None:
        """Run a check; raise its violation if the property is selected."""
        try:
            check(*args)
        except InvariantViolation as error:
            if self.counts(error.name):
                raise

    def digest(self, state: State) -> Digest:
        """Return the digest of a state; that of the last one is known."""
        if self._last[0] is not state:
            self._last = (state, self._digests.of(state))
        return self._last[1]

    def name(self, state: State) -> bytes:
        """Return the name of a state, leaving out the open batch."""
        return self._names.of(self.digest(state).whole, state)

    def check(self, state: State) -> None:
        """Check the properties of a state, once for each digest: a name leaves out much that can be
        wrong, such as owners.
        """
        batch = state.batch
        if any(batch.scheduled) or len(batch.merges) or len(state.operations) or self._remembers:
            hear(self._of_open, state)
        digest = self.digest(state)
        self._check_closure(state, digest)
        if self._checked.get(digest.whole) is not None:
            return
        pools = self._checked_pools.get(digest.pools) is not None
        new = [each for each in digest.requests if self._checked_requests.get(each) is None]
        hear(self._of_states[pools, not new], state)
        if not pools:
            self._checked_pools.put(digest.pools, True)
        for each in new:
            self._checked_requests.put(each, True)
        self._checked.put(digest.whole, True)

    def _check_closure(self, state: State, digest: Digest) -> None:
        """Check the properties that read prefixes, once for each pool unless merges are pending."""
        merges = len(state.batch.merges) > 0
        if merges or self._checked_closure.get(digest.pools) is None:
            hear(self._of_prefixes, state, self.prefixes)
            if not merges:
                self._checked_closure.put(digest.pools, True)

    def check_runs(self, state: State) -> None:
        """Check the properties of the runs that start in a state."""
        hear(self._of_runs, self.world, state)

    def check_batch(self, start: State, opened: State) -> None:
        """Check the properties of a batch, given the state in which it was empty and the one before
        it is taken.
        """
        if opened.config.enable_events:
            self.run_check(check_events, start, opened.events, opened)
        commands = list(opened.batch.commands)
        if commands:
            hear(self._of_batches, start, commands, segments(commands))

    def step(self, path: tuple[CheckedCall, ...], state: State, call: Call) -> CheckedCall | None:
        """Make a step after a path; return None if it breaks a property that is not selected."""
        try:
            return self.perform(state, call)
        except Exception as error:
            self._raise_if_selected(error, path)
            return None

    def perform(self, state: State, call: Call) -> CheckedCall:
        """Make a call, check its outcome and note it. Raises InvariantViolation."""
        self._in_check = CheckedCall(state, call, Outcome(state, (), None))
        if call.name == "allocate_slots":
            self._check_hit(state, call.args[0])
        outcome = perform(state, call)
        step = self._in_check = CheckedCall(state, call, outcome)
        if self._watch is not None:
            self._watch(state, call, outcome)
        self.run_check(check_outcome, state, call, outcome)
        if not isinstance(outcome.value, Misuse):
            hear(self._of_calls if hit_of(call) is None else self._of_hits, state, call, outcome)
        if call.name != "take_batch":
            hashed = _newly_hashed(state, outcome.state)
            if hashed:
                self.run_check(self.prefixes.learn_from, hashed)
            self.check(outcome.state)
        note(self.notes, call, outcome)
        self._in_check = None
        return step

    def _check_hit(self, state: State, request_id: str) -> None:
        """Check the longest hit of a request, once per state."""
        if self._hit[0] is not state or self._hit[1] != request_id:
            hit = get_computed_blocks(state, request_id)
            self.run_check(check_hit, state, state.requests[request_id], hit)
            self._hit = (state, request_id)


def hear(checks: Checks, *args: Any) -> None:
    """Run the checks of properties. Raises InvariantViolation, BrokenProperty."""
    for name, holds in checks:
        try:
            for _ in holds(*args):
                break
            else:
                continue
        except Exception:  # called again, for its detail
            pass
        found = first_found(name, holds, args)
        if found is not None:
            raise InvariantViolation(name, found)


def broken(error: Exception, steps: tuple[CheckedCall, ...]) -> Broken:
    """Return the broken property that an error of a check or a call reports."""
    if isinstance(error, InvariantViolation):
        return Broken(error.name, error.detail, steps)
    if isinstance(error, BrokenProperty):
        return Broken(error.name, f"the property itself is wrong: {error}", steps)
    return Broken("NOCRASH", repr(error), steps)


def note(notes: Notes, call: Call, outcome: Outcome[State, Any]) -> None:
    """Count what a call reached, since an exploration shows something only if it reaches it."""
    notes["call", f"{call.name}: {said(outcome.value)}"] += 1
    if outcome.commands:
        for kind in set(map(type, outcome.commands)):
            notes["command", kind.__name__] += 1
        first = outcome.state.device.first_block
        if first:
            sets = (each for each in outcome.commands if isinstance(each, SetTable))
            notes["goal", "trim"] += any(each.block < first for each in sets)
    hit = hit_of(call)
    if hit is not None and not isinstance(outcome.value, Misuse):
        tokens = outcome.state.requests[call.args[0]].tokens
        notes["goal", "full hit"] += is_full(outcome.state.config, hit, len(tokens))


def is_full(config: Config, hit: Hit, num_tokens: int) -> bool:
    """Return whether a hit has all of this many tokens except those that must be computed."""
    if config.has_tails:
        drops = any(config.drops_last_hit(index) for index in range(len(config.groups)))
        most = num_tokens - 1 - drops * config.hit_alignment
        return 0 < hit.num_tokens == aligned(config, most)
    ends = [
        ((num_tokens - 1) // group.block_size - config.drops_last_hit(index)) * group.block_size
        for index, group in enumerate(config.groups)
        if not group.is_state
    ]
    return 0 < hit.num_tokens == aligned(config, min(ends))


def said(value: object) -> str:
    """Describe a call's result in a word or two: done, refused and why, or the error's name."""
    if isinstance(value, Misuse):
        return value.error
    refused = value.refused if isinstance(value, Appended) else value
    if isinstance(refused, Refused):
        return f"refused {refused.reason.value}"
    return "done"


def note_state(notes: Notes, state: State) -> None:
    """Count what a new state shows."""
    device = state.device
    notes["goal", "sharing"] += any(count > 1 for count in device.ref_counts)
    notes["goal", "duplicates"] += len(device.index.following) > 0
    notes["goal", "stale"] += any(
        each.num_computed and each.epoch < state.epoch for each in state.requests.values()
    )


def _of_scope(known: dict[str, Property], scope: str) -> Checks:
    """Return the checks of a scope, by name."""
    return tuple(
        (name, each.holds)
        for name, each in known.items()
        if each.scope == scope and each.holds is not None
    )


def _without_known(checks: Checks) -> dict[tuple[bool, bool], Checks]:
    """Return the checks left to run, by whether the pools, and all requests, are known already."""
    return {
        (pools, requests): tuple(
            (name, holds)
            for name, holds in checks
            if not (pools and holds in OF_POOLS) and not (requests and holds in OF_REQUESTS)
        )
        for pools in (False, True)
        for requests in (False, True)
    }


def _newly_hashed(before: State, after: State) -> list[RequestState]:
    """Return the requests that have block hashes that they did not have."""
    known, found = before.requests, []
    for name, request in after.requests.items():
        old = known.get(name)
        if old is not request and (old is None or old.block_hashes is not request.block_hashes):
            found.append(request)
    return found
