# SPDX-License-Identifier: Apache-2.0
"""Servers and processes that a demonstration starts on the loopback interface, and ends."""

from __future__ import annotations

import contextlib
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from kvcore.far.tier import BlockingStore
from kvcore_runtime.cache.errors import TierUnusable
from kvcore_runtime.far.directory import DirectoryStore
from kvcore_runtime.far.redis_store import RedisStore

WAIT_S = 10.0


def free_port() -> int:
    """Find an unused port of the loopback interface."""
    with socket.create_server(("127.0.0.1", 0)) as found:
        port: int = found.getsockname()[1]
    return port


def make_store(place: str) -> BlockingStore:
    """Open the store at a place of `page_store`."""
    return RedisStore(place) if place.startswith("redis") else DirectoryStore(Path(place))


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
    options = f"--port {port} --bind 127.0.0.1 --appendonly no --maxmemory 1gb".split()
    with ended(subprocess.Popen([program, *options, "--save", ""], stdout=subprocess.DEVNULL)):
        url = f"redis://127.0.0.1:{port}/0"
        _wait_for(url)
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


def _wait_for(url: str) -> None:
    end = time.monotonic() + WAIT_S
    while True:
        try:
            RedisStore(url)
            return
        except TierUnusable:
            if time.monotonic() > end:
                raise
            time.sleep(0.02)
