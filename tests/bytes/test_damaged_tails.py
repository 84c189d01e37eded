# SPDX-License-Identifier: Apache-2.0
"""Tail keys that stand where no run puts them: damage, in both languages."""

from __future__ import annotations

import pytest

from kvcore import Config, KVCacheManager
from kvcore.types.errors import DamagedState
from tests.conftest import Backend
from tests.helpers.stories import serve


def test_a_tail_key_in_the_block_of_another_part_is_damage(backend: Backend) -> None:
    # The twin compared a block's tail keys with those of its own place alone.
    manager = KVCacheManager(Config(9, 4, hash_block_size=2, hash_seed=b"s"), backend=backend)
    serve(manager, "a", list(range(7)))
    manager.take_batch()
    data, tails = manager.encode(), manager.state().device.tails
    assert tails is not None
    (one,), (other,) = tails.keys(1), tails.keys(2)
    damaged = bytearray(data)
    for key, place in ((other, data.rindex(one)), (one, data.rindex(other))):
        damaged[place : place + len(key)] = key
    with pytest.raises(DamagedState, match="TAIL-SOUND"):
        manager.restore(bytes(damaged))
    assert manager.encode() == data
