# SPDX-License-Identifier: Apache-2.0
"""LMCache 0.5.6, L1Manager: a reader whose lease has expired gives up the lease of another reader.

Two readers lease one object; the first one comes back late. Exits with 1 as long as the bug exists.
"""

from __future__ import annotations

import importlib
import logging
import sys
import time
from typing import Any

torch: Any = importlib.import_module("torch")
LEASE_SECONDS = 1


def of(module: str, name: str) -> Any:
    """Return a name of a module of LMCache's server."""
    return getattr(importlib.import_module(f"lmcache.v1.distributed.{module}"), name)


def manager() -> Any:
    """Return a manager of host memory with short leases."""
    memory = of("config", "L1MemoryManagerConfig")(1 << 20, True, init_size_in_bytes=1 << 20)
    config = of("config", "L1ManagerConfig")(memory, read_ttl_seconds=LEASE_SECONDS)
    return of("l1_manager", "L1Manager")(config)


def late_reader(seconds: float) -> str:
    """Return what the second reader finds after the first one, which takes this long, has
    finished.
    """
    host, key = manager(), of("api", "ObjectKey")(b"chunk", "model", 0)
    layout = of("api", "MemoryLayoutDesc")([torch.Size([16])], [torch.float32])
    host.reserve_write([key], [False], layout)
    host.finish_write([key])
    host.reserve_read([key])  # by the first reader
    time.sleep(seconds)
    host.reserve_read([key])  # by the second reader, whose lease begins now
    host.finish_read([key])  # by the first reader
    read, _ = host.unsafe_read([key])[key]
    freed = host.delete([key])[key]
    host.close()
    return f"its read is {read.name}, to free the memory is {freed.name}"


if __name__ == "__main__":
    logging.disable(logging.CRITICAL)
    held = late_reader(0)
    assert held == "its read is SUCCESS, to free the memory is KEY_IS_LOCKED", held
    found = late_reader(LEASE_SECONDS + 0.5)
    if found != held:
        print(f"with a lease of its own: {found}")
    sys.exit(found != held)
