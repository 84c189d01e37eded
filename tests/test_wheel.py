# SPDX-License-Identifier: Apache-2.0
"""One abi3 wheel, built once, loads and works in every Python it promises to.

Each interpreter gets a folder of its own, far from the source tree, into which uv installs the
wheel with what it says it depends on, as a user's pip does: so this asks the package registry.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from zipfile import ZipFile

import pytest

ROOT = Path(__file__).parents[1]
VERSIONS = ("3.11", pytest.param("3.12", marks=pytest.mark.slow), "3.13")

DRIVE = """
import sys
from kvcore import Config, KVCacheManager, Request
import kvcore._rust

manager = KVCacheManager(Config(num_blocks=5, block_size=2), backend="rust")
manager.add_request(Request("a", [1, 2, 3, 4]))
assert manager.allocate_slots("a", 4)
batch = manager.take_batch()
assert batch.number >= 0
kinds = [type(command).__name__ for command in batch]
manager.free("a")
manager.remove_request("a")
manager.add_request(Request("b", [1, 2, 3, 4]))
hit = manager.get_computed_blocks("b")
manager.check()
print(*sys.version_info[:2], kinds.count("Allocate"), hit.num_tokens, kvcore._rust.__file__)
"""


def find_python(version: str) -> str | None:
    """Return a working interpreter of this version: this one, one on PATH, or pyenv's."""
    candidates: list[str | Path] = [sys.executable, f"python{version}"]
    if shutil.which("pyenv"):
        reported = subprocess.run(["pyenv", "root"], capture_output=True, text=True, check=False)
        kept = Path(reported.stdout.strip(), "versions").glob(f"{version}.*/bin/python{version}")
        candidates += sorted(kept)
    code = "import sys, ensurepip, zlib; print('%d.%d' % sys.version_info[:2])"
    for candidate in candidates:
        try:
            reported = subprocess.run(
                [candidate, "-c", code], capture_output=True, text=True, check=False
            )
        except OSError:
            continue
        if reported.stdout.strip() == version:
            return str(candidate)
    return None


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the wheel of this source tree, in release, from the build folder of the twin."""
    out = tmp_path_factory.mktemp("wheel")
    maturin = Path(sys.executable).with_name("maturin")
    command = [str(maturin), "build", "--release", "--locked", "--quiet", "--out", str(out)]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    (found,) = out.glob("*.whl")
    return found


def test_the_wheel_says_that_it_fits_each_python_from_3_11_on(wheel: Path) -> None:
    assert wheel.name.split("-")[2:4] == ["cp311", "abi3"]


def test_the_wheel_has_what_is_no_python(wheel: Path) -> None:
    others = {path.name for path in (ROOT / "kvcore" / "view").glob("*.[cj]s*")}
    packed = {Path(name).name for name in ZipFile(wheel).namelist() if "kvcore/view/" in name}
    assert packed >= others >= {"page.css", "page.js"}


@pytest.mark.parametrize("version", VERSIONS)
def test_the_wheel_works_in(version: str, wheel: Path, tmp_path: Path) -> None:
    python = find_python(version)
    if python is None:
        pytest.skip(f"no working python{version} on PATH or in pyenv")
    target = tmp_path / "site"
    install = [sys.executable, "-m", "uv", "pip", "install", "--quiet", "--python", python]
    install += ["--target", str(target), str(wheel)]
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    subprocess.run(install, env=environment, cwd=tmp_path, check=True)
    environment["PYTHONPATH"] = str(target)
    command = [python, "-S", "-W", "error", "-c", DRIVE]
    reported = subprocess.run(
        command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert reported.returncode == 0, reported.stderr
    major, minor, allocated, hit, file = reported.stdout.split()
    assert f"{major}.{minor}" == version
    assert (allocated, hit) == ("2", "2")
    assert Path(file).is_relative_to(target)
