# SPDX-License-Identifier: Apache-2.0
"""`kvcore shrink RECORD`: reduces a failing record to the shortest trace found that fails in the
same way.

Exit code 0: it was shrunk; 1: nothing in it fails; 2: bad arguments, or the record cannot be
shrunk.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from kvcore import _twin
from kvcore.check.simulate.as_trace import trace_text
from kvcore.check.simulate.runs import Failure
from kvcore.cli.arguments import CommandParser, natural, parse
from kvcore.invariants.pool_and_state import PROPERTIES
from kvcore.manager import KVCacheManager
from kvcore.record.recorder import Recorder
from kvcore.replay.records.attempt import CALL_SECONDS, LOOK_UP, Going
from kvcore.replay.records.guarded import in_child
from kvcore.replay.records.rerun import Backend
from kvcore.replay.records.shrink import SECONDS, Shrunk, shrink
from kvcore.trace.calls import Call
from kvcore.types.errors import KvcoreError
from kvcore.types.values import Hit

SHRUNK, NOTHING_FAILS, USAGE_ERROR = 0, 1, 2
FAILURES = ("difference", "exception", "hang", "crash", "refused:later", "refused:never")
ANYTHING = "no difference, exception, hang, crash or invariant"


def main(arguments: Sequence[str]) -> int:
    """Shrink a record; returns the exit code."""
    given = parse(_parser(), arguments)
    backends: list[Backend] = ["python", "rust"] if given.backend == "both" else [given.backend]
    try:
        recorder = None if given.out is None else Recorder(given.out)
        done = shrink(
            given.record,
            backends,
            given.keep,
            keep_if=given.keep_if,
            seconds=given.seconds,
            report_line=_report,
        )
        if done is not None and recorder is not None:
            write_record(done, recorder, backends[-1])
    except (KvcoreError, OSError) as error:
        print(f"kvcore shrink: {error}", file=sys.stderr)
        return USAGE_ERROR
    if done is None:
        print(f"nothing fails: {given.keep or given.keep_if or ANYTHING}")
        return NOTHING_FAILS
    by = given.keep_if and f"--keep-if {given.keep_if}"
    print(to_trace(done, f"kvcore shrink {by or f'--keep {done.broken.name}'}"), end="")
    return SHRUNK


def to_trace(done: Shrunk, command: str) -> str:
    """Return the run as a text trace, with the outcomes of the Python core."""
    failure = Failure(done.broken.name, done.broken.detail, done.config, (), None)
    following = (*done.calls[1:], None)
    calls = [
        _with_tokens(call)
        for call, after in zip(done.calls, following, strict=True)
        if call.name != LOOK_UP or after is None or not any(isinstance(a, Hit) for a in after.args)
    ]
    return trace_text(failure, done.config, calls, command)


def write_record(done: Shrunk, recorder: Recorder, backend: Backend) -> None:
    """Record the run on a backend, in a child process: a forked process leaves its parent's."""
    manager = KVCacheManager(done.config, backend)

    def work(going: Going) -> None:
        manager.start_recording(recorder)
        for place, call in enumerate(done.calls):
            going(place, CALL_SECONDS)
            try:
                getattr(manager, call.name)(*call.args, **call.options)
            except (KeyboardInterrupt, SystemExit):
                raise
            except BaseException:  # also a panic of the twin, which the record keeps as an outcome
                continue
        manager.stop_recording()

    in_child(work)


def _with_tokens(call: Call) -> Call:
    """Write an empty word for each unknown token of an `append`."""
    if call.name != "append" or len(call.args) > 1:
        return call
    return Call(call.name, (*call.args, [""] * len(call.args[0])), call.options)


def _report(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _failure(text: str) -> str:
    """Return the name of a failure."""
    if text not in (known := [*FAILURES, *PROPERTIES, "REFINE"]):
        raise argparse.ArgumentTypeError(f"{text!r} is no failure, but {', '.join(known)}")
    return text


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="kvcore shrink",
        description="Reduce a failing record to the shortest trace that still fails.",
    )
    parser.add_argument(
        "record", metavar="RECORD", help="a folder of a record, or one of its files"
    )
    backend = "both" if _twin.available() else "python"
    parser.add_argument(
        "--backend",
        choices=("rust", "python", "both"),
        default=backend,
        help="the cores that make the calls (%(default)s)",
    )
    kept = parser.add_mutually_exclusive_group()
    kept.add_argument(
        "--keep",
        type=_failure,
        metavar="NAME",
        help="the failure to keep: difference, exception, hang (a call that does not end), "
        "crash (one that ends the process), refused:later, refused:never, or an invariant's name; "
        "by default what fails first, but for refusals",
    )
    kept.add_argument(
        "--keep-if",
        metavar="COMMAND",
        help="a shell command that gets the folder of a shorter record, and exits with 0 "
        "if the failure is still there",
    )
    parser.add_argument(
        "--seconds", type=natural, default=SECONDS, help="stop after this time (%(default)g)"
    )
    parser.add_argument(
        "--out", type=Path, metavar="FOLDER", help="write the small record to this folder"
    )
    return parser
