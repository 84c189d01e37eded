# SPDX-License-Identifier: Apache-2.0
"""Measure an engine's steps over kvcore, as a ratio to its steps over its own manager.

Also measures calls of `kvcore.compat` against the core's, and the share of a step that a shadow or
a sanitizer adds.

Run: python -m benches.engines [--engines vllm] [--running 256] [--loads decode] [--modes async]
[--by-call]. CPU time of the thread, both sides in turn, in each engine's own environment. An engine
that is not installed is left out, with the reason; `python -m benches.peers.install` installs vLLM
and transformers.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import attrs

from benches.engines.options import read_options
from benches.nano_vllm import checkout
from benches.peers import install

ROOT = Path(__file__).parents[2]
PATHS = (ROOT, ROOT / "engines" / "vllm")


@attrs.frozen
class Bench:
    """The program that measures an engine.

    family: the environment it needs, or that it starts; empty for none. None: nano-vllm's checkout.
    """

    module: str
    family: str | None = None
    runs_there: bool = False
    options: tuple[str, ...] = ()

    def missing(self) -> str | None:
        """Return why the bench cannot run, or None."""
        if self.family is None:
            return checkout.missing()
        if not self.family or install.is_installed(self.family):
            return None
        return f"{install.PACKAGES[self.family].requirement} is not in {install.home()}"

    def run(self, arguments: list[str]) -> int:
        """Run the program and return its exit status."""
        python = str(install.python_of(self.family or "")) if self.runs_there else sys.executable
        environment = os.environ | {"PYTHONWARNINGS": "ignore"}
        if self.runs_there:
            environment["PYTHONPATH"] = os.pathsep.join(map(str, PATHS))
        command = [python, "-m", self.module, *self.options, *arguments]
        return subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode


BENCHES = {
    "compat": Bench("benches.compat", ""),
    "vllm": Bench("benches.engines.vllm_steps", "vllm033", runs_there=True),
    "vllm-shadow": Bench("benches.engines.vllm_shadow", "vllm033", runs_there=True),
    "vllm-sanitizer": Bench("benches.engines.vllm_sanitizer", "vllm033", runs_there=True),
    "nano-vllm": Bench("benches.nano_vllm", options=("--quick",)),
    "transformers": Bench("benches.transformers_steps", "transformers"),
}


def main(arguments: list[str]) -> int:
    """Measure the installed engines; returns 1 if one of them failed."""
    failed = False
    for engine in read_options(arguments).engines:
        bench = BENCHES[engine]
        reason = bench.missing()
        if reason is not None:
            print(f"{engine}: left out: {reason}", flush=True)
            continue
        print(f"{engine}:", flush=True)
        status = bench.run(arguments if bench.runs_there else [])
        if status != 0:
            print(f"{engine}: ended with status {status}", flush=True)
            failed = True
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
