# SPDX-License-Identifier: Apache-2.0
"""The table of the named worlds: states, edges and seconds, on both backends.

Rules: a world whose counts are not the pinned ones, or that breaks a property, ends it with code 1.
Seconds are of this machine, as it is.
"""

from __future__ import annotations

import os
import sys

from kvcore import _twin
from kvcore.check import Report, check
from kvcore.check.profiles import PROFILES, Profile


def main() -> int:
    """Explore all named worlds, or those named; returns the exit code."""
    chosen = sys.argv[1:] or list(PROFILES)
    print(f"{'world':<21} {'states':>9} {'edges':>10} {'depth':>5} {'Python':>8} {'Rust':>8}")
    wrong = 0
    for name in chosen:
        profile = PROFILES[name]
        workers = os.cpu_count() or 1
        report = check(profile.world, workers=workers)
        seconds = [f"{report.seconds:.1f} s"]
        if _twin.available():
            twin = check(profile.world, backend="rust", workers=workers)
            seconds.append(f"{twin.seconds:.2f} s")
            wrong += is_wrong(name, profile, twin)
        wrong += is_wrong(name, profile, report)
        row = f"{name:<21} {report.num_states:>9,} {report.num_edges:>10,} {report.depth:>5}"
        print(row, *(f"{each:>8}" for each in (*seconds, "-")[:2]), flush=True)
    return int(wrong > 0)


def is_wrong(name: str, profile: Profile, report: Report) -> bool:
    """Say what is not as it was pinned."""
    found = (report.verdict, report.num_states, report.num_edges)
    if found == ("complete", profile.num_states, profile.num_edges):
        return False
    print(f"{name}, {report.backend}: {found}, pinned {profile.num_states}, {profile.num_edges}")
    if report.violation is not None:
        print(f"{report.violation.name}: {report.violation.detail}")
        print(*report.violation.calls, sep="\n")
    return True


if __name__ == "__main__":
    sys.exit(main())
