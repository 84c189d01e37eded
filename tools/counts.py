# SPDX-License-Identifier: Apache-2.0
"""Check that the twin's calls need no more instructions than expected, at two pool sizes.

Run: make counts. valgrind counts instructions, so neither the machine's load nor its clock matters.

`EXPECTED` has the instructions per unit of each call (a block, a token, a command) with xxh3 keys
in the small pool. A count may exceed it by `TOLERANCE`, to allow for another compiler or C library;
a count that is lower by more is reported, so that `EXPECTED` can be updated. The count in the large
pool may be at most `GROWTH` times that in the small one. `RATIOS` has how many times the
instructions of a plain append a token may need that is appended in another way, both of one run.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys

TOLERANCE = 0.10
GROWTH = 1.02
POOLS = (8_192, 131_072)
REQUESTS = 32
BLOCKS = 64 * REQUESTS
APPENDED = 32 * REQUESTS
APPENDED_256 = 32 * 256
APPENDED_1024 = 32 * 1024
# Call: (units of one measured call, instructions of each).
EXPECTED = {
    "add": (BLOCKS, 200),
    "look_up": (REQUESTS, 1128),
    "evict": (BLOCKS, 319),  # an allocation in a pool whose blocks are all cached
    "allocate": (BLOCKS, 241),
    "append": (APPENDED, 222),  # each step takes its batch
    "append_ahead": (APPENDED, 244),  # the same, with a position to come that the token fills
    "append_256": (APPENDED_256, 205),  # of 256 requests
    "append_1024": (APPENDED_1024, 218),
    "append_ahead_256": (APPENDED_256, 225),
    "append_ahead_1024": (APPENDED_1024, 224),
    "append_to_come_256": (APPENDED_256, 194),  # without tokens, which come before the next step
    "append_to_come_1024": (APPENDED_1024, 207),
    "append_grown_256": (APPENDED_256, 213),  # and reads which places of tables were set
    "append_grown_1024": (APPENDED_1024, 225),
    "append_states_256": (APPENDED_256, 265),  # with a state group
    "take_batch": (BLOCKS, 34),
    "fork": (BLOCKS, 103),
    "free_alone": (BLOCKS, 49),
    "free": (BLOCKS, 33),  # of blocks that forks of the requests hold, too
    "advance": (REQUESTS, 93),  # of the epoch
}
# Call: (the call that it is compared with, at most how many times its instructions).
RATIOS = {
    "append_ahead_256": ("append_256", 1.10),
    "append_ahead_1024": ("append_1024", 1.10),
    "append_to_come_256": ("append_256", 1.10),
    "append_to_come_1024": ("append_1024", 1.10),
    "append_grown_256": ("append_256", 1.05),
    "append_grown_1024": ("append_1024", 1.05),
    "append_states_256": ("append_256", 1.30),
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


def ratio_problems(found: dict[str, float]) -> list[str]:
    """Print the ratios, and return the complaints about them. found: the counts per unit."""
    wrong = []
    for call, (base, most) in RATIOS.items():
        ratio = found[call] / found[base]
        print(f"{call:<20} {ratio:.3f} times the instructions of {base}, at most {most}")
        if ratio > most:
            wrong.append(f"{call}: {ratio:.3f} times {base}, at most {most}")
    return wrong


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
        print(f"{call:<20} {small:>8.1f} {large:>8.1f} instructions, expected {expected}{fell}")
        problem = problem_of(call, (small, large))
        wrong += [] if problem is None else [f"{call}: {problem}"]
        found[call] = small
    wrong += ratio_problems(found)
    if wrong:
        sys.exit("counts: " + "; ".join(wrong))
    print(f"counts: none more than {TOLERANCE:.0%} above, and none grows with the pool")


if __name__ == "__main__":
    main()
