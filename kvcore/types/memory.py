# SPDX-License-Identifier: Apache-2.0
"""Checks that pools fit in memory before they are made.

Why: a system that overcommits memory kills the process when the pages are written, and in the twin
a failed allocation ends it at once. The size of a pool differs between the languages.
Twin: rust/src/types/memory.rs.
"""

from __future__ import annotations

from kvcore.types.errors import PoolTooLarge

BLOCK_BYTES = 172
"""Peak bytes per block while a pool with a quarantine is made; 144 remain."""
SMALL_BYTES = 2**26
"""Needs up to this size are not compared with the memory of the machine."""
MEMINFO, CGROUP = "/proc/meminfo", "/sys/fs/cgroup/memory.max"


def check_memory(num_blocks: int) -> None:
    """Raise PoolTooLarge unless pools of this many blocks fit."""
    needed = BLOCK_BYTES * num_blocks
    available = room_for(needed)
    if available < needed:
        raise PoolTooLarge(num_blocks=num_blocks, needed_bytes=needed, available_bytes=available)


def room_for(needed: int) -> int:
    """Return how many of these bytes are available; if not all, the result may be too low."""
    reported = num_available() if needed > SMALL_BYTES else []
    return num_reservable(min([needed, *reported]))


def num_reservable(size: int) -> int:
    """Return `size`, or its largest half, quarter and so on that can be allocated."""
    while size:
        try:
            bytes(size)  # zeros are not written, so no page is used
        except (MemoryError, OverflowError):
            size //= 2
        else:
            break
    return size


def num_available() -> list[int]:
    """Return the bytes available to this process, as far as the system reports them."""
    found = []
    sizes = {name: size for name, size, *_ in map(str.split, _read(MEMINFO).splitlines())}
    if "MemAvailable:" in sizes:
        found.append(1024 * (int(sizes["MemAvailable:"]) + int(sizes.get("SwapFree:", 0))))
    most = _read(CGROUP).strip()
    if most.isdigit():
        found.append(int(most))
    return found


def _read(path: str) -> str:
    try:
        with open(path, encoding="ascii") as file:  # noqa: PTH123 - pathlib is slow to import
            return file.read()
    except OSError:
        return ""
