# SPDX-License-Identifier: Apache-2.0
"""Servers and processes that a demonstration starts on the loopback interface, and ends."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from kvcore.far.tier import BlockingStore
from kvcore.sanitizer.hunter.adapter import peer_python
from kvcore_runtime.cache.errors import TierUnusable
from kvcore_runtime.errors import load_extra
from kvcore_runtime.far.directory import DirectoryStore
from kvcore_runtime.far.mooncake_store import MooncakeStore
from kvcore_runtime.far.redis_store import RedisStore

WAIT_S = 10.0
HOST = "127.0.0.1"
KEPT_BYTES = 1 << 30
"""Memory for pages in the server that a demonstration starts."""


def end_as_by_ctrl_c() -> None:
    """Let SIGTERM and SIGHUP (`timeout`, a closed terminal) end this process as Ctrl-C does.

    By default they would end it at once, and leave what it started. A signal that is ignored, as
    SIGHUP is under `nohup`, stays so.
    """
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, signal.default_int_handler)


def free_port() -> int:
    """Find an unused port of the loopback interface."""
    with socket.create_server((HOST, 0)) as found:
        port: int = found.getsockname()[1]
    return port


def make_store(place: str) -> BlockingStore:
    """Open the store at a place of `page_store`."""
    if place.startswith("mooncake://"):
        find_mooncake()
        return MooncakeStore(place.removeprefix("mooncake://"))
    return RedisStore(place) if place.startswith("redis") else DirectoryStore(Path(place))


def find_mooncake() -> bool:
    """Let this process and its children import Mooncake from where `make engines-mooncake` puts it,
    unless it is installed here. Returns whether it can be imported.
    """
    os.environ.setdefault("MC_LOG_LEVEL", "ERROR")
    if importlib.util.find_spec("mooncake") is None:
        name = f"python{sys.version_info.major}.{sys.version_info.minor}"
        site = peer_python("mooncake").parents[1] / "lib" / name / "site-packages"
        if not (site / "mooncake").is_dir():
            return False
        sys.path.append(str(site))
        paths = (os.environ.get("PYTHONPATH"), str(site))
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    return True


@contextlib.contextmanager
def mooncake_store() -> Iterator[str]:
    """Provide a Mooncake store as a place for pages: a master and a process that keeps them.

    Raises PackageMissing, TierUnusable.
    """
    port = free_port()
    commands = mooncake_master(port), mooncake_keeper(port, KEPT_BYTES)
    with ended(quiet(commands[0])), ended(quiet(commands[1])):
        place = f"mooncake://{HOST}:{port}"
        wait_for(place)
        print(f"pages go through Mooncake, whose master is at port {port}", flush=True)
        yield place


def quiet(command: list[str]) -> subprocess.Popen[bytes]:
    """Start a process whose output nobody sees."""
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def mooncake_master(port: int) -> list[str]:
    """Return the command of a master at a port of the loopback interface. Raises PackageMissing."""
    metrics = ["--metrics_host", HOST, "--metrics_port", str(free_port())]
    return [_mooncake("mooncake_master"), "--rpc_address", HOST, "--rpc_port", str(port), *metrics]


def mooncake_keeper(port: int, num_bytes: int) -> list[str]:
    """Return the command of a process that keeps pages for the master at a port.

    Raises PackageMissing.
    """
    where = ["--host", HOST, "--port", str(free_port()), "--metadata_server", "P2PHANDSHAKE"]
    master = ["--master_server_address", f"{HOST}:{port}"]
    size = ["--global_segment_size", str(num_bytes)]
    return [_mooncake("mooncake_client"), *where, *master, *size]


def _mooncake(program: str) -> str:
    """Return the path of a program in Mooncake's package. Raises PackageMissing."""
    find_mooncake()
    module = load_extra("mooncake", what="pages in Mooncake", package="mooncake", extra="mooncake")
    return str(Path(module.__path__[0], program))


@contextlib.contextmanager
def page_store(*, directory: bool = False) -> Iterator[str]:
    """Provide a place for pages that all processes can reach, and remove it at the end.

    The place is a Redis or Valkey server if one is installed, else a directory.
    """
    program = None if directory else shutil.which("redis-server") or shutil.which("valkey-server")
    if program is None:
        with tempfile.TemporaryDirectory() as folder:
            print("pages go through files", flush=True)
            yield folder
        return
    port = free_port()
    options = f"--port {port} --bind {HOST} --appendonly no --maxmemory {KEPT_BYTES}".split()
    with ended(subprocess.Popen([program, *options, "--save", ""], stdout=subprocess.DEVNULL)):
        url = f"redis://{HOST}:{port}/0"
        wait_for(url)
        print(f"pages go through {Path(program).name} at port {port}", flush=True)
        yield url


@contextlib.contextmanager
def python_process(module: str, arguments: Sequence[str]) -> Iterator[subprocess.Popen[str]]:
    """Run a module in a Python process with pipes, shielded from Ctrl-C, and kill it at the end."""
    process = subprocess.Popen(
        [sys.executable, "-m", module, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        process.kill()
        with contextlib.suppress(BrokenPipeError):
            process.communicate()


@contextlib.contextmanager
def ended(process: subprocess.Popen[bytes]) -> Iterator[subprocess.Popen[bytes]]:
    """Terminate a process at the end, or kill it if it does not stop in time."""
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(WAIT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def wait_for(place: str) -> None:
    """Wait until the store at a place answers. Raises TierUnusable."""
    end = time.monotonic() + WAIT_S
    while True:
        try:
            make_store(place).close()
            return
        except TierUnusable:
            if time.monotonic() > end:
                raise
            time.sleep(0.02)
