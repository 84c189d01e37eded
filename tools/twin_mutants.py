# SPDX-License-Identifier: Apache-2.0
"""Score the twin's own seeded bugs (`rust/src/mutants.rs`), each in a named world.

`python -m tools.twin_mutants LIBRARY` searches for each bug twice in a build with the feature
`mutants`: with all properties, and with only those that users observe. A bug must be found in a
short run; a bug that no user can see has its reason here. It prints a table; the exit code is 1 if
a bug survives.
"""

from __future__ import annotations

import argparse
import sys
import time
from importlib.machinery import ExtensionFileLoader
from importlib.util import module_from_spec, spec_from_file_location
from types import ModuleType

STATES_MAX = 10_000
"""Each search explores at most this many states."""
HITS = "only hits are lost"
MIRROR = "the worker's tables are wrong, which this ghost reads from the state"
ORDER = "batches that run one after the other hide it"
WRONG_EVENTS = "what listens to events is told wrong things, no request is"
REFUSED = "a name cannot be used again: calls are refused, no content is wrong"
BYTES = "no call goes wrong: `restore` refuses the bytes of the state"
BEHIND = "seen in later batches, and contents are followed for one here"
FORGOTTEN = "a later batch writes a wrong slot, and explored states forget what the twin remembers"
BUGS: dict[str, tuple[str, str | None]] = {
    "AllocRef0": ("cuts", None),
    "TouchNotDequeued": ("uncached", None),
    "EvictKeepsIndex": ("loads-fail-inside", None),
    "EvictDropsDups": ("uncached", None),
    "IndexComparesBuckets": ("groups", None),
    "EventPerCopy": ("groups", WRONG_EVENTS),
    "CounterDrifts": ("cuts", None),
    "FreeForgetsABlock": ("cuts", None),
    "FreeHeadFirst": ("groups", HITS),
    "CutNotReported": ("cuts", MIRROR),
    "CowNoCopy": ("uncached", None),
    "SharedWrittenInPlace": ("uncached", None),
    "KeyedWrittenInPlace": ("truncate", None),
    "ForkKeepsQuiet": ("fours", BEHIND),
    "QuietStepNotCounted": ("fours", None),
    "QuietStepNotAwaited": ("ahead-fours", None),
    "QuietStepKeysNothing": ("ahead-delays", HITS),
    "RejectionKeepsSlots": ("ahead-rejections", FORGOTTEN),
    "EndsGrowOneTable": ("groups", None),
    "HitsCostNothing": ("groups", None),
    "CacheWholePrompt": ("calls", BEHIND),
    "FullHit": ("cuts", None),
    "ResetInUse": ("cuts", None),
    "LeavingKeepsKeys": ("three", None),
    "TruncateKeepsHashes": ("truncate", None),
    "MergeNoRemap": ("merge", None),
    "TrimNotReported": ("groups", MIRROR),
    "RowMapKeepsPlace": ("three", None),
    "ChainLosesKeys": ("window", BEHIND),
    "RemoveKeepsRow": ("cuts", REFUSED),
    "FreedUnderABatch": ("flight-merge-late", ORDER),
    "FirstBatchEndsAllUses": ("flight-loads-swap", ORDER),
    "CopyHoldsNothing": ("ahead-swap", ORDER),
    "QuarantineNeverEnds": ("flight-merge-late", None),
    "HeldOfTheFirst": ("flight-merge-late", ORDER),
    "RemovedStaysMarked": ("flight-merge", None),
    "LostPlacesStay": ("ahead-merge", BYTES),
    "CancelKeepsKeys": ("flight-merge-late", None),
    "CancelKeepsCounts": ("flight-merge-late", None),
    "CancelLeavesTables": ("flight-merge-late", MIRROR),
    "PublishesInFlight": ("ahead-drafts-completed", None),
    "PublishedLate": ("flight-merge", HITS),
    "RunsNeedNoHashes": ("hashes-swap", None),
    "StalePublishes": ("epoch-fork", None),
    "StaleComesBackToHits": ("epoch-swap", None),
    "EpochsAge": ("epoch", HITS),
    "FloorsNotKept": ("floors", HITS),
    "FloorsForgetOwners": ("floors", HITS),
    "TakersNotNoted": ("floors", HITS),
}
"""Seeded bug -> the named world that shows it, and the reason if no user can see it."""


def main() -> int:
    """Search for all bugs; returns the exit code."""
    parser = argparse.ArgumentParser(description="Score the twin's own seeded bugs.")
    parser.add_argument("library", help="the twin, built with the features python and mutants")
    twin = load(parser.parse_args().library)
    from kvcore.check.cli.mutants import LONGEST_RUN  # kvcore uses the loaded twin

    row = "{:<22} {:<13} {:>3}  {:<22} {:>6} {:>7}  {}".format
    print(row("seeded bug", "found by", "ops", "world", "states", "seconds", "a user sees"))
    alive = [f"{each}: not in the table" for each in twin.seed(None) if each not in BUGS]
    for name, (world, unseen) in BUGS.items():
        began = time.process_time()
        found, length, states = hunt(twin, name, world, observed=False)
        seen, _, _ = hunt(twin, name, world, observed=True)
        seconds = f"{time.process_time() - began:.2f}"
        print(row(name, found or "-", length, world, states, seconds, seen or unseen))
        if found is None or length > LONGEST_RUN or (seen is None) != (unseen is not None):
            alive.append(name)
    print(f"{len(BUGS) - len(alive)} of {len(BUGS)} seeded bugs of the twin are killed")
    print("".join(f"  {name} is alive\n" for name in alive), end="")
    return int(bool(alive))


def load(library: str) -> ModuleType:
    """Load a build as this process's twin; must run before `kvcore` is imported."""
    loader = ExtensionFileLoader("kvcore._rust", library)
    spec = spec_from_file_location("kvcore._rust", library, loader=loader)
    assert spec is not None
    twin = sys.modules["kvcore._rust"] = module_from_spec(spec)
    loader.exec_module(twin)
    return twin


def hunt(twin: ModuleType, bug: str, world: str, *, observed: bool) -> tuple[str | None, int, int]:
    """Search a named world for a bug.

    Returns the property that finds it or None, the number of calls, and the states explored.
    observed: whether only properties that users observe count.
    """
    from kvcore.check import check
    from kvcore.check.mutants.observed import observable_in
    from kvcore.check.profiles.registry import PROFILES

    where = PROFILES[world].world
    names = observable_in(where) if observed else None
    twin.seed(bug)
    report = check(where, backend="rust", max_states=STATES_MAX, properties=names)
    twin.seed(None)
    if report.violation is None:
        return None, 0, report.num_states
    return report.violation.name, len(report.violation.calls), report.num_states


if __name__ == "__main__":
    sys.exit(main())
