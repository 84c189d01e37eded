# SPDX-License-Identifier: Apache-2.0
"""Damaged messages of events: read or refused, and the index goes on in either case."""

from __future__ import annotations

import random

import pytest

from kvcore.codec.event_msgpack import Form, event_maps
from kvcore.event_index import DamagedEvents, EventIndex, EventLog
from tests.event_index.fleet import HYBRID, Engine


def messages(form: Form) -> list[bytes]:
    """Return the messages of a random engine, with one snapshot."""
    engine, log = Engine(1, "rust", HYBRID), EventLog(1, kept_max=1, form=form)
    sent = [log.begin(0.0)]
    for _ in range(30):
        engine.step()
        sent += log.append(event_maps(engine.manager.take_events(), groups=HYBRID), 0.0)
    return [each.payload for each in [*sent, *log.replay(0, 0.0)]]


def damage(payload: bytes, draw: random.Random) -> bytes:
    """Return some bytes changed, cut, repeated, or made a large length."""
    data = bytearray(payload)
    for _ in range(draw.randrange(1, 4)):
        place = draw.randrange(len(data) + 1)
        match draw.randrange(4):
            case 0:
                data[place : place + 1] = bytes([draw.randrange(256)])
            case 1:
                del data[place : place + draw.randrange(1, 9)]
            case 2:
                data[place:place] = data[draw.randrange(len(data) + 1) :][: draw.randrange(20)]
            case _:
                kind = draw.choice((0xDD, 0xDF, 0xC6, 0xDB))  # array, map, bytes, text of 32 bits
                data[place : place + 5] = bytes([kind]) + b"\xff" * 4
    return bytes(data)


def attack(form: Form, count: int) -> tuple[int, int]:
    """Apply damaged messages. Returns how many were read, and how many refused."""
    draw, samples = random.Random(count), messages(form)
    read = refused = 0
    index = EventIndex(held_max=10)
    for number in range(count):
        if number % 50 == 0:
            index = EventIndex(held_max=10)
        payload = damage(draw.choice(samples), draw)
        before = index.expected("a", 0)
        try:
            index.apply("a", 0, before, payload)
        except DamagedEvents:
            refused += 1
            assert index.expected("a", 0) == before
        else:
            read += 1
        index.find([1, b"2"])
    return read, refused


@pytest.mark.parametrize("form", ["map", "array"])
def test_damaged_messages_are_read_or_refused(form: Form) -> None:
    read, refused = attack(form, 1_000)
    assert min(read, refused) > 50


@pytest.mark.slow
def test_a_million_damaged_messages_are_read_or_refused() -> None:
    read, refused = attack("map", 10**6)
    assert min(read, refused) > 10**4
