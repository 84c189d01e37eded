# SPDX-License-Identifier: Apache-2.0
"""Check that the twin's calls need no more instructions than expected, at two pool sizes.

Run: make counts. valgrind counts instructions, so neither the machine's load nor its clock matters.

`EXPECTED` has the instructions per unit of each call (a block, a token, a command) with xxh3 keys
in the small pool. A count may exceed it by `TOLERANCE`, to allow for another compiler or C library;
a count that is lower by more is reported, so that `EXPECTED` can be updated. The count in the large
pool may be at most `GROWTH` times that in the small one, and a token of requests with a state group
may need at most `WITH_STATES` times the instructions of one without.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys

TOLERANCE = 0.10
GROWTH = 1.02
WITH_STATES = 1.55
POOLS = (8_192, 131_072)
REQUESTS = 32
BLOCKS = 64 * REQUESTS
APPENDED = 32 * REQUESTS
APPENDED_256 = 32 * 256
# Call: (units of one measured call, instructions of each).
EXPECTED = {
    "add": (BLOCKS, 209),
    "look_up": (REQUESTS, 1128),
    "allocate": (BLOCKS, 385),
    "append": (APPENDED, 249),  # each step takes its batch
    "append_ahead": (APPENDED, 268),  # the same, with a position to come
    "append_256": (APPENDED_256, 234),  # of 256 requests
    "append_states": (APPENDED_256, 363),  # the same, with a state group
    "take_batch": (BLOCKS, 34),
    "fork": (BLOCKS, 112),
    "free": (BLOCKS, 26),
    "advance": (REQUESTS, 93),  # of the epoch
}
COLLECTED = re.compile(r"Collected : (\d+)")


def build() -> str:
    """Compile the bench and return its path."""
    command = ["cargo", "build", "--locked", "--release", "--bench", "counts"]
    done = subprocess.run(
        [*command, "--message-format=json"], check=True, stdout=subprocess.PIPE, text=True
    )
    for line in done.stdout.splitlines():
        made = json.loads(line)
        if made.get("target", {}).get("name") == "counts" and made.get("executable"):
            return str(made["executable"])
    raise SystemExit("counts: cargo built no bench of this name")


def count(program: str, call: str, num_blocks: int) -> int:
    """Return the number of instructions of one measured call."""
    valgrind = ["valgrind", "--tool=callgrind", "--callgrind-out-file=/dev/null"]
    toggle = "--toggle-collect=counts::measured*"
    command = [*valgrind, toggle, program, call, str(num_blocks)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    found = COLLECTED.search(done.stderr)
    if found is None or int(found[1]) == 0:
        raise SystemExit(f"counts: valgrind saw no call of `measured`:\n{done.stderr}")
    return int(found[1])


def problem_of(call: str, counts: tuple[float, float]) -> str | None:
    """Return the complaint about a call's instructions per unit in both pools, or None."""
    small, large = counts
    expected = EXPECTED[call][1]
    if small > (1 + TOLERANCE) * expected:
        return f"{small:.0f} instructions, {expected} were expected"
    if large > GROWTH * small:
        return f"grows with the pool, from {small:.1f} to {large:.1f} instructions"
    return None


def main() -> None:
    """Count, print and check every call."""
    if shutil.which("valgrind") is None:
        print("counts: skipped, since valgrind is not installed (apt-get install valgrind)")
        return
    program = build()
    wrong, found = [], {}
    for call, (units, expected) in EXPECTED.items():
        small, large = (count(program, call, pool) / units for pool in POOLS)
        fell = ": fewer, write it down" if small < (1 - TOLERANCE) * expected else ""
        print(f"{call:<12} {small:>8.1f} {large:>8.1f} instructions, expected {expected}{fell}")
        problem = problem_of(call, (small, large))
        wrong += [] if problem is None else [f"{call}: {problem}"]
        found[call] = small
    ratio = found["append_states"] / found["append_256"]
    print(f"states: {ratio:.2f} times the instructions of an append, at most {WITH_STATES}")
    if ratio > WITH_STATES:
        wrong.append(f"append_states: {ratio:.2f} times append_256, at most {WITH_STATES}")
    if wrong:
        sys.exit("counts: " + "; ".join(wrong))
    print(f"counts: none more than {TOLERANCE:.0%} above, and none grows with the pool")


if __name__ == "__main__":
    main()
