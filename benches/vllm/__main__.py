# SPDX-License-Identifier: Apache-2.0
"""Run vLLM 0.33.0's schedulers over its own manager and over kvcore, and compare every step.

Run: python -m benches.vllm [--modes async,async-drafts] [--seeds 40] [--steps 200] [--shadow].
Installs vLLM first, outside the project (benches/peers/install.py). The exit status is 1 if a step
differs. With --shadow one scheduler runs, with kvcore in the shadow of its manager (shadow.py).
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from benches.peers import install
from benches.vllm.options import read_options

FAMILY = "vllm033"
ROOT = Path(__file__).parents[2]
PATHS = (ROOT, ROOT / "engines" / "vllm")


def main() -> int:
    """Install vLLM, and compare in its environment."""
    module = "shadow" if read_options().is_shadow else "compare"
    install.install([FAMILY])
    command = [str(install.python_of(FAMILY)), "-m", f"benches.vllm.{module}", *sys.argv[1:]]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, PATHS))}
    return subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
