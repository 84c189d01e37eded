# SPDX-License-Identifier: Apache-2.0
"""Batches that came from elsewhere as columns and keys: commands, or an error with the row."""

from __future__ import annotations

import pytest

from kvcore.types.commands import Batch, Evict, Free, SetTable, Store, close
from kvcore.types.errors import DamagedBatch
from kvcore.types.keys import KEY_SIZE

KEY = bytes(range(KEY_SIZE))
COMMANDS = [Evict(1, KEY), Free(2, True), Store(5, 3, KEY), SetTable(0, 0, 1, 4)]
BATCH = close(9, COMMANDS)


def changed(column: int, row: int, value: int) -> Batch:
    """Return the batch with another value at one place of its columns."""
    buffer = bytearray(BATCH.buffer)
    at = 4 * (column * len(COMMANDS) + row)
    buffer[at : at + 4] = value.to_bytes(4, "little", signed=True)
    return Batch(9, buffer, BATCH.keys)


@pytest.mark.parametrize(
    ("batch", "reason"),
    [
        (changed(0, 1, 0), "command 1 has kind 0"),
        (changed(0, 1, 14), "command 1 has kind 14"),
        (changed(0, 1, -1), "command 1 has kind -1"),
        (changed(3, 0, 2), "command 0 has key 2 of 2"),
        (changed(3, 0, -1), "command 0 has key -1 of 2"),
        (changed(4, 2, 2**31 - 1), "command 2 has key 2147483647 of 2"),
        (
            Batch(9, BATCH.buffer[:-1], BATCH.keys),
            "it is cut off: 95 bytes of columns and 72 bytes of keys",
        ),
        (
            Batch(9, BATCH.buffer, BATCH.keys[:-1]),
            "it is cut off: 96 bytes of columns and 71 bytes of keys",
        ),
    ],
)
def test_a_damaged_batch_names_what_is_wrong(batch: Batch, reason: str) -> None:
    with pytest.raises(DamagedBatch) as caught:
        list(batch)
    assert caught.value.fields == {"batch": 9, "reason": reason}
    assert list(BATCH) == COMMANDS
