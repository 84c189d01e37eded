# SPDX-License-Identifier: Apache-2.0
"""A Mooncake store on loopback: its master, and a process that keeps pages, started by tests."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import time
from collections.abc import Iterator

from kvcore_runtime.demos.processes import (
    HOST,
    make_store,
    mooncake_keeper,
    mooncake_master,
    quiet,
    wait_for,
)

from kvcore.far.tier import FarStatus
from tests.runtime.far.servers import WAIT_S, free_port

KEPT_BYTES = 256 << 20


class Mooncake:
    """A master at a port of its own, and a keeper. keeps: bytes of pages."""

    def __init__(self, keeps: int = KEPT_BYTES) -> None:
        self.port, self._keeps = free_port(), keeps
        self.start_master()
        self.start_keeper()

    @property
    def address(self) -> str:
        return f"{HOST}:{self.port}"

    @property
    def place(self) -> str:
        return f"mooncake://{self.address}"

    def start_master(self) -> None:
        self.master = quiet(mooncake_master(self.port))
        wait_for(self.place)

    def start_keeper(self) -> None:
        """Start a keeper, and wait until it keeps a page."""
        self.keeper = quiet(mooncake_keeper(self.port, self._keeps))
        store, end = make_store(self.place), time.monotonic() + WAIT_S
        name, page = f"kept {time.monotonic()}", memoryview(bytearray(8))
        while store.put([name], [page]) != [FarStatus.OK]:
            assert time.monotonic() < end, "a keeper of Mooncake does not answer"
            time.sleep(0.02)
        store.close()

    def kill(self, process: subprocess.Popen[bytes]) -> None:
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGCONT)
        process.kill()
        process.wait()


@contextlib.contextmanager
def mooncake(keeps: int = KEPT_BYTES) -> Iterator[Mooncake]:
    server = Mooncake(keeps)
    try:
        yield server
    finally:
        server.kill(server.keeper)
        server.kill(server.master)
