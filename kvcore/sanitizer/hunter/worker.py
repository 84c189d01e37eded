# SPDX-License-Identifier: Apache-2.0
"""The engine's process: hunts, and writes each event as a line of JSON.

`kvcore sanitize` runs it in the interpreter of the engine's environment, with one argument: the job
as JSON. The engine's prints go to the output, events to a descriptor of their own.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import traceback
from typing import Any

import attrs

from kvcore.sanitizer.errors import UnsupportedEngine
from kvcore.sanitizer.hunter.adapter import NotInstalled, is_peer, load, unusable
from kvcore.sanitizer.hunter.hunt import Hunt, Tally, warm_up
from kvcore.sanitizer.hunter.isolated import outcome_of
from kvcore.sanitizer.hunter.run import run
from kvcore.sanitizer.hunter.shrink import shrink, signature
from kvcore.sanitizer.hunter.world import HuntWorld, world_from_json

MEMORY_BYTES = 48 << 30
"""Limit of the address space: tensor libraries map far more than they use."""
FILE_BYTES = 64 << 20
CUT_SECONDS = 40.0


def main(job: dict[str, Any]) -> int:
    """Do a job: a hunt, one world again, or the shrinking of a world in separate processes."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (FILE_BYTES, FILE_BYTES))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    events = os.fdopen(job["events"], "w", buffering=1)

    def send(event: dict[str, Any]) -> None:
        events.write(json.dumps(event) + "\n")

    try:
        adapter = load(job["engine"])
    except (NotInstalled, UnsupportedEngine, ValueError) as error:
        send({"event": "unsupported", "text": str(error)})
        return 2
    except Exception as error:
        text = traceback.format_exc(limit=-3)
        if is_peer(job["engine"]):
            text = unusable(job["engine"], f"{type(error).__name__}: {error}")
        send({"event": "unsupported", "text": text})
        return 2
    if unknown := sorted(job.get("fixed", {}).keys() - adapter.AXES.keys()):
        known = ", ".join(adapter.AXES)
        text = f"--axis {unknown[0]}: {adapter.NAME} has no such option, but {known}"
        send({"event": "unsupported", "text": text})
        return 2
    send({"event": "start", "engine": adapter.NAME, "version": adapter.version()})
    if job["do"] == "hunt":
        _hunt(adapter, job, send)
    elif job["do"] == "again":
        world = world_from_json(job["world"])
        warm_up(adapter, world)
        send({"event": "warm"})
        outcome = run(adapter, world, full=True, muted=job["muted"])
        if (found := outcome.found) is not None:
            send(_event(adapter, world, found.name, found.where, found.text))
        tally = Tally()
        tally.add(world, outcome)
        send({"event": "tally", **attrs.asdict(tally)})
    else:
        _cut_down(adapter, job, send)
    return 0


def _hunt(adapter: Any, job: dict[str, Any], send: Any) -> None:
    unfinished = os.open(job["unfinished"], os.O_RDWR | os.O_CREAT)

    def before(world: HuntWorld) -> None:
        text = f"{hunt.tally.runs}\n{json.dumps(world.to_json())}\n"
        os.pwrite(unfinished, text.encode(), 0)

    hunt = Hunt(adapter, job["seed"], fixed=job["fixed"], only=job["only"], before=before)
    for event in hunt.events(job["seconds"], job["runs"]):
        send(event)


def _cut_down(adapter: Any, job: dict[str, Any], send: Any) -> None:
    """Shrink a world whose process died, in one process per candidate."""
    world = world_from_json(job["world"])
    warm_up(adapter, world)
    send({"event": "warm"})
    name, where, text = outcome_of(adapter, world)
    if name is None:
        text = f"{job['name']}: {job['text']} (not again when the world ran by itself)"
        send(_event(adapter, world, "harness", "", text))
        return

    def same(candidate: HuntWorld) -> bool:
        send({"event": "alive"})
        return outcome_of(adapter, candidate)[:2] == (name, where)

    small = shrink(world, same, adapter.AXES, CUT_SECONDS)
    send(_event(adapter, small, name, where, text))


def _event(adapter: Any, world: HuntWorld, name: str, where: str, text: str) -> dict[str, Any]:
    return {
        "event": "found",
        "name": name,
        "where": where,
        "needs": list(signature(world, adapter.AXES)),
        "text": text,
        "world": world.to_json(),
        "muted": [],
        "engine": adapter.NAME,
    }


if __name__ == "__main__":
    sys.exit(main(json.loads(sys.argv[1])))
