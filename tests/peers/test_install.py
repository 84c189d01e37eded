# SPDX-License-Identifier: Apache-2.0
"""An environment of a peer is installed anew only if it no longer matches the pins."""

from __future__ import annotations

import sysconfig
from pathlib import Path
from typing import Any

import pytest

from benches.peers import install
from benches.peers.install import PACKAGES, Package

FAMILY = "sglang"


class Commands:
    """The commands that were to run; `uv venv` makes the folders that an environment has."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def __call__(self, *command: Any) -> None:
        """Note a command by its name."""
        self.names.append(command[3])
        if command[3] == "venv":
            install.site_of(FAMILY).mkdir(parents=True, exist_ok=True)


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Commands:
    """Return the commands of installations into an empty folder."""
    monkeypatch.setenv("KVCORE_PEERS", str(tmp_path / "peers"))
    noted = Commands()
    monkeypatch.setattr(install, "run", noted)
    return noted


def lend(monkeypatch: pytest.MonkeyPatch, site: Path) -> None:
    """Let the packages of the environment that installs lie in another folder."""
    site.mkdir()
    path = sysconfig.get_path
    monkeypatch.setattr(
        sysconfig, "get_path", lambda *args, **kw: path(*args, **kw) if kw else str(site)
    )


def test_another_checkout_uses_the_environment_as_long_as_its_packages_are_there(
    commands: Commands, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with monkeypatch.context() as first:
        lend(first, tmp_path / "one")
        install.install([FAMILY])
    assert commands.names == ["venv", "pip"]
    lend(monkeypatch, tmp_path / "two")
    install.install([FAMILY])
    assert commands.names == ["venv", "pip"]
    (tmp_path / "one").rmdir()
    install.install([FAMILY])
    assert commands.names == ["venv", "pip"] * 2
    assert (install.site_of(FAMILY) / install.LENT).read_text() == f"{tmp_path / 'two'}\n"


def test_other_pins_and_an_installation_that_broke_off_are_installed_anew(
    commands: Commands, monkeypatch: pytest.MonkeyPatch
) -> None:
    install.install([FAMILY])
    assert install.is_installed(FAMILY)
    (install.home() / FAMILY / install.STAMP).unlink()
    assert not install.is_installed(FAMILY)
    install.install([FAMILY])
    assert install.is_installed(FAMILY)
    monkeypatch.setitem(PACKAGES, FAMILY, Package("sglang==0.5.24"))
    assert not install.is_installed(FAMILY)
    install.install([FAMILY])
    assert commands.names == ["venv", "pip"] * 3
