# SPDX-License-Identifier: Apache-2.0
"""Runs one world on one engine: its moves, then a drain until no request waits; reports the
outcome.
"""

from __future__ import annotations

import signal
import sys
import traceback
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import attrs

from kvcore.sanitizer import Sanitizer
from kvcore.sanitizer.findings import CERTAIN
from kvcore.sanitizer.hunter.adapter import EngineAdapter
from kvcore.sanitizer.hunter.router import Router
from kvcore.sanitizer.hunter.watch import Watch
from kvcore.sanitizer.hunter.world import STEP, Abort, Arrive, HuntWorld, Move, playable

STUCK_STEPS = 12
"""Most steps in which nothing at all changes."""
NO_TOKEN_STEPS = 400
"""Most steps in which no request gets a token."""
HUNG_SECONDS = 5.0
"""Most CPU seconds of one run, which normally takes some milliseconds."""
MUTABLE = frozenset({*CERTAIN, "wrong-event"})
"""Findings after which a run can go on; only a sanitizer or a router can see them."""
OWN = Path(__file__).parents[1]


@attrs.frozen
class Found:
    """A finding of one run. where: for a crash, exception and function. step: number of moves made
    before.
    """

    name: str
    where: str
    text: str
    num_moves: int

    @property
    def key(self) -> tuple[str, str]:
        """Return the key by which two findings count as the same while a run is shrunk."""
        return self.name, self.where


@attrs.frozen
class RunOutcome:
    """The outcome of a run. skipped: the engine refused the world's options."""

    found: Found | None = None
    reached: frozenset[str] = frozenset()
    num_steps: int = 0
    skipped: bool = False


class Hung(BaseException):
    """A run used far more CPU time than any run needs."""


class Harness(Exception):
    """The fake model and the engine disagree, or the adapter reported nonsense: not a finding."""


def run(
    adapter: type[EngineAdapter],
    world: HuntWorld,
    *,
    full: bool = False,
    muted: Collection[str] = (),
) -> RunOutcome:
    """Run a world to its end or its first finding.

    full: use the sanitizer's full mode. muted: names of findings that do not end the run.
    """
    return _Run(adapter, world, full, muted).outcome()


