# SPDX-License-Identifier: Apache-2.0
"""Older versions of engines: what is needed for the worlds in `found`, and where it is installed.

Run: python -m tests.sanitizer.old.versions. It clones each engine once per commit, from a folder of
Git repositories named by KVCORE_OLD_CHECKOUTS, or else from where the engine is published. vLLM's
releases come from the registry; only the sources of their schedulers are kept.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

from kvcore.sanitizer import UnsupportedEngine
from kvcore.sanitizer.hunter.adapter import KNOWN, peers_home

FOUND = sorted((Path(__file__).parent / "found").glob("*.json"))
PUBLISHED = {
    "mini-sglang": "https://github.com/sgl-project/mini-sglang",
    "nano-vllm": "https://github.com/GeeeekExplorer/nano-vllm",
}
KEPT = ("block.py", "sequence.py", "core", "v1")


def needed() -> list[str]:
    """Return engine and commit of each version that has a bug or its fix."""
    worlds = [json.loads(path.read_text()) for path in FOUND]
    return sorted({each[key] for each in worlds for key in ("engine", "fixed")})


def folder(version: str) -> Path:
    """Return the folder of a version, which need not exist. version: as in `needed`."""
    return peers_home() / "old" / version.replace(" ", "-")


def adapter(version: str) -> str:
    """Return the adapter for a version, as `module:Class`."""
    engine, number = version.split()
    module = engine.replace("-", "_")
    if engine == "vllm":
        module = "vllm_v0" if number < "0.6" else "vllm_v1"
    return f"tests.sanitizer.old.{module}:Adapter"


def environment(version: str) -> dict[str, str]:
    """Return the environment variables with which the adapter runs this version."""
    engine = version.split()[0]
    variable = KNOWN[engine].checkout if engine in PUBLISHED else "KVCORE_OLD_VLLM"
    return {str(variable): str(folder(version))}


def head(engine: str) -> str:
    """Return the commit of an engine's checkout. Raises UnsupportedEngine if no world needs it."""
    command = ["git", "-C", os.environ[str(KNOWN[engine].checkout)], "rev-parse", "HEAD"]
    found = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    commits = [each.split()[1] for each in needed() if each.split()[0] == engine]
    for commit in commits:
        if found.startswith(commit):
            return commit
    tested = ", ".join(commits)
    raise UnsupportedEngine(engine=engine, found=found or "of an unknown commit", tested=tested)


def install() -> None:
    """Install each version that is needed, unless it is there. Raises CalledProcessError."""
    for version in needed():
        engine, number = version.split()
        if not (target := folder(version)).exists():
            part = target.with_suffix(".part")
            shutil.rmtree(part, ignore_errors=True)
            if engine in PUBLISHED:
                _clone(engine, number, part)
            else:
                _unpack(engine, number, part)
            part.rename(target)


def _clone(engine: str, commit: str, part: Path) -> None:
    local = os.environ.get("KVCORE_OLD_CHECKOUTS")
    source = str(Path(local, engine)) if local else PUBLISHED[engine]
    print(f"cloning {engine} {commit} from {source}", flush=True)
    subprocess.run(["git", "clone", "--quiet", source, str(part)], check=True)
    subprocess.run(["git", "-C", str(part), "checkout", "--quiet", commit], check=True)


def _unpack(engine: str, number: str, part: Path) -> None:
    print(f"fetching {engine} {number}", flush=True)
    whole = part.with_suffix(".whole")
    uv = [sys.executable, "-m", "uv", "pip", "install", "--quiet", "--no-deps"]
    # its wheels of 2024 are for Python 3.11 at most, on which the sources do not depend
    where = ["--only-binary", ":all:", "--python-version", "3.11", "--target", str(whole)]
    subprocess.run([*uv, *where, f"{engine}=={number}"], check=True)
    for name in KEPT:
        found = whole / engine / name
        if found.is_dir():
            shutil.copytree(found, part / engine / name)
        elif found.exists():
            (part / engine).mkdir(parents=True, exist_ok=True)
            shutil.copy(found, part / engine / name)
    shutil.rmtree(whole)


if __name__ == "__main__":
    install()
