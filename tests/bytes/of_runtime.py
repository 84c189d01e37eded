# SPDX-License-Identifier: Apache-2.0
"""The doors of the runtime: pages of a far tier, steps of ranks, hand-overs, events from the wire,
and prompts files.

The property is that of doors.py.
"""

from __future__ import annotations

import zlib
from functools import cache

import numpy as np
from kvcore_runtime.errors import KvcoreRuntimeError
from kvcore_runtime.far.handover import BadHandover, Handover, read_handover
from kvcore_runtime.generate.prompts import read_prompts
from kvcore_runtime.model.sampling import Sampling
from kvcore_runtime.ranks.errors import BadStep
from kvcore_runtime.ranks.step_wire import (
    CHECKSUM_AT,
    HEADER,
    RankPass,
    RankStep,
    decode_step,
    encode_step,
)

from kvcore.codec import decode
from kvcore.codec.event_msgpack import encode_events
from kvcore.event_index.errors import DamagedEvents
from kvcore.event_index.index import Applied, EventIndex
from kvcore.far.page import PAYLOAD_START, PageOwner, begin_page, check_page, seal_page
from kvcore.far.tier import FarStatus
from kvcore.types.commands import COLUMNS, Batch
from kvcore.types.events import AllBlocksCleared
from kvcore.types.keys import KEY_SIZE, make_key
from tests.bytes.damage import Damager, Sample, split_at, split_words
from tests.bytes.doors import Door, raised, states
from tests.bytes.texts import JSON_WORDS, names, place

KEY = make_key(bytes(range(32)), 0)
PLACE = PageOwner(bytes(range(32)))
PAGE_BYTES = 40
FRAME_BYTES_MAX = 600
CLEARED = encode_events((AllBlocksCleared(),), 0.0)
HANDOVER = Handover(request_id="r", num_tokens=404, first_token=7, identity="ab" * 32)
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


def step_samples() -> list[Sample]:
    """Return a step of narrow numbers, one of wide ones, and the last one of a leader."""
    columns, counts = np.arange(2 * len(COLUMNS), dtype="<u4"), np.arange(3, dtype=np.uint32)
    found = []
    for most in (7, 1 << 20):
        tokens = np.full(6, most, np.uint32)
        computes = RankPass(
            rows=counts, starts=counts, ends=counts + 2, tokens=tokens, wanted=counts + 1
        )
        batch = Batch(5, bytearray(columns), bytes(KEY_SIZE), 1)
        found.append(RankStep(batch=batch, computes=computes, skips=most > 7))
    found.append(RankStep(batch=Batch(9, bytearray(), b""), ends=True))
    data = [encode_step(each) for each in found]
    header = (4, 6, 8, *range(16, HEADER.size, 4))
    return [split_at(each, (*header, *range(HEADER.size, len(each), 4))) for each in data]


def read_step(data: bytes) -> bool:
    """Decode a step, as it is and with the checksum that fits it."""
    resealed = bytearray(data)
    if len(data) >= HEADER.size:
        resealed[CHECKSUM_AT] = bytes(4)
        resealed[CHECKSUM_AT] = zlib.crc32(resealed).to_bytes(4, "little")
    return refuses_step(data) and refuses_step(bytes(resealed))


def refuses_step(data: bytes) -> bool:
    """Tell whether a step is refused; check that any other is the same after another encoding."""
    taken: list[RankStep] = []
    if raised(lambda: taken.append(decode_step(data)), BadStep) is not None:
        return True
    again = [*taken, decode_step(encode_step(taken[0]))]
    flags = [(each.skips, each.ends, each.computes is None) for each in again]
    batches = [(each.batch.number, each.batch.epoch, each.batch.keys) for each in again]
    assert (flags[0], batches[0]) == (flags[1], batches[1])
    assert again[0].batch.buffer == again[1].batch.buffer
    if again[0].computes is not None and again[1].computes is not None:
        parts = zip(again[0].computes.parts, again[1].computes.parts, strict=True)
        assert all(np.array_equal(*each) for each in parts)
    return False


def read_handovers(data: bytes) -> bool:
    """Read a hand-over; what is taken is the same after another encoding."""
    taken: list[Handover] = []
    if raised(lambda: taken.append(read_handover(data)), BadHandover) is not None:
        return True
    assert read_handover(taken[0].to_json()) == taken[0]
    return False


@cache
def frames() -> tuple[bytes, ...]:
    """Return messages with the events of the project's traces, in both forms."""
    known = (decode.decode(each).events for each in states())
    told = [
        encode_events(events, 1.5, form=form)
        for events in known
        for form in ("array", "map")
        if events
    ]
    return tuple(each for each in told if len(each) <= FRAME_BYTES_MAX)


def read_frame(data: bytes) -> bool:
    """Give a message to an index; one that is refused changes nothing."""
    index, hashes = EventIndex(), list(range(4))
    index.apply("worker", 0, 0, CLEARED)
    before = index.find(hashes)
    if raised(lambda: index.apply("worker", 0, 1, data), DamagedEvents) is None:
        index.find(hashes)
        return False
    assert index.find(hashes) == before
    assert index.apply("worker", 0, 1, CLEARED) == Applied(1)
    return True


RUNTIME_DOORS = [
    Door(name="steps", make=lambda: Damager(step_samples()), read=read_step),
    Door(
        name="handovers",
        make=lambda: Damager([split_words(HANDOVER.to_json().encode())], JSON_WORDS),
        read=read_handovers,
    ),
    Door(
        name="frames",
        make=lambda: Damager([split_at(each, range(len(each))) for each in frames()]),
        read=read_frame,
    ),
    Door(name="pages", make=page_damage, read=read_page),
    Door(
        name="prompts",
        make=lambda: Damager([*map(split_words, PROMPTS)], JSON_WORDS),
        read=read_prompts_file,
    ),
]
