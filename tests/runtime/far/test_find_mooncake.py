# SPDX-License-Identifier: Apache-2.0
"""Mooncake is found where it is installed outside the project, by this process and its children."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

import pytest
from kvcore_runtime.demos import apart
from kvcore_runtime.demos.processes import find_mooncake, mooncake_master

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("mooncake") is not None, reason="Mooncake is installed here"
)


@pytest.fixture(autouse=True)
def restored(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Restore the path and environment at the end; peers are in a folder of the test."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "modules", {**sys.modules})
    monkeypatch.setenv("MC_LOG_LEVEL", "ERROR")
    monkeypatch.setenv("PYTHONPATH", "/elsewhere")
    monkeypatch.setenv("KVCORE_PEERS", str(tmp_path))


def test_the_package_of_the_peers_is_found(tmp_path: Path) -> None:
    name = f"python{sys.version_info.major}.{sys.version_info.minor}"
    site = tmp_path / "mooncake" / "lib" / name / "site-packages"
    (site / "mooncake").mkdir(parents=True)
    (site / "mooncake" / "__init__.py").touch()
    assert mooncake_master(7)[0] == str(site / "mooncake" / "mooncake_master")
    assert os.environ["PYTHONPATH"].split(os.pathsep) == ["/elsewhere", str(site)]
    assert find_mooncake()
    assert sys.path.count(str(site)) == 1


def test_without_it_the_demonstration_says_how_to_install_it(
    capfd: pytest.CaptureFixture[str],
) -> None:
    assert not find_mooncake()
    assert apart.main(["--tiny", "--mooncake"]) == 1
    written = capfd.readouterr().err.strip()
    assert written.count("\n") == 0
    assert "pip install 'kvcore-runtime[mooncake]'" in written
    assert "make engines-mooncake" in written
