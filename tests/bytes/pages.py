# SPDX-License-Identifier: Apache-2.0
"""The doors of the runtime: pages in a directory, and batches that are applied to a cache.

Rules: as in doors.py.
"""

from __future__ import annotations

import hashlib
import tempfile
from functools import cache
from pathlib import Path

import torch
from kvcore_runtime.cache.directory import DirectoryTier
from kvcore_runtime.cache.errors import TierError
from torch import Tensor

from kvcore.hashing.block_hash import make_key
from tests.bytes.damage import Damager, split_at
from tests.bytes.doors import Door, raised

KEY = make_key(bytes(range(32)), 0)
PAGE_BYTES = 40


@cache
def tier() -> DirectoryTier:
    """A directory in memory."""
    memory = Path("/dev/shm")
    folder = tempfile.mkdtemp(dir=memory if memory.is_dir() else None)
    return DirectoryTier(Path(folder) / "blocks", "a model")


@cache
def page_file() -> bytes:
    """A file as the tier writes it."""
    tier().store(KEY, torch.arange(PAGE_BYTES, dtype=torch.uint8))
    return tier().file(KEY).read_bytes()


def page_damage() -> Damager:
    """Pages whose magic, sizes, key, description, content and checksum are changed."""
    data = page_file()
    return Damager([split_at(data, (8, 12, 20, 56, 63, len(data) - 32))])


def read_page(data: bytes) -> bool:
    """Load a file, as it is and with the checksum that fits it; the page is what was stored."""
    return load(data) and load(data[:-32] + hashlib.sha256(data[:-32]).digest())


def load(data: bytes) -> bool:
    file = tier().file(KEY)
    file.write_bytes(data)
    pages: list[Tensor] = []
    error = raised(lambda: pages.append(tier().load(KEY, PAGE_BYTES)), TierError)
    if error is not None:
        assert KEY.hex() in str(error)
        return True
    file.unlink()
    tier().store(KEY, pages[0])
    assert file.read_bytes() == data
    return False


PAGE_DOORS = [Door(name="pages", make=page_damage, read=read_page)]
