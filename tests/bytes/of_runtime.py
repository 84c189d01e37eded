# SPDX-License-Identifier: Apache-2.0
"""The doors of the runtime: pages in a directory, and prompts files.

The property is that of doors.py.
"""

from __future__ import annotations

import hashlib
import tempfile
from functools import cache
from pathlib import Path

import torch
from kvcore_runtime.cache.directory import DirectoryTier
from kvcore_runtime.cache.errors import TierError
from kvcore_runtime.errors import KvcoreRuntimeError
from kvcore_runtime.generate.prompts import read_prompts
from kvcore_runtime.model.sampling import Sampling
from torch import Tensor

from kvcore.types.keys import make_key
from tests.bytes.damage import Damager, split_at, split_words
from tests.bytes.doors import Door, raised
from tests.bytes.texts import JSON_WORDS, names, place

KEY = make_key(bytes(range(32)), 0)
PAGE_BYTES = 40
PROMPTS = (
    b'{"id": "a", "turns": ["one", "two"], "system": "be brief", "max_tokens": 8}\n',
    b'{"id": "b", "turns": ["one"], "n": 2, "temperature": 0.5, "top_k": 4, "seed": 7}\n',
    b'{"id": "c", "turns": ["one"], "top_p": 0.9, "stop": ["end", "\\n"]}\n',
)


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


def read_prompts_file(data: bytes) -> bool:
    """Read a prompts file."""
    place().write_bytes(data)

    def read() -> None:
        for prompt in read_prompts(place(), Sampling()):
            "".join((prompt.prompt_id, *prompt.turns, prompt.system or "")).encode()

    return names(raised(read, KvcoreRuntimeError), str(place()))


RUNTIME_DOORS = [
    Door(name="pages", make=page_damage, read=read_page),
    Door(
        name="prompts",
        make=lambda: Damager([*map(split_words, PROMPTS)], JSON_WORDS),
        read=read_prompts_file,
    ),
]
