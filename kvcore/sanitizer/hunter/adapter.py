# SPDX-License-Identifier: Apache-2.0
"""The hunter's interface to an engine: the protocol of an adapter, and the engines that have one.

An adapter is a class in one file. Its `Engine` drives the engine's own scheduler and manager,
strictly in the order of calls of the engine's own loop, with a fake model instead of the real one.
Its `attach` reports to a sanitizer what the engine does to its block tables. The engine works
without kvcore, so that a report can include it. `driven.py` has what engines share, `kit.py` what
adapters attach with.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Protocol

import attrs

from kvcore.sanitizer import CacheGroup, UnsupportedEngine
from kvcore.sanitizer.attached import check_version
from kvcore.sanitizer.hunter.world import Arrive


class Engine(Protocol):
    """One engine in one world.

    target: the argument for `attach`. num_blocks: exclusive bound of its block ids.
    """

    target: Any
    num_blocks: int

    def arrive(self, arrival: Arrive) -> None:
        """Add a request."""

    def step(self) -> None:
        """Run one turn of the engine's loop; batches may be in flight afterwards."""

    def abort(self, name: str) -> None:
        """Abort a request, between any two steps."""

    def epoch(self) -> bool:
        """Change the weights as the engine documents. False: not possible now."""

    def reset(self) -> None:
        """Ask the engine to empty its prefix cache."""

    def finish_batches(self) -> None:
        """Make steps until no batch is in flight. No request is live then."""

    def close(self) -> None:
        """End the run."""

    @property
    def live(self) -> Iterable[str]:
        """Names of the requests that are not finished."""

    # An engine that publishes events for routers has two more. `events` gives and forgets triples:
    # "stored" or "removed", a hash, and the tenant and all tokens up to its end (None if removed).
    # `hits` gives the length that a prompt of a tenant would hit now.

    def free(self) -> int:
        """Return how many blocks a new request could get: free ones and those kept only for hits.
        At the end it must be what it was at the start.
        """


class EngineAdapter:
    """An adapter; what it does not override holds for an engine with one group of full attention
    that refuses nothing.

    NAME: that of its distribution or checkout, a space, and the tested version or commit.
    AXES: options of the engine by name, with their values, default first; `block_size` is one of
    them. MOVES: which of abort, epoch, reset, samples, priority and tenants the engine supports.
    MODULES: imported at the start, so that a broken installation is reported there.
    """

    NAME: ClassVar[str]
    AXES: ClassVar[Mapping[str, Sequence[Any]]]
    MOVES: ClassVar[frozenset[str]] = frozenset()
    MODULES: ClassVar[tuple[str, ...]] = ()
    Engine: ClassVar[Any]

    @staticmethod
    def attach(target: Any, sanitizer: Any) -> None:
        """Report to the sanitizer what the engine does from now on.

        In a hunt it is a `Watch`, whose `reached` takes the goals that only the engine shows.
        """
        raise NotImplementedError

    @classmethod
    def version(cls) -> str:
        """Return the installed version. Raises UnsupportedEngine if it was not tested."""
        name, _, tested = cls.NAME.rpartition(" ")
        if name in KNOWN and KNOWN[name].checkout:
            return commit_of(name, tested)
        for module in cls.MODULES:
            importlib.import_module(module)
        check_version(name, importlib.metadata.version(name), (tested,))
        return tested

    @staticmethod
    def refusal(error: BaseException) -> bool:
        """Return whether this error is the engine's documented refusal of a call or an option."""
        del error
        return False

    @staticmethod
    def sample_of(name: str) -> tuple[str, int]:
        """Return the request and the number of the sample that the engine calls by a name."""
        return name, 0

    @staticmethod
    def groups(engine: Any) -> list[CacheGroup]:
        """Return the facts about each group of an `Engine`."""
        return [CacheGroup(block_size=engine.world.block_size)]


