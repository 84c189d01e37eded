# SPDX-License-Identifier: Apache-2.0
"""Runs from seeds, their moves, and the same moves again.

Generators that one seed determines decide everything, the configuration first; a run that is made
again from its moves needs no random number. A failure names a property and keeps the moves that
lead to it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from random import Random
from typing import Literal

import attrs

from kvcore.check.simulate import run_checks
from kvcore.check.simulate.engine import Engine
from kvcore.check.simulate.every_move import make
from kvcore.check.simulate.play import MakeManager, Move, Play
from kvcore.check.simulate.setting import Fixed, Setting, draw_setting
from kvcore.manager import KVCacheManager
from kvcore.oracle.device import MakeDevice
from kvcore.types.config import Config
from kvcore.types.errors import InvariantViolation

BackendName = Literal["python", "rust", "both"]
Managers = BackendName | Sequence[tuple[str, MakeManager]]
"""A backend, or a caller's own managers by name."""

MakeDevices = Sequence[MakeDevice]
MOST_ROWS, MOST_TOKENS, MARGIN = 256, 8192, 200
"""Default size of a device, and room for lookahead and forks of forks."""
LOOKS = 20
"""Full checks of one run: at this share of its steps."""


@attrs.frozen
class Failure:
    """A property that a run broke, and the detail.

    at: the step, None at the end. moves: those of the run up to there.
    """

    name: str
    detail: str
    config: Config
    moves: tuple[Move, ...]
    at: int | None


@attrs.define
class Run:
    """The result of a run. num_calls: on each manager. goals: how often each thing happened."""

    seed: int
    config: Config
    num_steps: int = 0
    num_calls: int = 0
    num_requests: int = 0
    failure: Failure | None = None
    goals: Counter[str] = attrs.field(factory=Counter)


def managers(backend: Managers) -> list[tuple[str, MakeManager]]:
    """Return how to make the managers of a backend, or of both."""
    if not isinstance(backend, str):
        return list(backend)
    names: list[Literal["python", "rust"]] = ["python", "rust"]
    return [(n, partial(KVCacheManager, backend=n)) for n in names if backend in (n, "both")]


def simulate(
    seed: int,
    num_steps: int,
    *,
    backend: Managers = "both",
    fixed: Fixed | None = None,
    devices: MakeDevices = (),
    every: int | None = None,
    stop: Callable[[int], bool] | None = None,
) -> Run:
    """Make one run of this many steps; the same arguments give the same run.

    every: steps between two full checks. stop: called before each step; if it returns true, the run
    ends early.
    """
    random, more = Random(seed), Random(f"further {seed}")
    fixed = Fixed() if fixed is None else fixed
    if devices:  # they hold slots of tokens that a request writes itself
        fixed = attrs.evolve(fixed, cross=False, states=False, further=())
    setting = draw_setting(random, more, fixed)
    play = _play(setting.config, backend, devices, setting)
    moves: list[Move] = []
    step: int | None = 0

    def do(move: Move) -> object:
        moves.append(move)
        return make(play, move)

    engine = Engine(random, more, setting, play, do)
    looks = every or max(1, num_steps // LOOKS)
    run = Run(seed, setting.config)
    try:
        for step in range(num_steps):
            if stop is not None and stop(step):
                break
            engine.step()
            run.num_steps = step + 1
            if run.num_steps % looks == 0:
                run_checks.check_all(play)
        step = None
        run_checks.finish(play)
    except Exception as error:
        run.failure = _failure(error, setting.config, moves, step)
    run.num_calls, run.goals = len(play.calls), play.goals
    run.num_requests = play.goals["add_request"] + play.goals["fork"]
    return run


def again(
    config: Config,
    moves: Sequence[Move],
    *,
    backend: Managers,
    devices: MakeDevices = (),
    ends: bool = True,
) -> tuple[Play, Failure | None]:
    """Make moves on a new run and check fully at its end; return the result.

    ends: whether everything is given back then.
    """
    play = _play(config, backend, devices, None)
    done = 0
    try:
        for move in moves:
            make(play, move)
            done += 1
        run_checks.check_all(play)
        if ends:
            run_checks.finish(play)
    except Exception as error:
        return play, _failure(error, config, moves[: done + 1], done)
    return play, None


def _failure(error: Exception, config: Config, moves: Sequence[Move], at: int | None) -> Failure:
    """Return the failure that ended a run; an error that is no violation is a crash."""
    name, detail = "NOCRASH", repr(error)
    if isinstance(error, InvariantViolation):
        name, detail = error.name, error.detail
    return Failure(name, detail, config, tuple(moves), at)


def _play(config: Config, backend: Managers, devices: MakeDevices, setting: Setting | None) -> Play:
    num_rows, num_tokens = MOST_ROWS, MOST_TOKENS
    if setting is not None:
        num_rows = config.max_rows(setting.num_requests + 1)
        num_tokens = 2 * (setting.num_prompt + 2 * setting.num_output) + MARGIN
    return Play(config, managers(backend), devices, num_rows, num_tokens)
