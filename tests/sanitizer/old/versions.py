# SPDX-License-Identifier: Apache-2.0
"""Older versions of engines: what is needed for the worlds in `found`, and where it is installed.

Run: python -m tests.sanitizer.old.versions. It clones each engine once per commit, from a folder of
Git repositories named by KVCORE_OLD_CHECKOUTS, or else from where the engine is published.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

from kvcore.sanitizer import UnsupportedEngine
from kvcore.sanitizer.hunter.adapter import KNOWN, peers_home

FOUND = sorted((Path(__file__).parent / "found").glob("*.json"))
PUBLISHED = {
    "mini-sglang": "https://github.com/sgl-project/mini-sglang",
    "nano-vllm": "https://github.com/GeeeekExplorer/nano-vllm",
}


def needed() -> list[str]:
    """Return engine and commit of each version that has a bug or its fix."""
    worlds = [json.loads(path.read_text()) for path in FOUND]
    return sorted({each[key] for each in worlds for key in ("engine", "fixed")})


def folder(version: str) -> Path:
    """Return the folder of a version, which need not exist. version: as in `needed`."""
    return peers_home() / "old" / version.replace(" ", "-")


def adapter(version: str) -> str:
    """Return the adapter for a version, as `module:Class`."""
    return f"tests.sanitizer.old.{version.split()[0].replace('-', '_')}:Adapter"


def environment(version: str) -> dict[str, str]:
    """Return the environment variables with which the adapter runs this version."""
    return {str(KNOWN[version.split()[0]].checkout): str(folder(version))}


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
    """Clone each version that is needed, unless it is there. Raises CalledProcessError."""
    for version in needed():
        engine, commit = version.split()
        if (target := folder(version)).exists():
            continue
        local = os.environ.get("KVCORE_OLD_CHECKOUTS")
        source = str(Path(local, engine)) if local else PUBLISHED[engine]
        print(f"cloning {version} from {source} into {target}", flush=True)
        part = target.with_suffix(".part")
        subprocess.run(["git", "clone", "--quiet", source, str(part)], check=True)
        subprocess.run(["git", "-C", str(part), "checkout", "--quiet", commit], check=True)
        part.rename(target)


if __name__ == "__main__":
    install()
