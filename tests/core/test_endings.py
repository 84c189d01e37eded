# SPDX-License-Identifier: Apache-2.0
"""The exit of every command if its output is full or it is interrupted, and files with a BOM."""

from __future__ import annotations

import codecs
import json
import os
import signal
import subprocess
import sys
from functools import cache
from importlib import metadata
from pathlib import Path

import pytest

from kvcore.cli.main import GROUP
from kvcore.cli.pipes import CANNOT_WRITE, INTERRUPTED, ends_cleanly, holding_interrupts
from kvcore.replay.request_trace import TraceReader
from kvcore.sizing import read_model

ROOT = Path(__file__).parents[2]
LLAMA_8B = ROOT / "examples" / "configs" / "llama-3-8b.json"
MADE = ("trace", "generate", "--kind", "turns", "--requests", "2")
COMMANDS = [
    ("size", str(LLAMA_8B), "--memory", "80GiB"),
    MADE,
    ("trace", "show", "-"),
    ("replay", "-", "--blocks", "512"),
    ("check", "--list"),
    ("check", "--blocks", "2", "--requests", "1", "--tokens", "2"),
    ("simulate", "--runs", "1", "--steps", "5"),
]
UNBUFFERED = "PYTHONUNBUFFERED"
HELP = [(), ("--help",), ("--version",)] + [
    (name, "--help")
    for name in sorted({point.name for point in metadata.entry_points(group=GROUP)})
]
FULL = pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no device that is full")


@cache
def requests() -> bytes:
    """Return a trace of requests, for the commands that read one."""
    made = subprocess.run([sys.executable, "-m", "kvcore", *MADE], capture_output=True, cwd=ROOT)
    return made.stdout


def start(*words: str, out: str, unbuffered: bool = False) -> str:
    """Return what a command that writes to a file prints on standard error; it fails with 2.

    unbuffered: each print writes to the file at once.
    """
    environment = {name: value for name, value in os.environ.items() if name != UNBUFFERED}
    environment |= {UNBUFFERED: "1"} if unbuffered else {}
    with Path(out).open("w") as file:
        done = subprocess.run(
            [sys.executable, "-m", "kvcore", *words],
            input=requests(),
            stdout=file,
            stderr=subprocess.PIPE,
            cwd=ROOT,
            env=environment,
            check=False,
        )
    assert done.returncode == CANNOT_WRITE
    return done.stderr.decode()


@FULL
@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_an_output_that_is_full_is_one_sentence(words: tuple[str, ...]) -> None:
    assert start(*words, out="/dev/full") == "kvcore: the output: No space left on device\n"


@FULL
@pytest.mark.parametrize("words", HELP, ids=" ".join)
def test_a_help_that_cannot_be_written_is_an_error_at_the_first_print(
    words: tuple[str, ...],
) -> None:
    # argparse ignores an error of its own prints, and nothing is left to flush.
    printed = start(*words, out="/dev/full", unbuffered=True)
    assert printed == "kvcore: the output: No space left on device\n"


def test_an_interrupt_that_nothing_reports_is_one_word(capsys: pytest.CaptureFixture[str]) -> None:
    @ends_cleanly
    def stopped() -> int:
        print("half")
        raise KeyboardInterrupt

    assert stopped() == INTERRUPTED
    assert capsys.readouterr() == ("half\n", "kvcore: interrupted\n")


def test_a_file_that_cannot_be_written_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    @ends_cleanly
    def write() -> int:
        tmp_path.write_text("")
        return 0

    assert write() == CANNOT_WRITE
    assert capsys.readouterr().err == f"kvcore: {tmp_path}: Is a directory\n"


def test_an_interrupt_waits_until_a_command_is_loaded() -> None:
    done = []
    before = signal.getsignal(signal.SIGINT)

    def load() -> None:
        with holding_interrupts():
            signal.raise_signal(signal.SIGINT)
            done.append("loaded")

    with pytest.raises(KeyboardInterrupt):
        load()
    assert done == ["loaded"]
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.parametrize("words", [*COMMANDS[:1], *COMMANDS[-2:]], ids=" ".join)
def test_an_interrupt_at_any_moment_is_one_line(words: tuple[str, ...], tmp_path: Path) -> None:
    program = """if True:
        import os, signal, sys
        from pathlib import Path
        from kvcore_command import main
        folder, calls, begun = Path(sys.argv.pop(1)), 0, False
        moments = {1, 1_000, 100_000, 220_000, 250_000, 280_000, 400_000}
        def place(file):
            try:
                return os.lseek(file, 0, os.SEEK_CUR)
            except OSError:  # not open, or a pipe
                return None
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a job behind a shell ignores it
        def count(frame, *_):
            global calls, begun
            if frame.f_code.co_name == "cb":  # of a weak reference: Python ignores its errors
                return
            begun = begun or signal.getsignal(signal.SIGINT) is not signal.default_int_handler
            calls += begun
            if begun and calls in moments:
                sys.setprofile(None)
                places = {file: place(file) for file in range(3, 20)}
                if child := os.fork():
                    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
                    for file, before in places.items():  # which the child has moved, too
                        before is None or os.lseek(file, before, os.SEEK_SET)
                    (folder / f"{calls}.code").write_text(str(code))
                    sys.setprofile(count)
                    return
                os.dup2(os.open(folder / f"{calls}.err", os.O_WRONLY | os.O_CREAT), 2)
                os.kill(os.getpid(), signal.SIGINT)
        sys.setprofile(count)
        sys.exit(main())"""
    command = [sys.executable, "-c", program, str(tmp_path), *words]
    subprocess.run(command, capture_output=True, cwd=ROOT, check=True)
    codes = [int(each.read_text()) for each in tmp_path.glob("*.code")]
    assert INTERRUPTED in codes
    assert set(codes) <= {0, INTERRUPTED, -signal.SIGINT}
    for printed in tmp_path.glob("*.err"):
        assert printed.read_bytes() in (b"", b"kvcore: interrupted\n")


def test_an_interrupt_that_the_shell_ignores_stays_ignored() -> None:
    program = """if True:
        import signal, sys
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        import kvcore.cli.main
        kvcore.cli.main.main = lambda: signal.raise_signal(signal.SIGINT) or 7
        from kvcore_command import main
        sys.exit(main())"""
    assert subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=False).returncode == 7


def test_a_byte_order_mark_is_no_part_of_a_file(tmp_path: Path) -> None:
    config, trace = tmp_path / "config.json", tmp_path / "trace.jsonl"
    config.write_bytes(codecs.BOM_UTF8 + LLAMA_8B.read_bytes())
    assert read_model(config).layers == read_model(LLAMA_8B).layers
    row = {"timestamp": 0, "input_length": 3, "output_length": 1, "hash_ids": [1]}
    lines = json.dumps(row).encode() + b"\n"
    for start_of_file in (b"", codecs.BOM_UTF8, codecs.BOM_UTF8 + b"\n"):
        trace.write_bytes(start_of_file + lines)
        assert [each.prompt_len for each in TraceReader(str(trace))] == [3]
