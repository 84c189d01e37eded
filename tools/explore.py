# SPDX-License-Identifier: Apache-2.0
"""Print the table of the named worlds: states, edges and seconds, on both backends.

The exit code is 1 if a world's counts are not the pinned ones, if it breaks a property, or if it
does not reach its goals. Worlds of the twin do not run on the Python backend. Seconds are those of
this machine.
"""

from __future__ import annotations

import argparse
import os
import sys

from kvcore import _twin
from kvcore.check import Report, check
from kvcore.check.profiles.registry import PROFILES, Profile
from kvcore.check.search.coverage import missed


def main() -> int:
    """Explore all named worlds, or the given ones; returns the exit code."""
    parser = argparse.ArgumentParser(description="Print the table of the named worlds.")
    parser.add_argument(
        "worlds", nargs="*", metavar="WORLD", help="worlds to explore; by default all"
    )
    chosen = parser.parse_args().worlds or list(PROFILES)
    unknown = [name for name in chosen if name not in PROFILES]
    if unknown:
        parser.error(f"no world {', '.join(unknown)}; the worlds are {', '.join(PROFILES)}")
    print(f"{'world':<21} {'states':>9} {'edges':>10} {'depth':>5} {'Python':>8} {'Rust':>8}")
    wrong = 0
    for name in chosen:
        profile = PROFILES[name]
        workers = os.cpu_count() or 1
        seconds, report = {}, None
        backends = ["rust"] if profile.backend == "rust" else ["python", "rust"]
        for backend in backends:
            if backend == "rust" and not _twin.available():
                continue
            report = check(profile.world, backend=backend, workers=workers)
            seconds[backend] = f"{report.seconds:.2f} s"
            wrong += is_wrong(name, profile, report)
        if report is not None:
            row = f"{name:<21} {report.num_states:>9,} {report.num_edges:>10,} {report.depth:>5}"
            times = (seconds.get(backend, "-") for backend in ("python", "rust"))
            print(row, *(f"{each:>8}" for each in times), flush=True)
    return int(wrong > 0)


def is_wrong(name: str, profile: Profile, report: Report) -> bool:
    """Print how a report differs from the pinned counts and goals; return whether it does."""
    found = (report.verdict, report.num_states, report.num_edges)
    missing = missed(profile, report.notes)
    if found == ("complete", profile.num_states, profile.num_edges) and not missing:
        return False
    print(f"{name}, {report.backend}: {found}, pinned {profile.num_states}, {profile.num_edges}")
    if missing:
        print(f"{name}, {report.backend}: never shown: {', '.join(missing)}")
    if report.violation is not None:
        print(f"{report.violation.name}: {report.violation.detail}")
        print(*report.violation.calls, sep="\n")
    return True


if __name__ == "__main__":
    sys.exit(main())
