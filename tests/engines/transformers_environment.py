# SPDX-License-Identifier: Apache-2.0
"""Where the tests of the adapter for transformers run: outside the project, where it is installed.

Run: python -m tests.engines.transformers_environment [OPTION OF PYTEST ...]. Installs transformers
first (benches/peers/install.py), then runs the tests marked `transformers`.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from benches.peers import install

FAMILY = "transformers"
ROOT = Path(__file__).parents[2]
ABSENT = "transformers 5.23.0 is not in this environment: make engines-transformers runs this"


def run_tests(*options: str) -> int:
    """Run them in the peer's environment; returns pytest's status."""
    paths = [ROOT, ROOT / "runtime", ROOT / "engines" / "transformers"]
    command = [str(install.python_of(FAMILY)), "-m", "pytest", "-m", "transformers", *options]
    return subprocess.run(
        [*command, "tests/engines"],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(map(str, paths))},
        check=False,
    ).returncode


if __name__ == "__main__":
    install.install([FAMILY])
    sys.exit(run_tests(*sys.argv[1:]))
