# SPDX-License-Identifier: Apache-2.0
"""Each bug of docs/found.md that a program of its own shows is shown again, if the project with the
bug is installed.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from benches.peers.install import is_installed, python_of

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "found.md"
SHOWN = {
    "lmcache_forgets_what_it_keeps": [
        "LFU: 3 of 4 chunks, [1, 2, 3], outlive 20 later ones",
        "LFU: KeyError in the lookup of chunk 1, which is stored",
    ],
    "lmcache_gives_up_anothers_lease": [
        "with a lease of its own: its read is KEY_NOT_READABLE, to free the memory is SUCCESS"
    ],
    "aibrix_remembers_every_key": ["S3FIFO: 5,000 keys are kept for 10 blocks"],
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SHOWN)
def test_a_found_bug_is_shown_again(name: str) -> None:
    family = name.split("_")[0]
    if not is_installed(family):
        pytest.skip(f"{family} is not installed: python -m benches.peers.install {family}")
    program = ROOT / "tests" / "sanitizer" / "found" / f"{name}.py"
    ran = subprocess.run(
        [python_of(family), program], capture_output=True, text=True, check=False, timeout=300
    )
    assert ran.returncode == 1, ran.stderr
    assert ran.stdout.splitlines()[-len(SHOWN[name]) :] == SHOWN[name]


def test_the_page_names_each_program_and_no_other() -> None:
    programs = {path.stem for path in (ROOT / "tests" / "sanitizer" / "found").glob("*.py")}
    assert programs == set(SHOWN)
    text = PAGE.read_text()
    assert all(f"`{name}.py`" in text for name in SHOWN)
