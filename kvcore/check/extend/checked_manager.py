# SPDX-License-Identifier: Apache-2.0
"""A manager that checks every property, or the requested ones, at each call.

It takes the calls of a `KVCacheManager` on either backend and returns the same values. A batch
counts as executed when it is taken; with batches in flight, when `execute` names it, or when it is
completed. A `rewind` right after a batch means that the batch's load failed. Leaving the `with`
block checks the properties of whole runs; misuse ends the block silently, since a run that is no
longer possible breaks nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from typing import Any, Literal, Self

import attrs
from msgspec.structs import replace

from kvcore.check.properties.outcomes import check_events, check_hit, check_outcome
from kvcore.check.properties.registry import Property, broken, chosen
from kvcore.check.properties.schedulers import guarded
from kvcore.check.stories.scenes import Follower, SceneNames
from kvcore.check.world.model import CheckedCall
from kvcore.check.world.world import World
from kvcore.manager import KVCacheManager
from kvcore.state.state import State
from kvcore.trace.calls import Call, Misuse
from kvcore.transitions import TRANSITIONS
from kvcore.types import commands
from kvcore.types.commands import Batch
from kvcore.types.config import Config
from kvcore.types.errors import InvariantViolation, KvcoreError
from kvcore.types.values import Hit, Outcome


class CheckedManager:
    """A `KVCacheManager` whose calls raise InvariantViolation if they break a property.

    properties: names of those to check, or your own ones; default: all that hold for every run.
    num_tokens: length to which requests grow, for the properties of runs. world: the world of a
    user's own scheduler, whose moves are tried at the end of the run.
    """

    def __init__(
        self,
        config: Config,
        backend: Literal["rust", "python"] | None = None,
        *,
        properties: Iterable[str | Property] | None = None,
        num_tokens: int = 0,
        world: World | None = None,
    ) -> None:
        self.manager = KVCacheManager(config, backend)
        self._properties = chosen(properties, frozenset(TRANSITIONS))
        self._follower = Follower(config)
        self._state = self.manager.state()
        self._start = self._state
        self._waiting: CheckedCall | None = None
        self._drained = False
        usual = World(config=config, num_requests=1, num_tokens=num_tokens, num_prompt=num_tokens)
        self._world = attrs.evolve(world or usual, calls=frozenset())
        self._hear_state(self._state)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name in TRANSITIONS:
            return partial(self._call, name)
        found: Callable[..., Any] = getattr(self.manager, name)
        return found

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> bool:
        if error is None:
            self.done()
        return isinstance(error, KvcoreError)

    def execute(self, batch: int) -> None:
        """Note that a taken batch, and all before it, were executed now."""
        step = CheckedCall(self._state, Call("execute", (batch,)), Outcome(self._state, (), None))
        self._follow(step)

    def done(self) -> None:
        """Check the properties of the end of a run."""
        self._follow(None)
        for request_id in list(self._state.requests):
            self.get_computed_blocks(request_id)
        opened = list(self._state.batch.commands)
        self._hear("batch", self._start, opened, commands.segments(opened))
        self._follower.finish(self._state)
        self._hear_follower()
        if callable(self._world.moves) and "SCHEDULER" in self._properties:
            list(guarded(self._world.moves)(self._world, self._state))
        self._hear("run", self._world, self._state)

    def get_computed_blocks(self, request_id: str) -> Hit:
        """Return the longest cached prefix of a request."""
        try:
            hit = self.manager.get_computed_blocks(request_id)
        except KvcoreError:
            raise
        except Exception as error:
            raise self._crash(Call("get_computed_blocks", (request_id,)), error) from error
        self._run_check(check_hit, self._state, self._state.requests[request_id], hit)
        return hit

    def _call(self, name: str, *args: Any, **options: Any) -> Any:
        call, before = Call(name, args, options), self._state
        if name == "allocate_slots" and args[0] in before.requests:
            self.get_computed_blocks(args[0])
        try:
            value = getattr(self.manager, name)(*args, **options)
        except KvcoreError as error:
            self._check(
                CheckedCall(before, call, self._outcome(before, Misuse(str(error), error.fields)))
            )
            raise
        except Exception as error:
            raise self._crash(call, error) from error
        self._drained |= name == "take_events"
        self._check(CheckedCall(before, call, self._outcome(before, value)))
        return value

    def _crash(self, call: Call, error: Exception) -> Exception:
        """Make the error for a call that raised an untyped error."""
        if "NOCRASH" not in self._properties:
            return error
        return InvariantViolation("NOCRASH", f"{call} raises {error!r}")

    def _outcome(self, before: State, value: Any) -> Outcome[State, Any]:
        """Return the outcome of the call just made."""
        after = self._state = self.manager.state()
        same = before.batch.number == after.batch.number
        emitted = list(after.batch.commands)[len(before.batch.commands) if same else 0 :]
        return Outcome(after, tuple(emitted), value)

    def _check(self, step: CheckedCall) -> None:
        before, call, outcome = step.before, step.call, step.outcome
        self._run_check(check_outcome, before, call, outcome)
        self._hear("transition", before, call, outcome)
        self._hear_state(outcome.state)
        if call.name == "take_batch":
            if isinstance(outcome.value, Batch):
                segments = list(outcome.value.column("segment"))
                self._hear("batch", self._start, list(before.batch.commands), segments)
            self._start = replace(before, batch=outcome.state.batch)
        if outcome.state.config.enable_events and not self._drained:
            self._run_check(check_events, None, list(outcome.state.events), outcome.state)
        self._follow(step)

    def _hear_state(self, state: State) -> None:
        with suppress(IndexError, KeyError):  # hashes of more tokens than there are: REQ-HASH
            self._run_check(self._follower.ghost.prefixes.learn, state)
        self._hear("state", state, self._follower.ghost.prefixes)

    def _hear(self, scope: Any, *args: Any) -> None:
        for name, detail in broken(self._properties, scope, *args):
            raise InvariantViolation(name, detail)

    def _run_check(self, check: Callable[..., None], *args: Any) -> None:
        try:
            check(*args)
        except InvariantViolation as error:
            if error.name in self._properties:
                raise

    def _follow(self, step: CheckedCall | None) -> None:
        """Let the ghost follow the previous step; the step after it shows whether a load failed."""
        if self._waiting is not None:
            self._follower.follow(self._waiting, step)
            self._hear_follower()
        self._waiting = step
        if step is not None and step.call.name != "take_batch":
            self._waiting = None
            self._follower.follow(step, None)
            self._hear_follower()

    def _hear_follower(self) -> None:
        for error in self._follower.wrong:
            if error.name in self._properties:
                names = SceneNames(self._follower.ghost.prefixes)
                raise InvariantViolation(error.name, names.detail(error.detail)) from None
        self._follower.wrong.clear()
