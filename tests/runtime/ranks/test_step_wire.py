# SPDX-License-Identifier: Apache-2.0
"""Steps as bytes: what goes in comes out, and no other bytes are accepted as a step."""

from __future__ import annotations

import random
import zlib

import numpy as np
import pytest
from kvcore_runtime.ranks.errors import BadStep
from kvcore_runtime.ranks.step_wire import (
    CHECKSUM_AT,
    HEADER,
    STEP_BYTES_MAX,
    OrderKind,
    RankOrder,
    RankPass,
    RankStep,
    decode_step,
    encode_step,
    step_size,
)

from kvcore.types.commands import Batch
from kvcore.types.keys import KEY_SIZE

NUM_STEPS = 4096
NUM_DAMAGED = 20_000


def some_step(draw: random.Random) -> RankStep:
    num_commands, num_keys = draw.randrange(6), draw.randrange(3)
    limit = draw.choice((2**16, 2**32))
    columns = [draw.randrange(limit) for _ in range(6 * num_commands)]
    batch = Batch(
        draw.randrange(2**40),
        bytearray(np.array(columns, "<u4")),
        draw.randbytes(KEY_SIZE * num_keys),
        draw.randrange(2**32),
    )
    if draw.random() < 0.2:
        kinds = [draw.choice(list(OrderKind)) for _ in range(draw.randrange(1, 5))]
        orders = tuple(
            RankOrder(kind, draw.randrange(limit), draw.randrange(limit), draw.randbytes(KEY_SIZE))
            for kind in kinds
        )
        return RankStep(batch=batch, orders=orders, is_applied=draw.random() < 0.5)
    if draw.random() < 0.2:
        return RankStep(batch=batch, skips=draw.random() < 0.5, ends=draw.random() < 0.5)
    starts = [draw.randrange(5000) for _ in range(draw.randrange(1, 9))]
    ends = [start + draw.randrange(1, 40) for start in starts]
    num_tokens = sum(ends) - sum(starts)
    wanted = [draw.randrange(num_tokens) for _ in starts]
    parts = (
        [draw.randrange(limit) for _ in starts],
        *(starts, ends, [draw.randrange(limit) for _ in range(num_tokens)], wanted),
    )
    rows, starts_, ends_, tokens, wanted_ = (np.array(each, np.uint32) for each in parts)
    computes = RankPass(rows=rows, starts=starts_, ends=ends_, tokens=tokens, wanted=wanted_)
    return RankStep(batch=batch, computes=computes, skips=draw.random() < 0.5)


def shown(step: RankStep) -> object:
    parts = None if step.computes is None else [each.tolist() for each in step.computes.parts]
    return step.batch, parts, step.orders, step.is_applied, step.skips, step.ends


def test_what_goes_in_comes_out() -> None:
    draw = random.Random(1)
    for _ in range(NUM_STEPS):
        step = some_step(draw)
        data = encode_step(step)
        assert step_size(data) == len(data)
        assert shown(decode_step(data)) == shown(step)


@pytest.mark.parametrize(("most", "width"), [(2**16 - 1, 2), (2**16, 4)])
@pytest.mark.parametrize("name", ["rows", "tokens", "command"])
def test_numbers_have_two_bytes_if_all_of_them_fit(name: str, most: int, width: int) -> None:
    rows = np.arange(12, dtype=np.uint32)
    parts = {"rows": rows, "starts": rows + 30, "ends": rows + 31, "tokens": rows, "wanted": rows}
    columns = np.arange(6, dtype="<u4")
    if name == "command":
        columns[3] = most
    else:
        parts[name] = np.append(rows[1:], np.uint32(most))
    batch = Batch(7, bytearray(columns), bytes(KEY_SIZE))
    step = RankStep(batch=batch, computes=RankPass(**parts))
    data = encode_step(step)
    assert len(data) == step_size(data) == 44 + width * (6 + 5 * 12) + KEY_SIZE
    assert shown(decode_step(data)) == shown(step)


def test_no_damaged_byte_is_overlooked() -> None:
    draw = random.Random(2)
    for _ in range(NUM_DAMAGED):
        data = bytearray(encode_step(some_step(draw)))
        at = draw.randrange(len(data))
        if draw.random() < 0.5:
            data[at] ^= 1 << draw.randrange(8)
        else:
            del data[at:]
        with pytest.raises(BadStep):
            decode_step(bytes(data))


def test_random_bytes_are_no_step() -> None:
    draw = random.Random(3)
    for _ in range(NUM_DAMAGED):
        data = draw.randbytes(draw.randrange(120))
        with pytest.raises(BadStep):
            decode_step(data if draw.random() < 0.5 else b"kvst\x02\x00\x01\x00" + data)


def test_a_length_that_is_claimed_takes_no_memory() -> None:
    header = HEADER.pack(b"kvst", 2, 1, 0, 2**32 - 1, 0, 0, 0, 0, 0, 0)
    with pytest.raises(BadStep, match=f"at most {STEP_BYTES_MAX}"):
        step_size(header)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"ends": [1, 9]}, "positions are not 3 tokens"),
        ({"ends": [0, 5]}, "positions are not 3 tokens"),
        ({"wanted": [3]}, "not below 3"),
        ({"rows": [], "starts": [], "ends": [], "tokens": [], "wanted": []}, "0 sequences"),
    ],
)
def test_numbers_that_do_not_fit_each_other_are_refused(
    change: dict[str, list[int]], reason: str
) -> None:
    right = {"rows": [0, 1], "starts": [0, 4], "ends": [1, 6], "tokens": [1, 2, 3], "wanted": [0]}
    numbers = {name: np.array(each, np.uint32) for name, each in (right | change).items()}
    step = RankStep(batch=Batch(0, bytearray(), b""), computes=RankPass(**numbers))
    with pytest.raises(BadStep, match=reason):
        decode_step(encode_step(step))


def test_an_epoch_that_does_not_fit_is_refused() -> None:
    with pytest.raises(BadStep, match=f"epoch {2**32}"):
        encode_step(RankStep(batch=Batch(0, bytearray(), b"", 2**32)))


@pytest.mark.parametrize(
    ("at", "value", "reason"),
    [
        (HEADER.size, len(OrderKind), f"an order of kind {len(OrderKind)}, at most 5"),
        (20, 0, "1 orders with 0 keys"),
        (24, 0, "0 orders with 1 keys"),
    ],
)
def test_orders_that_are_none_are_refused(at: int, value: int, reason: str) -> None:
    order = RankOrder(OrderKind.LOAD, 3, 7, bytes(KEY_SIZE))
    data = bytearray(encode_step(RankStep(batch=Batch(0, bytearray(), b""), orders=(order,))))
    data[at] = value
    data = data[: step_size(bytes(data))]
    data[CHECKSUM_AT] = bytes(4)
    data[CHECKSUM_AT] = zlib.crc32(data).to_bytes(4, "little")
    with pytest.raises(BadStep, match=reason):
        decode_step(bytes(data))
