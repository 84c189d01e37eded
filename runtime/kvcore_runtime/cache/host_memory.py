# SPDX-License-Identifier: Apache-2.0
"""Memory for a tier: on the CPU in huge pages if the system has them, pinned with a GPU.

A copy of randomly placed blocks touches a new place in memory each time; with 2 MiB pages instead
of 4 KiB ones it is within a few percent of one contiguous copy, which is faster too
(benches/copies.py measures both). Huge pages are only a hint: without them everything works, but
slower.
"""

from __future__ import annotations

import contextlib
import math
import mmap

import torch
from torch import Tensor

from kvcore_runtime.cache.errors import NoMemory

HUGE_PAGE_BYTES = 2 * 1024 * 1024
# Smaller tiers gain nothing and would waste most of a page.
HUGE_BYTES_MIN = 4 * HUGE_PAGE_BYTES


def allocate(
    shape: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
    *,
    pin: bool = False,
    fill: float = 0.0,
    shared: bool = False,
) -> Tensor:
    """Allocate a contiguous tensor of one value.

    pin: use pinned host memory, which needs a GPU. shared: on a CPU, share it with processes forked
    later; the system may not use huge pages for such memory. Raises NoMemory.
    """
    num_bytes = math.prod(shape) * dtype.itemsize
    huge = num_bytes >= HUGE_BYTES_MIN and _has_huge_pages()
    if device.type == "cpu" and not pin and num_bytes and (huge or shared):
        storage = _huge(num_bytes, shared).view(dtype).view(shape)
        storage.fill_(fill)
        return storage
    return torch.full(shape, fill, dtype=dtype, device=device, pin_memory=pin)


def _has_huge_pages() -> bool:
    return hasattr(mmap, "MADV_HUGEPAGE")


def _huge(num_bytes: int, shared: bool) -> Tensor:
    """Return untouched bytes that begin at a huge page; the tensor keeps the mapping alive."""
    mode = mmap.MAP_SHARED if shared else mmap.MAP_PRIVATE
    try:
        mapping = mmap.mmap(-1, num_bytes + HUGE_PAGE_BYTES, mode | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError) as error:
        raise NoMemory(num_bytes=num_bytes, reason=str(error)) from None
    with contextlib.suppress(OSError):  # The kernel has no huge pages; ordinary ones work too.
        mapping.madvise(mmap.MADV_HUGEPAGE)
    raw = torch.frombuffer(mapping, dtype=torch.uint8)
    start = -raw.data_ptr() % HUGE_PAGE_BYTES
    return raw[start : start + num_bytes]
