# SPDX-License-Identifier: Apache-2.0
"""Writes a finding as files for others: a test for pytest, and a report in Markdown.

The test of a crash, a hang or a leak needs only the engine: it includes the adapter's own lines.
The test of a finding about contents also needs the sanitizer, since only it can see them.
"""

from __future__ import annotations

import importlib
import json
import re
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from kvcore.sanitizer.hunter.engine_source import engine_source
from kvcore.sanitizer.hunter.run import MUTABLE
from kvcore.sanitizer.hunter.world import Arrive, HuntWorld, Move, playable, world_from_json

HEADERS = {
    "crash": "A legal run of the engine must not raise",
    "hang": "A run of the engine must end",
    "died": "A legal run must not end the engine's process",
    "flood": "A legal run must not flood the output",
    "stuck": "Requests that fit must be finished",
    "leak": "When all requests have left, every block can be used again",
    "stale-weights": "What a request reads must be written by weights no older than it",
    "cross-tenant": "What a request reads must be written in its own namespace",
    "empty-step": "A step must have tokens",
    "wrong-event": "What the engine says is removed must not be hit, for any tenant",
}
TOKEN = "1 + (place * place + 3 * place // 2 + 3 * sample) % 8"
"""`HuntWorld.token`, for a test without kvcore."""
READS = "What a query reads must be what was written for its prefix"


def invariant(name: str) -> str:
    """Name the rule that a finding breaks."""
    return HEADERS.get(name, READS)


def write(found: Mapping[str, Any], adapter: str, folder: Path) -> list[Path]:
    """Write a finding's test, report and world; return the paths. adapter: as `module:Class`.
    found: an event of a hunt.
    """
    folder.mkdir(parents=True, exist_ok=True)
    stem = "_".join([found["engine"].split()[0], found["name"], *found["needs"][:3]])
    stem = _free_stem(folder, re.sub(r"\W+", "_", stem.lower()).strip("_"))
    texts = {
        f"test_{stem}.py": test_of(found, adapter),
        f"{stem}.md": report_of(found, f"test_{stem}.py"),
        f"{stem}.json": json.dumps(dict(found), indent=1) + "\n",
    }
    for name, text in texts.items():
        (folder / name).write_text(text)
    return [folder / name for name in texts]


def test_of(found: Mapping[str, Any], adapter: str) -> str:
    """Return a test that fails as long as the engine has the bug."""
    world = world_from_json(found["world"])
    title = f'"""{invariant(found["name"])}.\n\n{found["engine"]}: {_first_line(found)}\n"""'
    if found["name"] in MUTABLE:
        return _with_sanitizer(found, world, title, adapter)
    module, _, name = adapter.partition(":")
    steps = _calls(playable(world, getattr(importlib.import_module(module), name).MOVES))
    if found["name"] in ("stuck", "leak"):
        first = ["total = engine.free()"] if found["name"] == "leak" else []
        steps = [*first, *steps, *_drain(found["name"])]
    else:
        steps += ["for _ in range(1000):", "    if list(engine.live):", "        engine.step()",
                  "engine.finish_batches()", "engine.step()"]  # fmt: skip
    return "\n".join(
        [
            title,
            engine_source(module),
            _world_source(world),
            "",
            "",
            f"def test_{_identifier(found)}() -> None:",
            "    engine = Engine(WORLD)",
            *(f"    {line}" for line in steps),
            "",
        ]
    )


def report_of(found: Mapping[str, Any], test: str) -> str:
    """Return the report: what was run, what was expected, what was seen."""
    world = world_from_json(found["world"])
    options = ", ".join(f"{name}={value}" for name, value in world.axes.items())
    per_step = f"{world.token_budget} tokens and {world.max_rows} requests per step"
    sizes = f"Sizes: {world.num_blocks} blocks, {per_step}."
    steps = [f"{number}. {_sentence(move)}" for number, move in enumerate(world.moves, 1)]
    return "\n".join(
        [
            f"# {found['engine']}: {_first_line(found)}",
            "",
            f"Engine: {found['engine']}; Python {sys.version.split()[0]}; no GPU is needed.",
            f"Options: {options}.",
            sizes,
            "",
            "## Steps",
            "",
            *steps,
            f"{len(steps) + 1}. The engine goes on until no request waits.",
            "",
            "## Expected",
            "",
            f"{invariant(found['name'])}.",
            "",
            "## Seen",
            "",
            "```",
            found["text"].strip(),
            "```",
            "",
            f"`pytest {test}` shows it again.",
            "",
        ]
    )


