# SPDX-License-Identifier: Apache-2.0
"""The command `kvcore sanitize`: hunts for bugs in the scheduler and cache manager of an engine.

Exit code 0: nothing was found; 1: a finding; 2: the engine is missing, or has a version that was
not tested; 3: the harness itself failed; 130: interrupted before anything was found.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import time
from collections.abc import Mapping
from contextlib import closing, suppress
from pathlib import Path
from types import FrameType
from typing import Any, cast

import attrs

from kvcore.cli.arguments import CommandParser, count, natural, parse, positive
from kvcore.cli.pipes import INTERRUPTED, ends_cleanly
from kvcore.sanitizer.hunter import record
from kvcore.sanitizer.hunter.adapter import KNOWN, NotInstalled
from kvcore.sanitizer.hunter.hunt import SKIPPED_SHARE_MAX, Tally
from kvcore.sanitizer.hunter.report import write
from kvcore.sanitizer.hunter.session import Event, events
from kvcore.sanitizer.hunter.world import world_from_json

CLEAN, FOUND, UNSUPPORTED, HARNESS = range(4)


@ends_cleanly
def main(arguments: list[str] | None = None) -> int:
    """Run the command and return its exit code."""
    options = parse(_parser(), arguments)
    before = signal.signal(signal.SIGTERM, _terminated)
    try:
        if options.sum:
            return _sum_up(options)
        job = _job(options)
        _make_room(options)
        return _Session(options).follow(job)
    except (NotInstalled, ValueError) as error:
        print(f"kvcore sanitize: {error}", file=sys.stderr)
        return UNSUPPORTED
    except OSError as error:
        print(f"kvcore sanitize: {error.filename}: {error.strerror}", file=sys.stderr)
        return UNSUPPORTED
    finally:
        signal.signal(signal.SIGTERM, before)


def _terminated(number: int, frame: FrameType | None) -> None:
    """Exit normally, so that the engine's process ends and its folder is removed."""
    del frame
    raise SystemExit(128 + number)


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="kvcore sanitize",
        description="Drive an engine's own scheduler with a fake model and check what it reads.",
        epilog="Exit code: 0 nothing was found, 1 a finding, 2 the engine is missing or has an "
        "untested version, 3 the adapter is wrong, 130 interrupted before a finding.",
    )
    known = ", ".join(KNOWN)
    parser.add_argument("engine", help=f"{known}, or your own module:Adapter")
    most = parser.add_mutually_exclusive_group()
    most.add_argument("--seconds", type=positive, default=60.0, help="CPU seconds (60)")
    most.add_argument("--runs", type=count, help="runs, whatever time they take")
    parser.add_argument(
        "--seed", type=natural, help="seed of the worlds (1, or the next one after --record)"
    )
    parser.add_argument("--axis", action="append", default=[], metavar="NAME=VALUE",
                        help="fix an option of the engine")  # fmt: skip
    parser.add_argument("--only", metavar="FINDING", help="look only for findings with this name")
    parser.add_argument(
        "--write", type=Path, metavar="DIR", help="write tests and reports to this folder"
    )
    parser.add_argument("--record", type=Path, metavar="FILE",
                        help="append seed and coverage; the next hunt continues")  # fmt: skip
    parser.add_argument("--sum", action="store_true",
                        help="only sum up the hunts of --record")  # fmt: skip
    parser.add_argument("--replay", type=Path, metavar="FILE",
                        help="only run the world of a finding again")  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print one JSON object at the end")
    return parser


def _job(options: argparse.Namespace) -> dict[str, Any]:
    job: dict[str, Any] = {"do": "hunt", "engine": options.engine, "seconds": options.seconds}
    if options.replay is not None:
        found = _finding(options.replay)
        world = found.get("world", found)
        return {**job, "do": "again", "world": world, "muted": found.get("muted", [])}
    return {
        **job,
        "runs": options.runs,
        "seed": record.next_seed(options.record) if options.seed is None else options.seed,
        "only": options.only,
        "fixed": _fixed(options.axis),
    }


