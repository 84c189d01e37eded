# SPDX-License-Identifier: Apache-2.0
"""Damaged text traces, compared in both languages: `python -m tests.bytes.agree [--inputs N]`.

Python writes each text with its outcome, the refused line or a digest of all outcomes, and the
twin's test `both_languages_tell_a_trace_alike` reads them. The file connects the two because the
twin's traces are in no wheel.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from random import Random

import xxhash

from kvcore.trace.trace_file import outcomes, parse_trace
from kvcore.types.errors import TraceError
from tests.bytes.run import count
from tests.bytes.texts import TEXT_DOORS

TRACES = 50_000
PIECE = 500
ROOT = Path(__file__).parents[2]
TEST = ("cargo", "test", "--locked", "--profile", "fuzz", "--lib", "both_languages_tell")


def reported(text: str) -> str:
    """Return the outcome of a text that is read as a trace."""
    try:
        calls = outcomes(parse_trace(text, source="fuzz"), "python")
    except TraceError as error:
        return f"line {error.fields['line']}"
    joined = "\n\n".join("\n".join(lines) for lines in calls)
    return xxhash.xxh3_128_hexdigest(joined.encode())


def write(seed: int) -> str:
    """Return the lines of some texts."""
    random, make = Random(seed), TEXT_DOORS[0].make().make
    texts = [make(random).decode(errors="replace") for _ in range(PIECE)]
    return "".join(f"{text.encode().hex()} {reported(text)}\n" for text in texts)


def main() -> int:
    """Write the texts and run the twin's test on them; return its exit code."""
    parser = argparse.ArgumentParser(description="Damaged text traces, told by both languages.")
    parser.add_argument("--inputs", type=count, default=TRACES, help=f"traces ({TRACES:,})")
    inputs = parser.parse_args().inputs
    with tempfile.NamedTemporaryFile("w", encoding="ascii") as file:
        with ProcessPoolExecutor() as pool:
            file.writelines(pool.map(write, range(-(-inputs // PIECE))))
        file.flush()
        done = subprocess.run(TEST, env=os.environ | {"KVCORE_TRACES": file.name}, cwd=ROOT)
    print(f"agree     {inputs:>9,} traces in both languages", flush=True)
    return done.returncode


if __name__ == "__main__":
    sys.exit(main())
