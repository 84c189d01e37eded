# SPDX-License-Identifier: Apache-2.0
"""Install peers from the package registries, at pinned versions, in a folder outside the project.

Run: python -m benches.peers.install [PEER ...]. The folder is $KVCORE_PEERS, or kvcore/peers in the
user's cache folder. Each Python peer has an environment of its own, since two are called vllm;
packages that it lacks, torch above all, come from the environment that this runs in. The Rust peers
are one program. Steps that are already done are skipped.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import sysconfig
from collections.abc import Iterable
from pathlib import Path

import attrs

from kvcore.sanitizer.hunter.adapter import peer_python, peers_home

HERE = Path(__file__).parent
RUST = "rust"
STAMP = "installed"
LENT = "kvcore-torch.pth"


@attrs.frozen
class Package:
    """A peer on the Python registry. requirements: packages that its import needs besides torch."""

    requirement: str
    requirements: str | None = None


PACKAGES = {
    "vllm033": Package("vllm==0.33.0", "vllm.txt"),
    "vllm085": Package("vllm==0.8.5", "vllm.txt"),
    "sglang": Package("sglang==0.5.23"),
    "transformers": Package("transformers==5.23.0", "transformers.txt"),
    "lmdeploy": Package("lmdeploy==0.18.0", "lmdeploy.txt"),
    "lmcache": Package("lmcache==0.5.6", "lmcache.txt"),
    "aibrix": Package("aibrix-kvcache==0.8.0", "aibrix.txt"),
    "dynamo": Package("ai-dynamo-runtime==1.6.1", "dynamo.txt"),
    "mooncake": Package("mooncake-transfer-engine-non-cuda==0.3.13.post1"),
}


def home() -> Path:
    """Return the folder of the peers."""
    return peers_home()


def python_of(family: str) -> Path:
    """Return the interpreter of a peer's environment."""
    return peer_python(family)


def program() -> Path:
    """Return the path of the program with the Rust peers."""
    return home() / "target" / "release" / "kvcore-peers"


def run(*command: object) -> None:
    """Run a command and wait for it. Raises CalledProcessError."""
    subprocess.run([str(part) for part in command], check=True)


def site_of(family: str) -> Path:
    """Return the folder of the packages of a peer's environment."""
    return Path(sysconfig.get_path("purelib", vars={"base": str(home() / family)}))


def wanted(family: str, site: str) -> str:
    """Return the stamp that a Python peer's environment has if it matches the pins.

    site: the folder of the packages that it lacks, torch above all.
    """
    package = PACKAGES[family]
    pins = (HERE / package.requirements).read_text() if package.requirements else ""
    return hashlib.sha256(
        f"{package.requirement} {sys.version} {site}\n{pins}".encode()
    ).hexdigest()


def is_installed(family: str) -> bool:
    """Return whether the environment of a Python peer exists and matches the pins.

    Its other packages may come from another checkout's environment, if that is still there: to
    install it anew would break the programs that run in it.
    """
    stamp, lent = home() / family / STAMP, site_of(family) / LENT
    if not (stamp.exists() and lent.exists()):
        return False
    site = lent.read_text().strip()
    return Path(site).is_dir() and stamp.read_text() == wanted(family, site)


def install_package(family: str) -> None:
    """Make the environment of a Python peer, unless it exists and matches the pins."""
    if is_installed(family):
        return
    package = PACKAGES[family]
    print(f"installing {package.requirement} into {home() / family}", flush=True)
    uv = [sys.executable, "-m", "uv"]
    run(*uv, "venv", "--quiet", "--clear", "--python", sys.executable, home() / family)
    pinned = ["--requirements", HERE / package.requirements] if package.requirements else []
    install = [*uv, "pip", "install", "--quiet", "--no-deps", "--python", python_of(family)]
    run(*install, *pinned, package.requirement)
    # A .pth file puts its folder last, so that the peer's own packages win.
    site = sysconfig.get_path("purelib")
    (site_of(family) / LENT).write_text(f"{site}\n")
    (home() / family / STAMP).write_text(wanted(family, site))


def install_rust() -> None:
    """Build the Rust peers, including kvcore's twin."""
    manifest = HERE / "Cargo.toml"
    target = home() / "target"
    run("cargo", "build", "--release", "--locked", "--quiet", "--manifest-path", manifest,
        "--target-dir", target)  # fmt: skip


def install(families: Iterable[str]) -> None:
    """Install the peers of these families; RUST stands for all Rust peers."""
    home().mkdir(parents=True, exist_ok=True)
    for family in families:
        if family == RUST:
            install_rust()
        elif family in PACKAGES:
            install_package(family)


if __name__ == "__main__":
    install(sys.argv[1:] or [*PACKAGES, RUST])
