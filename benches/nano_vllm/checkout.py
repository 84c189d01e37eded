# SPDX-License-Identifier: Apache-2.0
"""Fetch nano-vllm at the pinned commit from Git, since no registry has it.

The folder is $KVCORE_NANO_VLLM if that is set, otherwise one beside the peers, outside the project.
Its scheduler is imported without the rest of the package, which needs a GPU's libraries.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

from benches.peers.install import home

SOURCE = "https://github.com/GeeeekExplorer/nano-vllm"
COMMIT = "bb823b3e06983d71485a8e1f23715ebd87d98ef8"
TRANSFORMERS = ("AutoConfig", "AutoTokenizer", "Qwen3Config")


def folder() -> Path:
    """Return the folder of the checkout, which may not exist yet."""
    named = os.environ.get("KVCORE_NANO_VLLM")
    return Path(named) if named else home() / "nano-vllm"


def missing() -> str | None:
    """Return why nano-vllm cannot run, or None."""
    if (folder() / "nanovllm" / "__init__.py").exists():
        return None
    return f"nano-vllm is not in {folder()}: `make engines-nano` clones it, or name a checkout"


def clone() -> None:
    """Fetch the pinned commit, unless a checkout is there. Raises CalledProcessError."""
    if missing() is None:
        return
    target = folder()
    part = target.with_name(f"{target.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    print(f"cloning {SOURCE} at {COMMIT[:7]} into {target}", flush=True)
    for command in (
        ["init", "--quiet", str(part)],
        ["-C", str(part), "fetch", "--quiet", "--depth", "1", SOURCE, COMMIT],
        ["-C", str(part), "checkout", "--quiet", "FETCH_HEAD"],
    ):
        subprocess.run(["git", *command], check=True)
    part.rename(target)


@contextlib.contextmanager
def imported() -> Iterator[Any]:
    """Import nano-vllm's module `scheduler` for a block; unload its modules after it."""
    package = ModuleType("nanovllm")  # its own __init__ imports the model runner
    vars(package)["__path__"] = [str(folder() / "nanovllm")]
    made = {"nanovllm": package}
    if find_spec("transformers") is None:
        made["transformers"] = ModuleType("transformers")
        # Used by annotations and for reading from disk, which does not happen here.
        vars(made["transformers"]).update(dict.fromkeys(TRANSFORMERS, object))
    sys.modules.update(made)
    try:
        yield import_module("nanovllm.engine.scheduler")
    finally:
        for name in [name for name in sys.modules if name.split(".")[0] == "nanovllm"]:
            del sys.modules[name]
        for name in made.keys() - {"nanovllm"}:
            del sys.modules[name]
