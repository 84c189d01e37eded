# SPDX-License-Identifier: Apache-2.0
"""Where the adapter for transformers runs: outside the project, where transformers is installed.

Run: python -m tests.engines.transformers.environment [demo | OPTION OF PYTEST ...]. Installs
transformers first (benches/peers/install.py), then runs the demo, or the tests marked so.
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
    sys.exit(run_tests(*sys.argv[1:]))
