# SPDX-License-Identifier: Apache-2.0
"""The doors of the runtime: pages of a far tier, and prompts files.

The property is that of doors.py.
"""

from __future__ import annotations

from functools import cache

from kvcore_runtime.errors import KvcoreRuntimeError
from kvcore_runtime.generate.prompts import read_prompts
from kvcore_runtime.model.sampling import Sampling

from kvcore.far.page import PAYLOAD_START, PageOwner, begin_page, check_page, seal_page
from kvcore.far.tier import FarStatus
from kvcore.types.keys import make_key
from tests.bytes.damage import Damager, split_at, split_words
from tests.bytes.doors import Door, raised
from tests.bytes.texts import JSON_WORDS, names, place

KEY = make_key(bytes(range(32)), 0)
PLACE = PageOwner(bytes(range(32)))
PAGE_BYTES = 40
PROMPTS = (
    b'{"id": "a", "turns": ["one", "two"], "system": "be brief", "max_tokens": 8}\n',
    b'{"id": "b", "turns": ["one"], "n": 2, "temperature": 0.5, "top_k": 4, "seed": 7}\n',
    b'{"id": "c", "turns": ["one"], "top_p": 0.9, "stop": ["end", "\\n"]}\n',
)


@cache
def page() -> bytes:
    """Return a page as a tier keeps it."""
    slot = bytearray(PAYLOAD_START) + bytes(range(PAGE_BYTES))
    begin_page(memoryview(slot), PLACE.identity, KEY)
    seal_page(memoryview(slot))
    return bytes(slot)


def page_damage() -> Damager:
    """Pages whose magic, identity, key, codec, sizes, checksum and content are changed."""
    return Damager([split_at(page(), (8, 40, 76, 77, 80, 88, 96, 112, PAYLOAD_START))])


def read_page(data: bytes) -> bool:
    """Check a page, as it is and with the checksum that fits it."""
    resealed = bytearray(data)
    if len(data) >= PAYLOAD_START:
        seal_page(memoryview(resealed))
    return check(bytearray(data)) and check(resealed)


def check(slot: bytearray) -> bool:
    """Tell whether a slot is refused; check that any other is this name's page."""
    if check_page(memoryview(slot), PLACE.name(KEY), len(slot)) is not FarStatus.OK:
        return True
    assert (bytes(slot[8:24]), bytes(slot[40:76])) == (PLACE.identity[:16], KEY)
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
