# SPDX-License-Identifier: Apache-2.0
"""The process that watches a hunt: starts the engine's process, and outlives it.

If the engine dies, hangs or floods the output, that is a finding: its process is ended, the current
world is shrunk, and the hunt goes on with the next seed.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import tempfile
from collections.abc import Generator, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import kvcore
from kvcore.sanitizer.hunter.adapter import NotInstalled, is_peer, python_of, unusable
from kvcore.sanitizer.hunter.own_time import OwnTime

SILENT_SECONDS = 60.0
"""A run of this length counts as hanging, since normal runs take milliseconds (`OwnTime`)."""
START_SECONDS = 600.0
"""Most time for importing an engine (`OwnTime`)."""
FLOOD_BYTES = 16 << 20
"""Output between two events above this size is a flood."""
TAIL_BYTES = 4000
NEXT_SEED = 1_000_003

Event = dict[str, Any]


def events(job: Mapping[str, Any]) -> Generator[Event]:
    """Do a job in the engine's environment, restarting after each death of the process.

    Raises NotInstalled.
    """
    with tempfile.TemporaryDirectory(prefix="kvcore-sanitize-") as folder:
        job = {"unfinished": str(Path(folder) / "world"), **job}
        unit = "seconds" if job.get("runs") is None else "runs"
        left = job.get(unit, 0)
        while True:
            ended, used, started = None, 0.0, False
            for event in _one_process(job):
                started = started or event["event"] == "start"
                if event["event"] == "ended":
                    ended = event
                elif event["event"] == "tally":
                    used = max(used, event["seconds"])
                yield event
            if ended is None:
                return
            if job["do"] == "again":
                yield _lost(job, ended, job["world"]) if started else _no_start(job, ended)
                return
            num_runs, world = _unfinished(Path(job["unfinished"]))
            left -= num_runs if unit == "runs" else max(used, 1.0)
            lost = list(_death(job, ended, world)) if started else [_no_start(job, ended)]
            Path(job["unfinished"]).unlink(
                missing_ok=True
            )  # this world does not belong to the next process
            yield from lost
            if left <= 0 or any(event["event"] == "unsupported" for event in lost):
                return
            job = {**job, "seed": job["seed"] + NEXT_SEED, unit: left}


def _unfinished(path: Path) -> tuple[int, Any]:
    """Read the number of runs that a hunt began, and the world of the last, if there is one."""
    try:
        runs, world, *_ = path.read_text().split("\n")
        return int(runs) + 1, json.loads(world)
    except (OSError, ValueError):
        return 0, None


def _death(job: Mapping[str, Any], ended: Event, world: Any) -> Iterator[Event]:
    """Yield the finding of a process's death, shrunk if the world alone repeats it."""
    if world is None:
        yield _before_any_run(ended)
        return
    again = {**job, "do": "cut", "world": world, "name": ended["name"], "text": ended["text"]}
    found = False
    for event in _one_process(again):
        found = found or event["event"] == "found"
        if event["event"] in ("found", "unsupported"):
            yield event
    if not found:
        yield _lost(job, ended, world)


def _before_any_run(ended: Event) -> Event:
    return {"event": "unsupported", "text": f"{ended['name']} before any run: {ended['text']}"}


def _no_start(job: Mapping[str, Any], ended: Event) -> Event:
    """Return the event of a process that ended before it had imported the engine."""
    if not is_peer(job["engine"]):
        return _before_any_run(ended)
    *_, reason = ended["text"].strip().splitlines()
    return {"event": "unsupported", "text": unusable(job["engine"], reason)}


def _lost(job: Mapping[str, Any], ended: Event, world: Mapping[str, Any]) -> Event:
    """Return the finding of a process that died before it could report."""
    facts = {"where": "", "needs": [], "world": world, "muted": [], "engine": job["engine"]}
    return {"event": "found", "name": ended["name"], "text": ended["text"], **facts}


def _one_process(job: Mapping[str, Any]) -> Iterator[Event]:
    """Yield the events of one process; the last is `ended` unless the process exited normally."""
    command = [python_of(job["engine"]), "-m", "kvcore.sanitizer.hunter.worker"]
    reads, writes = os.pipe()
    prints, printed = os.pipe()
    try:
        child = subprocess.Popen(
            [*command, json.dumps({**job, "events": writes})],
            stdin=subprocess.DEVNULL,
            stdout=printed,
            stderr=printed,
            pass_fds=(writes,),
            env=_environment(),
            start_new_session=True,  # so that it ends with all its children
        )
    except OSError as error:
        os.close(reads)
        os.close(prints)
        raise NotInstalled(unusable(job["engine"], error.strerror or str(error))) from error
    finally:
        os.close(writes)
        os.close(printed)
    try:
        yield from _followed(child, reads, prints, Path(job["unfinished"]))
    finally:
        with suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()
        os.close(reads)
        os.close(prints)


def _environment() -> dict[str, str]:
    """Return the environment of this process, with kvcore's folder first."""
    folder = str(Path(kvcore.__file__).parents[1])
    paths = [folder, *filter(None, [os.environ.get("PYTHONPATH"), str(Path.cwd())])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "PYTHONHASHSEED": "0"}


def _followed(
    child: subprocess.Popen[bytes], reads: int, prints: int, unfinished: Path
) -> Iterator[Event]:
    buffer, tail, num_printed, clock, begun = b"", b"", 0, OwnTime(child.pid), 0
    open_ends, failed, patience = {reads, prints}, None, START_SECONDS
    while open_ends and failed is None:
        ready, _, _ = select.select(list(open_ends), [], [], 1.0)
        for end in ready:
            data = os.read(end, 1 << 16)
            if not data:
                open_ends.discard(end)
            elif end == prints:
                tail, num_printed = (tail + data)[-TAIL_BYTES:], num_printed + len(data)
            else:
                *lines, buffer = (buffer + data).split(b"\n")
                clock, num_printed = OwnTime(child.pid), 0
                for event in map(json.loads, lines):
                    if event["event"] != "start":  # it imports until it reports that it is warm
                        patience = SILENT_SECONDS
                    yield event
        if num_printed > FLOOD_BYTES:
            failed = "flood", f"flood: more than {FLOOD_BYTES} bytes printed"
        if not ready and unfinished.exists():
            before, begun = begun, unfinished.stat().st_mtime_ns  # of each world, before it runs
            clock = clock if begun == before else OwnTime(child.pid)
        if clock.seconds() > patience:
            what = "it did not start" if patience == START_SECONDS else "a run did not end"
            failed = "hang", f"hang: {what} in {patience:.0f} s of its own time"
    if failed is None and child.wait() not in (0, 2):
        failed = "died", f"died: the engine's process ended with {child.returncode}"
    if failed is not None:
        text = f"{failed[1]}\n{tail.decode(errors='replace')}"
        yield {"event": "ended", "name": failed[0], "text": text}
