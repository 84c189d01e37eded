# SPDX-License-Identifier: Apache-2.0
"""The record of a hunt in many parts: a line of JSON per part, and what they add up to."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import attrs

from kvcore.sanitizer.hunter.hunt import Tally


def parts(record: Path | None) -> list[dict[str, Any]]:
    """Read the parts of a record; none if there is no file yet."""
    if record is None or not record.exists():
        return []
    found = []
    for number, line in enumerate(record.read_text().splitlines(), 1):
        try:
            part = json.loads(line)
            found.append({**part, "seed": int(part["seed"])})
        except (ValueError, TypeError, KeyError) as error:
            text = f"{record}, line {number}: not a hunt of kvcore sanitize"
            raise ValueError(text) from error
    return found


def next_seed(record: Path | None) -> int:
    """Return the seed of the next part."""
    return 1 + max((each["seed"] for each in parts(record)), default=0)


def totals(record: Path | None) -> list[dict[str, Any]]:
    """Add up the parts of a record, for each version of an engine in it."""
    tallies: dict[str, Tally] = {}
    seeds: dict[str, list[int]] = {}
    for part in parts(record):
        counts = {each.name: part[each.name] for each in attrs.fields(Tally)}
        tallies.setdefault(part["engine"], Tally()).merge(counts)
        seeds.setdefault(part["engine"], []).append(part["seed"])
    return [
        {
            "engine": engine,
            "seeds": seeds[engine],
            **attrs.asdict(tally),
            "missing": tally.missing(),
        }
        for engine, tally in tallies.items()
    ]


def sentence(total: dict[str, Any]) -> str:
    """Say in a line what the parts of a record add up to."""
    minutes, seconds = divmod(round(total["seconds"]), 60)
    hours, minutes = divmod(minutes, 60)
    found = ", ".join(f"{name} {number}" for name, number in sorted(total["found"].items()))
    return (
        f"{total['engine']} in all: {hours} h {minutes} min {seconds} s of CPU, "
        f"{total['runs']} runs, {total['steps']} steps checked, "
        f"seeds {', '.join(map(str, total['seeds']))}; "
        f"findings: {found or 'none'}; not reached: {', '.join(total['missing']) or 'none'}"
    )