@attrs.frozen
class Known:
    """An engine with an adapter. peer: the folder of its environment. checkout: the environment
    variable that names its source."""

    module: str
    peer: str | None = None
    checkout: str | None = None

    @property
    def adapter(self) -> str:
        """The adapter as `module:Class`."""
        return f"kvcore.sanitizer.engines.{self.module}:Adapter"


KNOWN = {
    "nano-vllm": Known("nano_vllm", checkout="KVCORE_NANO_VLLM"),
    "mini-sglang": Known("mini_sglang", checkout="KVCORE_MINI_SGLANG"),
    "transformers": Known("transformers", peer="transformers"),
    "vllm": Known("vllm.hunt", peer="vllm033"),
    "sglang": Known("sglang", peer="sglang"),
    "sglang-host": Known("sglang_host", peer="sglang"),
    "lmdeploy": Known("lmdeploy", peer="lmdeploy"),
    "kvcore": Known("reference"),
}


class NotInstalled(Exception):
    """An engine is missing; the message says how to install it."""


def load(name: str) -> type[EngineAdapter]:
    """Return the adapter of a known engine, or of `module:Class`. Imports the engine.

    Raises NotInstalled, UnsupportedEngine or ValueError.
    """
    if name not in KNOWN and ":" not in name:
        raise ValueError(f"no adapter for {name!r}; known are {', '.join(KNOWN)} or module:Adapter")
    if name in KNOWN:
        _check_checkout(name)
    module, _, attribute = (KNOWN[name].adapter if name in KNOWN else name).partition(":")
    try:
        found: type[EngineAdapter] = getattr(importlib.import_module(module), attribute)
        found.version()
    except (ImportError, AttributeError) as error:
        raise NotInstalled(unusable(name, str(error))) from error
    return found


def commit_of(name: str, tested: str) -> str:
    """Return the tested commit of an engine that is a checkout.

    Raises UnsupportedEngine if the checkout is at another commit, or if Git cannot tell.
    """
    folder = os.environ[KNOWN[name].checkout or ""]
    command = ["git", "-C", folder, "rev-parse", "HEAD"]
    found = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    if not found.startswith(tested):
        raise UnsupportedEngine(engine=name, found=found or "of an unknown commit", tested=tested)
    return tested


def python_of(name: str) -> str:
    """Return the interpreter that has the engine: that of its peer's environment, or this one."""
    peer = KNOWN[name].peer if name in KNOWN else None
    if peer is None:
        return sys.executable
    python = peer_python(peer)
    if not python.exists():
        raise NotInstalled(
            f"{name} is not installed in {python.parents[1]}. {how_to_install(name)}"
        )
    return str(python)


def peers_home() -> Path:
    """Return the folder outside the project where engines are installed."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("KVCORE_PEERS") or Path(cache) / "kvcore" / "peers")


def peer_python(peer: str) -> Path:
    """Return the path of the interpreter of a peer's environment, which need not exist."""
    return peers_home() / peer / "bin" / "python"


def how_to_install(name: str) -> str:
    """Return one sentence on how to install an engine, or nothing."""
    known = KNOWN.get(name)
    if known is None:
        return ""
    if known.checkout:
        return f"Set {known.checkout} to the folder of its source."
    if known.peer:
        return f"Run: python -m benches.peers.install {known.peer}"
    return ""


def is_peer(name: str) -> bool:
    """Return whether an engine has an environment of its own."""
    return name in KNOWN and KNOWN[name].peer is not None


def unusable(name: str, reason: str) -> str:
    """Return the message that an engine cannot be run, with the reason and how to repair that."""
    if is_peer(name):
        folder = peers_home() / str(KNOWN[name].peer)
        reason = f"{folder} cannot run it: {reason}. Remove that folder"
    return f"{name}: {reason}. {how_to_install(name)}".strip()


def _check_checkout(name: str) -> None:
    variable = KNOWN[name].checkout
    if variable and not Path(os.environ.get(variable, "/nowhere")).is_dir():
        raise NotInstalled(f"{name}: {variable} does not name a folder. {how_to_install(name)}")
