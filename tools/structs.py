# SPDX-License-Identifier: Apache-2.0
"""Measure the cost of attrs classes instead of msgspec structs in types/ and state/.

Run: python -m tools.structs [--rounds 7]. For each part, a copy of kvcore uses attrs classes
there and runs on the Python backend. The figures are CPU time relative to a copy with structs
only; the copies run in turn, and the least of the rounds counts. All copies choose the right
`replace` at each call.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PARTS = {
    "no part": (),
    "values": ("types/values.py",),
    "arguments": ("types/slot_request.py", "types/engine_counts.py"),
    "plans": ("state/plan_records.py",),
    "the state": ("state/state.py", "state/open_batch.py", "state/batch_records.py"),
    "all of these": (
        *("types/values.py", "types/slot_request.py", "types/engine_counts.py"),
        "state/*.py",
    ),
}
STRUCT = re.compile(r"(?m)^class (\w+)\(Struct, frozen=True, gc=False((?:, \w+=\w+)*)\):")
EITHER = """\
import attrs
from msgspec import Struct, structs
from msgspec.structs import astuple

def replace(value, **changes):
    either = structs.replace if isinstance(value, Struct) else attrs.evolve
    return either(value, **changes)

def fields(kind):
    return structs.fields(kind) if issubclass(kind, Struct) else attrs.fields(kind)

def force_setattr(value, name, new):
    set_it = structs.force_setattr if isinstance(value, Struct) else object.__setattr__
    set_it(value, name, new)
"""
WORK = {
    "decoding": """
manager = KVCacheManager(Config(2048, 16), "python")
for name in NAMES:
    manager.add_request(Request(name, list(range(70))))
    manager.allocate_slots(name, 70)
manager.take_batch()
for token in range(100):
    for name in NAMES:
        manager.append([name], [token])
    manager.take_batch()
for name in NAMES:
    manager.free(name)
""",
    "exploring": """
check(ObservedModel(worlds.world(2, 1, 3, enable_events=True)))
""",
    "allocate_slots of compat": """
manager = Compat(Config(2048, 16, enable_caching=False), backend="python")
requests = [SimpleNamespace(request_id=name, all_token_ids=[1] * 70, num_tokens=70,
    num_computed_tokens=0, is_finished=bool) for name in NAMES]
for at in range(0, 64):
    for each in requests:
        each.num_computed_tokens = at
        manager.allocate_slots(each, 1, num_lookahead_tokens=2)
""",
}
SCRIPT = """
import sys, time
from types import SimpleNamespace
from kvcore import Config, KVCacheManager, Request
from kvcore.check.mutants import worlds
from kvcore.check.mutants.observed import ObservedModel
from kvcore.check.search.search import check
from kvcore.compat import KVCacheManager as Compat
NAMES = [f"r{place}" for place in range(32)]
work = compile(sys.argv[1], "work", "exec")
exec(work)
start = time.process_time()
exec(work)
print(time.process_time() - start)
"""


def copy_to(folder: Path, patterns: tuple[str, ...]) -> None:
    """Copy kvcore to a folder, with attrs classes in the files of these patterns."""
    target = folder / "kvcore"
    shutil.copytree(ROOT / "kvcore", target, ignore=shutil.ignore_patterns("__pycache__", "_rust*"))
    (target / "either.py").write_text(EITHER)
    changed = {path for pattern in patterns for path in target.glob(pattern)}
    for path in target.rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        if path.name != "either.py":
            text = text.replace("from msgspec.structs import", "from kvcore.either import")
        if path in changed:
            text = STRUCT.sub(lambda found: _as_attrs(*found.groups("")), text)
            text = text.replace("def __post_init__", "def __attrs_post_init__")
            text = text.replace(
                "from msgspec import Struct", "import attrs\nfrom msgspec import Struct", 1
            )
        path.write_text(text, encoding="utf-8")


def _as_attrs(name: str, options: str) -> str:
    return f"@attrs.frozen({options.removeprefix(', ')})\nclass {name}:"


def seconds(folder: Path, work: str) -> float:
    """Return the CPU seconds of some work in a copy."""
    command = [sys.executable, "-c", SCRIPT, work]
    env = os.environ | {"PYTHONPATH": str(folder)}
    done = subprocess.run(command, cwd=folder, env=env, check=True, stdout=subprocess.PIPE)
    return float(done.stdout)


def main() -> None:
    """Print the cost of each part for each kind of work."""
    parser = argparse.ArgumentParser(
        description="Measure the cost of attrs classes instead of structs."
    )
    parser.add_argument("--rounds", type=int, default=7)
    rounds = parser.parse_args().rounds
    with tempfile.TemporaryDirectory() as base:
        folders = {name: Path(base, f"copy{at}") for at, name in enumerate(PARTS)}
        for name, folder in folders.items():
            copy_to(folder, PARTS[name])
        for title, work in WORK.items():
            least = dict.fromkeys(folders, float("inf"))
            for name in [*folders] * rounds:
                least[name] = min(least[name], seconds(folders[name], work))
            for name, value in least.items():
                print(f"{title:26} attrs in {name:16} {value / least['no part']:5.2f}")


if __name__ == "__main__":
    main()