def _with_sanitizer(found: Mapping[str, Any], world: HuntWorld, title: str, adapter: str) -> str:
    data = json.dumps(world.to_json())
    module, _, name = adapter.partition(":")
    return "\n".join(
        [
            title,
            "import json",
            "",
            f"from {module} import {name}",
            "from kvcore.sanitizer.hunter.run import run",
            "from kvcore.sanitizer.hunter.world import world_from_json",
            "",
            f"WORLD = json.loads({data!r})",
            "",
            "",
            f"def test_{_identifier(found)}() -> None:",
            *(f"    # {number}. {_sentence(move)}" for number, move in enumerate(world.moves, 1)),
            f"    muted = {list(found['muted'])!r}",
            f"    found = run({name}, world_from_json(WORLD), muted=muted).found",
            "    assert found is None, found.text",
            "",
        ]
    )


def _world_source(world: HuntWorld) -> str:
    return "\n".join(
        [
            "WORLD = SimpleNamespace(",
            f"    axes={dict(world.axes)!r},",
            f"    block_size={world.block_size},",
            f"    num_blocks={world.num_blocks},",
            f"    token_budget={world.token_budget},",
            f"    max_rows={world.max_rows},",
            f"    token=lambda place, sample=0: {TOKEN},",
            ")",
        ]
    )


def _calls(moves: Iterable[Move]) -> list[str]:
    """Return the moves as plain calls."""
    lines = []
    for move in moves:
        if isinstance(move, Arrive):
            fields = (
                f"name={move.name!r}, prompt={list(move.prompt)!r}, new={move.new}, "
                f"priority={move.priority}, samples={move.samples}, tenant={move.tenant}"
            )
            lines.append(f"engine.arrive(SimpleNamespace({fields}))")
        elif isinstance(move, str):
            lines.append(f"engine.{move}()")
        else:
            lines += [f"if {move.name!r} in engine.live:", f"    engine.abort({move.name!r})"]
    return lines


def _drain(name: str) -> list[str]:
    lines = ["for _ in range(1000):", "    if list(engine.live):", "        engine.step()"]
    lines.append("assert not list(engine.live), f'{list(engine.live)} wait forever'")
    if name == "leak":
        lines += [
            "engine.finish_batches()",
            "engine.step()",
            "assert engine.free() == total",
        ]
    return lines


def _sentence(move: Move) -> str:
    if isinstance(move, Arrive):
        samples = f", {move.samples} samples" if move.samples > 1 else ""
        of_tenant = f", tenant {move.tenant}" if move.tenant else ""
        urgent = f", priority {move.priority}" if move.priority else ""
        return (
            f"{move.name} arrives: prompt {' '.join(map(str, move.prompt))}, "
            f"{move.new} new tokens{samples}{urgent}{of_tenant}."
        )
    if isinstance(move, str):
        words = {
            "step": "The engine makes one step.",
            "epoch": "The weights change.",
            "reset": "The prefix cache is reset.",
        }
        return words[move]
    return f"{move.name} is aborted."


def _first_line(found: Mapping[str, Any]) -> str:
    if found["name"] in ("crash", "hang"):
        return f"{found['name']}: {found['where']}"
    return str(found["text"].splitlines()[0])


def _identifier(found: Mapping[str, Any]) -> str:
    return re.sub(r"\W+", "_", found["name"]).lower()


def _free_stem(folder: Path, stem: str) -> str:
    number, name = 1, stem
    while (folder / f"{name}.json").exists():
        number += 1
        name = f"{stem}_{number}"
    return name
