# SPDX-License-Identifier: Apache-2.0
"""The environment of the adapter for vLLM, outside the project, where vLLM is installed.

Run: python -m tests.engines.vllm.environment [OPTION OF PYTEST ...]. Installs vLLM first
(benches/peers/install.py) and fetches its source distribution, whose tests of the scheduler and the
manager then run over kvcore, each against its expected outcome (vllm_outcomes.txt), after the
adapter's own. Last, those of hits run over vLLM's own manager beside kvcore (vllm_hits.py).
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

from benches.peers import install
from tests.engines.vllm.vllm_outcomes import FOLDER, OUTCOMES, read_outcomes

FAMILY = "vllm033"
VERSION = "0.33.0"
SHA256 = "f4c33c2503d52bb411146afa9618a4f48bed68912f617e6803ac8d76e4c74112"
ROOT = Path(__file__).parents[3]
HERE = Path(__file__).parent
ADAPTER = ROOT / "engines" / "vllm"
REQUIREMENTS = ROOT / "benches" / "peers" / "vllm_tests.txt"
OF_HITS = ("test_mamba_eagle_resume_checkpoint.py", "test_partial_prefix_cache_hits.py")
ABSENT = "vLLM 0.33.0 is not in this environment: make engines-vllm-tests runs this"


def folder() -> Path:
    """Return the folder of vLLM's tests, and of what they need besides vLLM."""
    return install.home() / f"{FAMILY}-tests"


def is_fetched() -> bool:
    """Tell whether vLLM's tests are there."""
    return (folder() / "tree" / "tests").exists()


def fetch() -> None:
    """Fetch vLLM's tests, unless they are there. Raises CalledProcessError."""
    if is_fetched():
        return
    print(f"fetching the tests of vLLM {VERSION} into {folder()}", flush=True)
    shutil.rmtree(folder(), ignore_errors=True)
    packages, part = folder() / "packages", folder() / "part"
    uv = [sys.executable, "-m", "uv", "pip", "install", "--quiet", "--no-deps"]
    where = ["--python", install.python_of(FAMILY), "--target", packages]
    install.run(*uv, *where, "--requirements", REQUIREMENTS)
    # pip asks the build for the metadata of what it downloads: torch is here, nothing is compiled.
    build = {"VLLM_TARGET_DEVICE": "empty", "VLLM_VERSION_OVERRIDE": VERSION}
    named = ["--no-deps", "--no-build-isolation", "--no-binary", "vllm", f"vllm=={VERSION}"]
    subprocess.run(
        [sys.executable, "-m", "pip", "download", "--quiet", "--dest", str(part), *named],
        env=os.environ | build | {"PYTHONPATH": str(packages)},
        check=True,
    )
    archive = part / f"vllm-{VERSION}.tar.gz"
    found = hashlib.sha256(archive.read_bytes()).hexdigest()
    if found != SHA256:
        raise SystemExit(f"{archive.name} has the digest {found}, not {SHA256}")
    with tarfile.open(archive) as opened:
        under = [each for each in opened if each.name.startswith(f"vllm-{VERSION}/tests/")]
        opened.extractall(part, under, filter="data")
    (part / f"vllm-{VERSION}").rename(folder() / "tree")
    shutil.rmtree(part)


def run_there(folder: Path, paths: list[Path], *arguments: str) -> int:
    """Run pytest in vLLM's environment, in a folder, with these paths; returns its status."""
    everywhere = [*paths, ADAPTER, ROOT]
    return subprocess.run(
        [str(install.python_of(FAMILY)), "-m", "pytest", "-p", "no:cacheprovider", *arguments],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(map(str, everywhere))},
        check=False,
    ).returncode


def run_own_tests(*options: str) -> int:
    """Run the adapter's own tests; returns pytest's status."""
    return run_there(ROOT, [], "-m", "vllm", *options, str(HERE))


def run_vllm_tests(*options: str) -> int:
    """Run vLLM's tests over kvcore; returns 0 if each has its expected outcome."""
    files = sorted({name.partition("::")[0] for name in read_outcomes(OUTCOMES)})
    return run_with("vllm_plugin", *options, *files)


def compare_hits(*options: str) -> int:
    """Run vLLM's tests of hits over its own manager, and compare kvcore's hits with its hits;
    returns 0 if each length is the same or differs by a rule that is listed (vllm_outcomes.py).
    """
    return run_with("vllm_hits", *options, *(f"{FOLDER}prefix_cache/{name}" for name in OF_HITS))


def run_with(plugin: str, *arguments: str) -> int:
    """Run vLLM's tests with a plugin of pytest, without vLLM's conftest; returns its status."""
    tree = folder() / "tree"
    alone = ["-c", os.devnull, "--rootdir", str(tree), "--noconftest", "-p", plugin]
    paths = [tree, folder() / "packages", HERE]
    return run_there(tree, paths, *alone, "-q", "--tb=native", *arguments)


if __name__ == "__main__":
    install.install([FAMILY])
    fetch()
    parts = run_own_tests, run_vllm_tests, compare_hits
    sys.exit(max([part(*sys.argv[1:]) for part in parts]))