class _Run:
    def __init__(
        self, adapter: type[EngineAdapter], world: HuntWorld, full: bool, muted: Collection[str]
    ) -> None:
        self.adapter, self.world, self.full, self.muted = adapter, world, full, muted
        self.engine: Any = None
        self.watch: Watch | None = None
        self.arrivals: dict[str, Arrive] = {}
        self.checked: dict[str, int] = {}
        self.num_moves = 0
        self.num_tokens = 0
        self.total = 0  # of blocks
        self.router = Router()

    def outcome(self) -> RunOutcome:
        """Return the outcome, with the finding if there is one."""
        found = None
        try:
            with _alarm(HUNG_SECONDS):
                found = self._all()
        except Hung as error:
            found = self._found("hang", _site(error), _tail(error))
        except Harness as error:
            found = self._found("harness", "", str(error))
        except Exception as error:
            if self.engine is None and self.adapter.refusal(error):
                return RunOutcome(skipped=True)
            found = self._raised(error)
        finally:
            self._close()
        if self.watch is None:
            return RunOutcome(found)
        return RunOutcome(found, frozenset(self.watch.reached), self.watch.num_steps)

    def _close(self) -> None:
        """End the engine; an error raised then is not a finding."""
        try:
            if self.engine is not None:
                self.engine.close()
        except Exception:
            self.engine = None

    def _all(self) -> Found | None:
        self.engine = self.adapter.Engine(self.world)
        self.total = self.engine.free()
        sanitizer = Sanitizer(
            self.adapter.groups(self.engine),
            self.engine.num_blocks,
            full=self.full,
            show_tokens=True,
            engine=self.adapter.NAME,
        )
        self.watch = Watch(sanitizer)
        self.adapter.attach(self.engine.target, self.watch)
        for move in playable(self.world, self.adapter.MOVES):
            self.num_moves += 1
            self._move(move)
            if (found := self._checked()) is not None:
                return found
        return self._drained() or self._leaked()

    def _move(self, move: Move) -> None:
        match move:
            case Arrive():
                if self._refusable(lambda: self.engine.arrive(move)):
                    self.arrivals[move.name] = move
            case Abort():
                if move.name in set(self.engine.live):
                    assert self.watch is not None
                    self.watch.aborts(flying=getattr(self.engine, "in_flight", False))
                    self._refusable(lambda: self.engine.abort(move.name))
            case "epoch":
                if self.engine.epoch():
                    assert self.watch is not None
                    self.watch.epoch()
            case "reset":
                self._refusable(self.engine.reset)
            case _:
                assert move == STEP
                self.engine.step()

    def _refusable(self, call: Callable[[], Any]) -> bool:
        """Try a call; return whether the engine accepted it. Errors other than its refusal are
        raised.
        """
        try:
            call()
        except Exception as error:
            if not self.adapter.refusal(error):
                raise
            return False
        return True

    def _checked(self) -> Found | None:
        """Return the first certain finding; without one, check that the engine keeps the model's
        answers.
        """
        assert self.watch is not None
        if self.watch.broken is not None:
            raise Harness(f"{type(self.watch.broken).__name__}: {self.watch.broken}")
        self._check_tokens()
        if not self.engine.free():
            self.watch.reached.add("full-pool")
        wrong = self.router.wrong(self.engine) if hasattr(self.engine, "events") else ""
        if wrong and "wrong-event" not in self.muted:
            return self._found("wrong-event", "", wrong)
        for found in self.watch.findings:
            if found.certain and found.name not in self.muted:
                return self._found(found.name, "", str(found))
        return None

    def _check_tokens(self) -> None:
        """Check that the reported tokens are those of the prompts and of the fake model."""
        assert self.watch is not None
        for name, tokens in self.watch.token_lists.items():
            request, sample = self.adapter.sample_of(name)
            prompt = self.arrivals[request].prompt
            start = self.checked.get(name, 0)
            for place in range(start, len(tokens)):
                model = self.world.token(place, sample)
                wanted = prompt[place] if place < len(prompt) else model
                if tokens[place] != wanted:
                    raise Harness(
                        f"the engine keeps token {tokens[place]} of {name} at position {place}, "
                        f"the fake model gave {wanted}"
                    )
            self.checked[name] = max(start, len(tokens))
            self.num_tokens += max(0, len(tokens) - start)

    def _drained(self) -> Found | None:
        """Make steps until no request waits."""
        assert self.watch is not None
        still, before, tokens, since = 0, None, self.num_tokens, 0
        while set(self.engine.live):
            self.engine.step()
            if (found := self._checked()) is not None:
                return found
            now = self.engine.free(), self.watch.progress()
            still = still + 1 if now == before else 0
            since = since + 1 if self.num_tokens == tokens else 0
            before, tokens = now, self.num_tokens
            if still >= STUCK_STEPS or since >= NO_TOKEN_STEPS:
                steps = still if still >= STUCK_STEPS else since
                waits = ", ".join(map(str, self.engine.live))
                return self._found(
                    "stuck",
                    "",
                    f"stuck: {waits} wait; {steps} steps changed nothing; "
                    f"{self.engine.free()} of {self.total} blocks are free",
                )
        return None

    def _leaked(self) -> Found | None:
        """Check, when all requests have left, that every block is free, also after an idle step."""
        self.engine.finish_batches()
        if (found := self._checked()) is not None:
            return found
        before = self.engine.free()
        self.engine.step()
        after = self.engine.free()
        if after == self.total:
            return None
        return self._found(
            "leak",
            "",
            f"leak: all have left, {after} of {self.total} blocks can be used ({before} before)",
        )

    def _found(self, name: str, where: str, text: str) -> Found:
        return Found(name, where, text, self.num_moves)

    def _raised(self, error: Exception) -> Found:
        """Return the crash of the engine, or of the harness if its own code raised."""
        if self.watch is not None and self.watch.broken is not None:
            return self._found("harness", "", f"{self.watch.broken!r}\n{_tail(error)}")
        deepest = traceback.extract_tb(error.__traceback__)[-1].filename
        if OWN in Path(deepest).parents or self._is_of_the_adapter(deepest):
            return self._found("harness", _site(error), _tail(error))
        return self._found("crash", f"{type(error).__name__} in {_site(error)}", _tail(error))

    def _is_of_the_adapter(self, file: str) -> bool:
        """Return whether a file drives the engine whose own class is in another file."""
        engine = getattr(self.engine, "target", None)
        return file == _file(self.adapter.Engine) != _file(type(engine))


def _file(of: type) -> str | None:
    return getattr(sys.modules[of.__module__], "__file__", None)


def _site(error: BaseException) -> str:
    """Return the innermost function outside this package."""
    frames = traceback.extract_tb(error.__traceback__)
    theirs = [frame for frame in frames if OWN not in Path(frame.filename).parents]
    return theirs[-1].name if theirs else frames[-1].name


def _tail(error: BaseException) -> str:
    return "".join(traceback.format_exception(error)[-9:])


@contextmanager
def _alarm(seconds: float) -> Iterator[None]:
    """Raise Hung after this many CPU seconds."""

    def ring(number: int, frame: FrameType | None) -> None:
        del number, frame
        raise Hung(f"more than {seconds} CPU seconds")

    before = signal.signal(signal.SIGVTALRM, ring)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)
