# SPDX-License-Identifier: Apache-2.0
"""Runs one world in its own process, for engines that die, hang in compiled code, or flood the
output.
"""

from __future__ import annotations

import json
import os
import resource
import select
import signal
import sys

from kvcore.sanitizer.hunter.adapter import EngineAdapter
from kvcore.sanitizer.hunter.own_time import OwnTime
from kvcore.sanitizer.hunter.run import run
from kvcore.sanitizer.hunter.world import HuntWorld

OWN_SECONDS = 3.0
"""A run of this length counts as hanging (`OwnTime`)."""
POLL_SECONDS = 0.1
FLOOD_BYTES = 4 << 20

Ended = tuple[str | None, str, str]
"""Name of a finding or None, its place, and its text."""


def outcome_of(
    adapter: type[EngineAdapter], world: HuntWorld, seconds: float = OWN_SECONDS
) -> Ended:
    """Run a world in a fork of this process and return the outcome. No other thread may run."""
    answers, answer = os.pipe()
    prints, printed = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(answers)
        os.close(prints)
        os.dup2(printed, 1)
        os.dup2(printed, 2)
        sys.stdout = sys.stderr = os.fdopen(1, "w")
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        found = run(adapter, world).found
        ended = None if found is None else (found.name, found.where, found.text[:4000])
        os.write(answer, json.dumps(ended or (None, "", "")).encode())
        os._exit(0)
    os.close(answer)
    os.close(printed)
    try:
        return _followed(child, answers, prints, seconds)
    finally:
        os.close(answers)
        os.close(prints)


def _followed(child: int, answers: int, prints: int, seconds: float) -> Ended:
    """Return the outcome of a child: its answer, or how it failed."""
    read, open_ends, num_printed, clock = b"", {answers, prints}, 0, OwnTime(child)
    while open_ends:
        ready, _, _ = select.select(list(open_ends), [], [], POLL_SECONDS)
        floods = num_printed > FLOOD_BYTES
        if floods or clock.seconds() > seconds:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            if floods:
                return "flood", "", f"flood: more than {FLOOD_BYTES} bytes printed in one run"
            return "hang", "", "hang: a run that takes milliseconds did not end"
        for end in ready:
            data = os.read(end, 1 << 16)
            if not data:
                open_ends.discard(end)
            elif end == answers:
                read += data
            else:
                num_printed += len(data)
    _, status = os.waitpid(child, 0)
    if not read:
        code = os.waitstatus_to_exitcode(status)
        return "died", f"exit {code}", f"died: the process of the engine ended with {code}"
    name, where, text = json.loads(read)
    return name, where, text
