# SPDX-License-Identifier: Apache-2.0
"""Damaged canonical bytes: a typed error or a state, never another exception, nothing half done."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import pytest
from msgspec.structs import replace
from pyrsistent import pvector

from kvcore import (
    BlockStored,
    Config,
    Group,
    KVCacheManager,
    LoRA,
    MediaItem,
    PromptEmbeds,
    Request,
    _twin,
)
from kvcore.codec.decode import decode
from kvcore.codec.encode import MAGIC, encode
from kvcore.state.batch_records import Reporter
from kvcore.types.commands import CutTable
from kvcore.types.errors import DamagedState
from kvcore.types.event_log import Events, write_event
from kvcore.types.extra_inputs import (
    CACHE_SALT,
    CUT_EMBEDS,
    CUT_MEDIA,
    LORA,
    MEDIA,
    PROMPT_EMBEDS,
)
from kvcore.types.wire import Writer
from tests.conftest import Backend, need_twin
from tests.helpers.stories import add, drop, make, serve, step


def busy(backend: Backend) -> KVCacheManager:
    """Return a manager whose bytes have it all: both tiers, pins, a held row, merges, events."""
    manager = make(
        backend, 8, num_host_blocks=3, max_model_len=12, enable_events=True, duplicates="merge"
    )
    serve(manager, "runs", [0, 1, 2, 3, 4])
    serve(manager, "swapped", [10, 11])
    step(manager)
    manager.swap_out(["swapped"])
    serve(manager, "gone", [7])
    drop(manager, "gone")
    manager.pin([2])
    step(manager)
    add(manager, "waits", [0, 1, 2, 3, 12])
    serve(manager, "twin of runs", [0, 1, 2, 3])
    manager.evict_blocks([1])
    manager.fork("runs", "child")
    manager.append(["child"], [9])
    add(manager, "left", [3])
    manager.remove_request("left")
    return manager


def moving(backend: Backend) -> KVCacheManager:
    """Return one whose bytes have a window, drafts, extra keys, own hashes, operations and a
    pin.
    """
    groups = (Group(2), Group(2, kind="sliding_window", window=3))
    manager = make(
        backend, 16, groups=groups, max_model_len=10, record_new_blocks=True, hide_salts=True
    )
    salted = Request("salted", range(5), cache_salt="s", lora=LoRA("a"))
    manager.add_request(salted)
    manager.allocate_slots("salted", 5)
    manager.add_drafts("salted", [7])
    own = Request("own", range(5), block_hashes=[b"1" * 32], media=[MediaItem("cat", 1, 2)])
    manager.add_request(own)
    rows = PromptEmbeds(bytes(4), 1)
    cut = Request("cut", range(30, 34), media=[MediaItem("dog", 0, 4)], prompt_embeds=rows)
    manager.add_request(cut)
    manager.truncate("cut", 3)
    step(manager)
    assert manager.pin_prefix("named", "salted", 4) == 4
    manager.store([1])
    add(manager, "loads", range(20, 27))
    manager.load("loads", 4)
    manager.allocate_slots("salted", 1)
    step(manager)
    manager.complete_operation(1, False)
    return manager


def loading(backend: Backend) -> KVCacheManager:
    """Return one with an unconfirmed load that two requests can report; one of them is freed."""
    manager = make(backend, 8)
    add(manager, "loads", range(7))
    manager.allocate_slots("loads", 1, num_external_computed_tokens=4)
    serve(manager, "hits", range(7))
    step(manager)
    manager.free("loads")
    return manager


PART_OF_A_NUMBER = re.compile(
    r": (batch \d+ is damaged: it is cut off|commands are not whole).* at"
)
"""What either language says of columns that end inside a number, in words of its own."""

WORLDS: list[Callable[[Backend], KVCacheManager]] = [busy, moving, loading]


def damaged(data: bytes) -> Iterator[bytes]:
    """Yield the data cut at each place, and with each byte changed in several ways."""
    for end in range(len(data)):
        yield data[:end]
    for place, byte in enumerate(data):
        for value in {0, 255, byte ^ 1, byte ^ 128, (byte + 1) % 256} - {byte}:
            yield data[:place] + bytes([value]) + data[place + 1 :]


def restore(manager: KVCacheManager | _twin.Backend, data: bytes) -> str:
    """Restore, and say how it ended."""
    try:
        manager.restore(data)
    except DamagedState as error:
        return str(error)
    return "restored"


@pytest.mark.parametrize("world", WORLDS)
def test_bytes_of_a_state_give_that_state_in_both_languages(
    world: Callable[[Backend], KVCacheManager], backend: Backend
) -> None:
    manager = world(backend)
    data = manager.encode()
    assert data == world("python").encode()
    assert encode(decode(data)) == data
    other = make(backend)
    other.restore(data)
    assert other.encode() == data
    assert other.config == manager.config
    assert step(other) == step(manager)


@cache
def said_of_damage(world: Callable[[Backend], KVCacheManager]) -> tuple[bytes, list[str]]:
    """Return the bytes of a state, and the result of decoding each damage to them.

    That is an error, or "restored" for a state that has the same bytes again.
    """
    data, said = world("python").encode(), []
    for each in damaged(data):
        try:
            state = decode(each)
        except DamagedState as error:
            said.append(str(error))
        else:
            assert encode(state) == each
            said.append("restored")
    return data, said


@pytest.mark.parametrize("world", WORLDS)
def test_damaged_bytes_are_an_error_or_a_state(
    world: Callable[[Backend], KVCacheManager],
) -> None:
    data, said = said_of_damage(world)
    assert said.count("restored") > len(data)  # a changed token, hash or count is still a state


@pytest.mark.parametrize("world", WORLDS)
def test_damaged_bytes_are_the_same_damage_in_both_languages(
    world: Callable[[Backend], KVCacheManager],
) -> None:
    need_twin()
    twin = make("rust")._core  # without what the manager decodes in Python before
    data, said = said_of_damage(world)
    for each, of_python in zip(damaged(data), said, strict=True):
        assert PART_OF_A_NUMBER.sub("", restore(twin, each)) == PART_OF_A_NUMBER.sub("", of_python)
        assert of_python != "restored" or twin.encode() == each


def test_what_was_restored_can_go_on(backend: Backend) -> None:
    # Bytes that pass every invariant are a state like any other: its operations end, its requests
    # are freed, and every block comes back.
    manager = make(backend)
    count = 0
    for each in list(damaged(moving("python").encode()))[::3]:
        if restore(manager, each) != "restored":
            continue
        count += 1
        manager.take_batch()
        state = manager.state()
        for operation in state.operations:
            manager.complete_operation(operation, True)
        for request_id in state.requests:
            manager.free(request_id)
        manager.check()
    assert count > 100


def test_no_damage_leaves_a_manager_half_restored(backend: Backend) -> None:
    manager = busy(backend)
    data = manager.encode()
    reasons = set()
    for each in list(damaged(data))[::7]:
        reason = restore(manager, each)
        named = re.match(r"not an encoded state: ([A-Z-]+):|", reason)
        reasons.add(named and named[1])
        if reason == "restored":
            manager.restore(data)
        assert manager.encode() == data
    # What bytes can be wrong in: cut off, impossible, or well formed and untrue.
    assert {None, "REF", "REQ-HASH"} <= reasons


def test_the_error_says_where_the_bytes_end() -> None:
    data = busy("python").encode()
    for end in (len(MAGIC) + 3, len(data) - 1):
        with pytest.raises(DamagedState) as caught:
            decode(data[:end])
        offset = caught.value.fields["offset"]
        assert isinstance(offset, int)
        assert offset <= end
        assert str(offset) in str(caught.value)


def test_bytes_behind_a_state_and_other_formats_are_no_state(backend: Backend) -> None:
    manager = busy(backend)
    data = manager.encode()
    with pytest.raises(DamagedState, match=f"4 bytes are missing at byte {len(data) + 1}"):
        manager.restore(data + b"xx")
    with pytest.raises(DamagedState, match="section 120 is unknown, or out of order"):
        manager.restore(data + b"xxxxx")
    with pytest.raises(DamagedState, match="a section is empty"):
        manager.restore(make(backend).encode() + b"\1\4\0\0\0" + bytes(4))
    with pytest.raises(DamagedState, match="the first bytes are not those of a state"):
        manager.restore(b"kvcore state 9\n" + data[len(MAGIC) :])
    with pytest.raises(DamagedState, match="bytes are missing at byte 0"):
        manager.restore(b"")
    assert manager.encode() == data


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"reporters": ()}, "a load does not belong to requests"),
        ({"reporters": (Reporter("hits", 4, 4),) * 2}, "a load does not belong to requests"),
        ({"reporters": (Reporter("hits", 4, 2),)}, "a load is not in canonical form"),
        ({"reporters": (Reporter("hits", 0, 5),)}, "a load is not in canonical form"),
        ({"first": 2, "reporters": (Reporter("hits", 2, 4),)}, "a load is not in canonical"),
        ({"first": 4}, "a load is not in canonical form"),
        ({"blocks": ((1, 2), (1, 4))}, "a load is not in canonical form"),
        ({"blocks": ((3, 6),)}, "a block without a key rests on a load"),
        ({"blocks": ((8, 6),)}, "a block that does not exist rests on a load"),
        ({"reporters": (Reporter("hits", 4, 4),), "batch": 5}, "UNCONFIRMED"),
        ({"reporters": (Reporter("loads", 2, 4),)}, "UNCONFIRMED"),
    ],
)
def test_a_load_that_no_call_leaves_is_refused(
    backend: Backend, changed: dict[str, Any], message: str
) -> None:
    manager = loading(backend)
    state = manager.state()
    load = replace(state.loads[0], **changed)
    damaged = encode(replace(state, loads=(load,)))
    with pytest.raises(DamagedState, match=message):
        manager.restore(damaged)
    assert manager.state() == state


def test_a_merge_of_a_block_that_no_table_has_is_dropped(backend: Backend) -> None:
    manager = busy(backend)
    state = manager.state()
    merges = [replace(each, block=66) for each in state.batch.merges]
    assert merges
    manager.restore(encode(replace(state, batch=replace(state.batch, merges=pvector(merges)))))
    manager.take_batch()
    manager.check()


def test_a_count_of_owners_has_30_bits(backend: Backend) -> None:
    # The highest bits of the count were lost in the twin, which read 2**31 + 1 owners as one.
    manager = make(backend)
    serve(manager, "a", [0, 1, 2])
    data = manager.encode()
    counts = decode(data).device.ref_counts
    place = data.index(b"\x01\0\0\0\x01\x24\0\0\0")  # one owner, a key of 36 bytes
    assert 1 in counts
    damaged = data[: place + 3] + b"\x40" + data[place + 4 :]
    for core in (lambda: decode(damaged), lambda: manager._core.restore(damaged)):
        with pytest.raises(DamagedState, match="1073741825 is not below 1073741824"):
            core()
    assert manager.encode() == data


def test_a_count_of_pins_has_30_bits(backend: Backend) -> None:
    # Pins are owners: a sum of both overflowed where the twin's properties are checked.
    manager = make(backend)
    serve(manager, "a", [0, 1, 2])
    manager.pin([1])
    data = manager.encode()
    pins = b"\1\0\0\0\1\0\0\0\1\0\0\0\1\0\0\0"  # one block, which is 1; one count, which is 1
    assert data.count(pins) == 1
    damaged = data.replace(pins, pins[:-1] + b"\x40")
    for core in (lambda: decode(damaged), lambda: manager._core.restore(damaged)):
        with pytest.raises(DamagedState, match="is not below 1073741824"):
            core()
    assert manager.encode() == data


def test_no_request_is_in_a_host_tier_that_is_not_there(backend: Backend) -> None:
    # Such a request passed every property, and the twin panicked when it was freed.
    manager = make(backend)
    manager.add_request(Request("a", [7]))
    state = manager.state()
    request = state.requests["a"]
    hosted = replace(request, host_tables=request.tables)
    damaged = encode(replace(state, requests=state.requests.set("a", hosted)))
    for core in (lambda: decode(damaged), lambda: manager._core.restore(damaged)):
        with pytest.raises(DamagedState, match="a host tier that does not exist"):
            core()
    assert manager.state() == state


@pytest.mark.parametrize("row", [1, -1])
def test_a_command_names_a_row_that_is_there(backend: Backend, row: int) -> None:
    # The batch that was taken had a row which its own bytes could not hold.
    manager = make(backend, max_in_flight=1)
    add(manager, "a", [0, 1, 2])
    manager.allocate_slots("a", 3)
    state = manager.state()
    commands = state.batch.commands.append(CutTable(row, 0, 1))
    damaged = encode(replace(state, batch=replace(state.batch, commands=commands)))
    for core in (lambda: decode(damaged), lambda: manager._core.restore(damaged)):
        with pytest.raises(DamagedState, match="a command names a row that does not exist"):
            core()
    assert manager.state() == state


def test_the_next_batch_has_a_number_too(backend: Backend) -> None:
    # From the largest of 64 bits the twin went on with 0.
    manager = make(backend)
    state = manager.state()
    damaged = encode(replace(state, batch=replace(state.batch, number=2**63)))
    for core in (lambda: decode(damaged), lambda: manager._core.restore(damaged)):
        with pytest.raises(DamagedState, match="9223372036854775808 is not the number of a batch"):
            core()
    assert manager.state() == state


@pytest.mark.parametrize(
    ("tag", "value"),
    [
        *((0, b"a"), (5, b"a"), (LORA, b""), (LORA, b"\1\0\0"), (LORA, b"\2\0\0\0a")),
        *((LORA, b"\0\0\0\0a"), (LORA, b"\1\0\0\0\xff"), (LORA, b"\1\0\0\0a\xff")),
        *((LORA, b"\xff\xff\xff\xffa"), (MEDIA, b"\1\0\0\0"), (MEDIA, b"\1\0\0\0\xff")),
        *((CACHE_SALT, b""), (CACHE_SALT, b"\xff"), (PROMPT_EMBEDS, bytes(31))),
        *((CUT_MEDIA, bytes(8)), (CUT_EMBEDS, bytes(35)), (CUT_EMBEDS, bytes(37))),
    ],
)
def test_an_event_has_extra_keys_that_a_block_can_have(
    backend: Backend, tag: int, value: bytes
) -> None:
    manager = make(backend, enable_events=True)
    manager.add_request(Request("a", [0, 1], cache_salt="salt"))
    manager.allocate_slots("a", 2)
    data = manager.encode()
    salt = bytes([CACHE_SALT, 4, 0, 0, 0]) + b"salt"
    assert data.count(salt) == 1
    damaged = data.replace(salt, bytes([tag, len(value), 0, 0, 0]) + value)
    for core in (lambda: decode(damaged), lambda: manager._core.restore(damaged)):
        with pytest.raises(DamagedState, match="an extra key of the wrong form"):
            core()
    assert manager.encode() == data


def test_an_event_without_blocks_has_no_extra_keys() -> None:
    # The flag said that extra keys follow, there was no block to have any, and the bytes written
    # again were others.
    none = BlockStored((), None, (), 2, 0)
    out = Writer()
    write_event(out, none)
    assert tuple(Events(bytes(out.data), 1)) == (none,)
    flagged = bytes(out.data[:-1]) + b"\1"
    with pytest.raises(DamagedState, match="extra keys of no block"):
        tuple(Events(flagged, 1))


def test_a_damaged_number_of_blocks_does_not_become_an_allocation(backend: Backend) -> None:
    data = bytearray(make(backend).encode())
    data[len(MAGIC) : len(MAGIC) + 4] = (2**31 - 1).to_bytes(4, "little")
    with pytest.raises(DamagedState, match="2147483647 blocks are missing"):
        KVCacheManager(Config(4), backend).restore(bytes(data))
