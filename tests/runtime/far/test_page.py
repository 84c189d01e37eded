# SPDX-License-Identifier: Apache-2.0
"""The header of a page: what it says, and that every spoilt bit of it is seen."""

import random
import struct

import pytest
import xxhash

from kvcore.far.page import (
    HEADER,
    PAYLOAD_START,
    PageOwner,
    begin_page,
    check_page,
    identify_pages,
    seal_page,
)
from kvcore.far.tier import FarStatus
from kvcore.types.keys import make_key

PAYLOAD = bytes(range(40))
KEY = make_key(bytes(range(32)), 3)
PLACE = PageOwner(identify_pages(["weights w"]), rank=1, world=2)


def page() -> bytearray:
    slot = bytearray(PAYLOAD_START + len(PAYLOAD))
    begin_page(memoryview(slot), PLACE.identity, KEY)
    slot[PAYLOAD_START:] = PAYLOAD
    seal_page(memoryview(slot))
    return slot


def check(
    slot: bytes | bytearray, name: str = PLACE.name(KEY), num_bytes: int | None = None
) -> FarStatus:
    return check_page(memoryview(slot), name, len(slot) if num_bytes is None else num_bytes)


def resealed(slot: bytearray) -> bytearray:
    seal_page(memoryview(slot))
    return slot


def test_the_fields_stand_where_others_look_for_them() -> None:
    slot = page()
    assert HEADER.size == 112
    assert bytes(slot[:8]) == b"kvpage02"
    assert bytes(slot[8:40]) == PLACE.identity
    assert bytes(slot[40:76]) == KEY
    assert bytes(slot[76:80]) == bytes(4)
    assert struct.unpack_from("<QQ", slot, 80) == (40, 40)
    assert bytes(slot[96:112]) == xxhash.xxh3_128_digest(slot[:96] + slot[112:])
    assert bytes(slot[112:128]) == bytes(16)
    assert bytes(slot[128:]) == PAYLOAD


def test_a_name_shows_identity_rank_and_key() -> None:
    assert PLACE.name(KEY) == f"kvcore2/{PLACE.identity.hex()[:32]}/1.2/{KEY.hex()}"


def test_a_page_is_that_of_its_name_and_of_no_other() -> None:
    other = PageOwner(identify_pages(["weights v"]), rank=1, world=2)
    assert check(page()) is FarStatus.OK
    assert check(page(), other.name(KEY)) is FarStatus.FOREIGN
    assert check(page(), PLACE.name(make_key(bytes(32), 3))) is FarStatus.DAMAGED
    assert PLACE.owns(memoryview(page()))
    assert not other.owns(memoryview(page()))


def test_two_identities_that_begin_alike_are_told_apart() -> None:
    twin = PageOwner(PLACE.identity[:16] + bytes(16), rank=1, world=2)
    assert twin.name(KEY) == PLACE.name(KEY)
    assert not twin.owns(memoryview(page()))


def test_each_flipped_bit_is_seen() -> None:
    for at in range(len(page()) * 8):
        slot = page()
        slot[at // 8] ^= 1 << at % 8
        assert check(slot) is FarStatus.DAMAGED, at


@pytest.mark.parametrize("num_bytes", [0, 1, 111, 127, 128, 167, 169])
def test_a_page_of_another_length_is_damaged(num_bytes: int) -> None:
    assert check(page(), num_bytes=num_bytes) is FarStatus.DAMAGED


@pytest.mark.parametrize(
    ("at", "value", "status"),
    [
        (0, b"kvblock1", FarStatus.FOREIGN),
        (0, b"kvpage03", FarStatus.DAMAGED),
        (76, b"\1", FarStatus.DAMAGED),
        (80, struct.pack("<Q", 41), FarStatus.DAMAGED),
        (88, struct.pack("<Q", 39), FarStatus.DAMAGED),
        (8, bytes(16), FarStatus.FOREIGN),
        (40, bytes(36), FarStatus.DAMAGED),
    ],
)
def test_fields_are_checked_behind_a_right_checksum(
    at: int, value: bytes, status: FarStatus
) -> None:
    slot = page()
    slot[at : at + len(value)] = value
    assert check(resealed(slot)) is status


def fuzz(num_rounds: int, seed: int) -> None:
    """Assert that all bytes have a status, and that only the page itself is OK."""
    draw, whole = random.Random(seed), bytes(page())
    for _ in range(num_rounds):
        slot = bytearray(whole)
        for _ in range(draw.randrange(1, 4)):
            at = draw.randrange(len(slot))
            match draw.randrange(4):
                case 0:
                    slot[at] ^= 1 << draw.randrange(8)
                case 1:
                    slot[at : at + 8] = draw.randbytes(min(8, len(slot) - at))
                case 2:
                    slot[:at] = draw.randbytes(at)
                case 3:
                    del slot[at:]
                    slot = slot or bytearray(1)
        if draw.random() < 0.5 and len(slot) >= HEADER.size:
            seal_page(memoryview(slot))
        num_bytes = draw.choice([len(slot), len(whole), draw.randrange(1 << 40)])
        status = check(slot, num_bytes=num_bytes)
        if status is FarStatus.OK:
            assert (bytes(slot[8:24]), bytes(slot[40:76])) == (whole[8:24], whole[40:76])
            assert num_bytes == len(slot) == len(whole)
            assert bytes(slot[96:112]) == xxhash.xxh3_128_digest(slot[:96] + slot[112:])


def test_any_bytes_have_a_status() -> None:
    fuzz(3000, 1)


@pytest.mark.slow
def test_a_million_inputs_have_a_status() -> None:
    fuzz(1_000_000, 2)