def _finding(path: Path) -> Event:
    """Read a finding, or its world."""
    try:
        found = json.loads(path.read_text())
        world_from_json(found.get("world", found))
    except (ValueError, TypeError, LookupError, AttributeError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise ValueError(f"{path} is no finding of kvcore sanitize ({reason})") from error
    return cast(Event, found)


def _make_room(options: argparse.Namespace) -> None:
    """Fail before the hunt if its findings or its record could not be written after it."""
    if options.write is not None:
        options.write.mkdir(parents=True, exist_ok=True)
    if options.record is not None:
        options.record.open("a").close()


def _fixed(texts: list[str]) -> dict[str, Any]:
    """Read the fixed options; a value is JSON, or else text."""
    fixed = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not name or not equals:
            raise ValueError(f"--axis takes NAME=VALUE, not {text!r}")
        try:
            fixed[name] = json.loads(value)
        except ValueError:
            fixed[name] = value
    return fixed


def _sum_up(options: argparse.Namespace) -> int:
    """Print what the hunts of a record add up to."""
    totals = record.totals(options.record)
    if not totals:
        raise ValueError("--sum needs a file of --record")
    if options.json:
        print(json.dumps({"in_all": totals}, indent=1))
    else:
        print(*map(record.sentence, totals), sep="\n")
    return CLEAN


class _Session:
    """One call of the command: prints and sums up."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.found: dict[tuple[Any, ...], Event] = {}
        self.tally, self.now = Tally(), Tally()
        self.unsupported = ""
        self.engine: Event = {}
        self.shown = 0.0

    def follow(self, job: Mapping[str, Any]) -> int:
        """Follow a job to its end, report the result, and return the exit code."""
        self._print(f"{job['engine']}: seed {job['seed']}" if "seed" in job else "one world again")
        stopped: BaseException | None = None
        handlers = {
            "start": self._on_start,
            "unsupported": self._on_unsupported,
            "tally": self._on_tally,
            "found": self._on_found,
        }
        try:
            with closing(events(job)) as found_events:
                for event in found_events:
                    handlers.get(event["event"], lambda _: None)(event)
        except (KeyboardInterrupt, SystemExit) as stop:
            stopped = stop
        self.tally.merge(attrs.asdict(self.now))
        if self.unsupported:
            print(f"kvcore sanitize: {self.unsupported}", file=sys.stderr)
            if not self.tally.runs:
                return UNSUPPORTED
        self._end(job, stopped is not None or self.unsupported != "")
        if isinstance(stopped, SystemExit):
            raise stopped
        if job["do"] == "again" and self.tally.skipped:
            self._print(f"{job['engine']} refuses the options of this world")
        names = {event["name"] for event in self.found.values()}
        if "harness" in names or self._skips_too_much():
            return HARNESS
        return FOUND if names else INTERRUPTED if stopped else CLEAN

    def _on_start(self, event: Event) -> None:
        self.engine = event
        self.tally.merge(attrs.asdict(self.now))
        self.now = Tally()

    def _on_unsupported(self, event: Event) -> None:
        self.unsupported = event["text"]

    def _on_tally(self, event: Event) -> None:
        self.now = Tally()
        self.now.merge({name: value for name, value in event.items() if name != "event"})
        if time.monotonic() > self.shown + 10:
            self.shown = time.monotonic()
            found = ", ".join(sorted({each["name"] for each in self.found.values()})) or "nothing"
            self._print(
                f"{self.now.seconds:.0f} CPU s, {self.now.runs} runs, {self.now.steps} steps, "
                f"found: {found}"
            )

    def _on_found(self, event: Event) -> None:
        key = (event["name"], event["where"], *event["needs"])
        is_new = key not in self.found
        if is_new and any(_is_part(event, known) for known in self.found.values()):
            return
        for part in [known for known, each in self.found.items() if _is_part(each, event)]:
            del self.found[part]
        self.found[key] = event
        if is_new and not self.options.json:
            moves = len(event["world"]["moves"])
            where = f" {event['where']}" if event["where"] else ""
            self._print(f"found {event['name']}{where} {' '.join(event['needs'])}: {moves} moves")
            print(event["text"].strip(), flush=True)

    def _skips_too_much(self) -> bool:
        return self.tally.skipped > SKIPPED_SHARE_MAX * max(1, self.tally.runs)

    def _end(self, job: Mapping[str, Any], interrupted: bool) -> None:
        brief = {_brief(event): event for event in self.found.values()}
        if self.options.write is not None:
            written = _written(self.options.write)
            for text, event in brief.items():
                # An error of the adapter is no report for the engine's project.
                if event["name"] == "harness" or (event["engine"], text) in written:
                    continue
                for path in write(event, _adapter(self.options.engine), self.options.write):
                    self._print(f"wrote {path}")
        summary: Event = {
            "engine": self.engine.get("engine", job["engine"]),
            "seed": job.get("seed"),
            "interrupted": interrupted,
            **attrs.asdict(self.tally),
            "missing": self.tally.missing(),
        }
        if self.options.record is not None and "seed" in job:
            with self.options.record.open("a") as file:
                file.write(json.dumps({**summary, "findings": list(brief)}) + "\n")
            summary["in_all"] = record.totals(self.options.record)
        if self.options.json:
            print(json.dumps({**summary, "findings": list(self.found.values())}, indent=1))
        elif job["do"] == "hunt":
            self._tell_coverage()
            for total in summary.get("in_all", ()):
                print(record.sentence(total))

    def _tell_coverage(self) -> None:
        tally = self.tally
        print(f"{tally.runs} runs, {tally.steps} steps checked, {tally.skipped} worlds refused")
        for title, counts in (
            ("reached", tally.reached), ("moves", tally.moves),
            ("options", tally.values), ("findings", tally.found),
        ):  # fmt: skip
            texts = ", ".join(f"{name} {number}" for name, number in sorted(counts.items()))
            print(f"{title}: {texts or 'none'}")
        print(f"not reached: {', '.join(tally.missing()) or 'none'}")

    def _print(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)


def _brief(event: Event) -> str:
    return f"{event['name']} {event['where']} {' '.join(event['needs'])}"


def _written(folder: Path) -> set[tuple[str, str]]:
    """Return the engine and in short the finding of each report in a folder."""
    found = set()
    for path in folder.glob("*.json"):
        with suppress(ValueError, TypeError, KeyError):  # of files that are no reports
            event = json.loads(path.read_text())
            found.add((event["engine"], _brief(event)))
    return found


def _is_part(event: Event, other: Event) -> bool:
    """Return whether a crash is one that another world shows in the same place with fewer needs."""
    same = event["name"] == other["name"] and event["where"] == other["where"] != ""
    return same and set(event["needs"]) > set(other["needs"])


def _adapter(engine: str) -> str:
    known = KNOWN.get(engine)
    return known.adapter if known else engine
