# SPDX-License-Identifier: Apache-2.0
"""The environment of the adapter for transformers, outside the project, where transformers is
installed.

Run: python -m tests.engines.transformers.environment [demo | shadow ... | OPTION OF PYTEST ...].
Installs transformers first (benches/peers/install.py), then runs the demo, random runs in shadow
mode (shadow_runs.py), or the tests marked so.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from benches.peers import install

FAMILY = "transformers"
ROOT = Path(__file__).parents[3]
ABSENT = "transformers 5.23.0 is not in this environment: make engines-transformers runs this"


def run_tests(*options: str) -> int:
    """Run the adapter's tests; returns pytest's status."""
    return run_there("-m", "pytest", "-m", "transformers", *options, "tests/engines/transformers")


def run_there(*arguments: str) -> int:
    """Run Python in the environment of transformers; returns its status."""
    paths = [ROOT, ROOT / "runtime", ROOT / "engines" / "transformers"]
    return subprocess.run(
        [str(install.python_of(FAMILY)), *arguments],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(map(str, paths))},
        check=False,
    ).returncode


if __name__ == "__main__":
    install.install([FAMILY])
    if sys.argv[1:] == ["demo"]:
        sys.exit(run_there("engines/transformers/demo.py"))
    if sys.argv[1:2] == ["shadow"]:
        sys.exit(run_there("-m", "tests.engines.transformers.shadow_runs", *sys.argv[2:]))
    sys.exit(run_tests(*sys.argv[1:]))
