# SPDX-License-Identifier: Apache-2.0
"""The stages that a one-line defect runs through, cheapest first, in a scratch copy of the tree.

Processor time and memory are limited, because a defect may loop forever; that counts as found.
Tests that do not test behaviour (style, documents, wheels) are in no stage.
"""

from __future__ import annotations

import filecmp
import hashlib
import os
import re
import resource
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from itertools import chain
from pathlib import Path
from typing import Any

import attrs

from tools.mutation_table import UNNAMED

ROOT = Path(__file__).parents[1]
GIB = 1 << 30
UNBUILT = "does not compile"
PYTEST = (sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider")
CARGO = ("cargo", "test", "--locked")
STYLE = ("tests/test_tidy.py", "tests/test_wheel.py", "tests/docs/test_docs.py")
NOT_THESE = tuple(f"--ignore={path}" for path in STYLE)
EXTENSION = ("cargo", "build", "--locked", "--lib", "--features", "python")
FAILED = re.compile(
    r"^(?:FAILED|ERROR) (tests/.+?)(?: - .*)?$|^test (\S+) \.\.\. FAILED", re.MULTILINE
)
POOLS = tuple(f"tests/conformance/test_{word}.py" for word in ("pool", "free_queue"))
ROOMS = ("tests/pool", *(f"tests/core/{room}" for room in ("types", "hashing", "transitions")))
UNITS = (*POOLS, *ROOMS)


@attrs.frozen(kw_only=True)
class Stage:
    """A named set of tests: a command, and its paths, which names of tests can replace.

    cpu_s_max, memory_max: limits per process; a defect may allocate without end. builds_twin:
    whether the twin is first compiled into the copy.
    """

    name: str
    command: tuple[str, ...]
    paths: tuple[str, ...]
    cpu_s_max: int
    memory_max: int = 12 * GIB
    in_slice: bool = True
    builds_twin: bool = False


PARITY = (
    "tests/traces",
    "tests/property",
    "tests/pool",
    "tests/core",
    "tests/check/test_agreement.py",
)
SHORT: dict[str, Any] = {"command": PYTEST, "cpu_s_max": 60, "memory_max": 2 * GIB}
STAGES = {
    "python": [
        Stage(name="traces", paths=("tests/traces",), **SHORT),
        Stage(name="short unit tests", paths=UNITS, **SHORT),
        Stage(
            name="unit and conformance tests",
            command=(*PYTEST, *NOT_THESE),
            paths=("tests/core", "tests/compat", "tests/conformance", "tests/legacy"),
            cpu_s_max=300,
        ),
        Stage(
            name="walks and small worlds",
            command=PYTEST,
            paths=(
                "tests/property",
                "tests/check/test_worlds.py",
                "tests/check/test_agreement.py",
            ),
            cpu_s_max=900,
            in_slice=False,
        ),
    ],
    "rust": [
        Stage(
            name="unit tests",
            command=(*CARGO, "--lib", "--"),
            paths=("--skip", "check::", "--skip", "fuzz::"),
            cpu_s_max=300,
        ),
        Stage(name="worlds and allocations", command=(*CARGO, "--"), paths=(), cpu_s_max=600),
        Stage(
            name="parity with Python",
            command=(*PYTEST, *NOT_THESE),
            paths=PARITY,
            cpu_s_max=900,
            in_slice=False,
            builds_twin=True,
        ),
    ],
}


def known_tests(language: str, files: Iterable[str] = ()) -> set[str]:
    """Return the names of all tests that can kill a defect, in the form of `Row.test`.

    files: for Python, the test files to collect; by default all.
    """
    listing = (
        (*PYTEST, "--collect-only", "--assert=plain", *NOT_THESE, *files)
        if language == "python"
        else (*CARGO, "--quiet", "--", "--list", "--format=terse")
    )
    lines = subprocess.check_output(listing, cwd=ROOT, text=True).splitlines()
    return {*UNNAMED, *(line.removesuffix(": test") for line in lines)}


class Scratch:
    """A copy of the files that git tracks and of the built twin, in which defects are tried."""

    def __init__(self, language: str) -> None:
        """Bring the language's copy up to date; it shares cargo's target folder with the tree."""
        self.language = language
        digest = hashlib.sha256(str(ROOT).encode()).hexdigest()[:8]
        self.folder = Path(tempfile.gettempdir()) / f"kvcore-mutation-{language}-{digest}"
        self.passed: set[str] = set()
        names = subprocess.check_output(
            ["git", "ls-files", "--cached", "--others", "--exclude-standard"], cwd=ROOT, text=True
        )
        tracked = {*names.splitlines(), "kvcore/_rust.abi3.so"}
        copied = (self.folder.glob(f"{room}/**/*") for room in ("kvcore", "rust", "tests"))
        for path in chain.from_iterable(copied):
            if path.is_file() and str(path.relative_to(self.folder)) not in tracked:
                path.unlink()  # from an earlier copy: a moved file would exist twice
        for name in tracked:
            source, target = ROOT / name, self.folder / name
            same = target.is_file() and filecmp.cmp(source, target, shallow=False)
            if source.is_file() and not same:
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(source, target)

    def need_pass(self, stage: Stage) -> None:
        """Stop unless the stage passes without a defect."""
        failed = self.run(stage)
        if failed:
            raise SystemExit(f"{stage.name}: without a defect: {failed}")
        self.passed.add(stage.name)

    def run(self, stage: Stage, *tests: str) -> str | None:
        """Return the first test that fails, or None. tests: names, instead of the whole stage."""
        if stage.builds_twin:
            if self._call(EXTENSION, stage)[0]:
                return UNBUILT
            built = ROOT / "target" / "debug" / "libkvcore.so"
            shutil.copyfile(built, self.folder / "kvcore" / "_rust.abi3.so")
        code, output = self._call((*stage.command, *(tests or stage.paths)), stage)
        failed = FAILED.search(output)
        if code == 0:
            return None
        if failed:
            return failed.group(1) or failed.group(2)
        if "could not compile" in output:
            return UNBUILT
        return "hangs" if "SIGXCPU" in output or code in (-24, -9) else "crashes"

    def _call(self, command: tuple[str, ...], stage: Stage) -> tuple[int, str]:
        """Run a command in the copy under the limits of a stage; returns exit code and output."""

        def limit() -> None:
            resource.setrlimit(resource.RLIMIT_CPU, (stage.cpu_s_max, stage.cpu_s_max + 5))
            resource.setrlimit(resource.RLIMIT_AS, (stage.memory_max, stage.memory_max))

        environment = dict(
            os.environ,
            CI="true",
            CARGO_TARGET_DIR=str(ROOT / "target"),
            PYTHONPATH=f"{self.folder}:{self.folder / 'runtime'}",
        )
        done = subprocess.run(
            command,
            cwd=self.folder,
            env=environment,
            preexec_fn=limit,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            check=False,
        )
        return done.returncode, done.stdout
