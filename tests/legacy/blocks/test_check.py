# SPDX-License-Identifier: Apache-2.0
"""Each property of a facade's blocks finds what breaks it, and is silent before."""

from __future__ import annotations

from collections.abc import Callable

import attrs
import pytest

from kvcore.legacy.blocks.blocks import Backing
from kvcore.legacy.blocks.check import PROPERTIES, check_tiers
from kvcore.legacy.blocks.tiers import Tiers
from kvcore.pool.free_queue import make_free_queue
from kvcore.pool.hash_index import HashIndex, HashIndexTransaction
from kvcore.types.errors import InvariantViolation
from kvcore.types.keys import KEY_SIZE
from tests.conftest import Backend

KEY = b"k" * KEY_SIZE
HELD = [1, 1, 4]


def world(backend: Backend = "python") -> Tiers:
    """Make tiers: block 0 is null; 1 has two owners, 4 one; 2, 3 and 5 are free, 3 with a key."""
    backing = Backing(6, 2, null_block=True, eviction="priority", backend=backend)
    backing.take(4)
    backing.touch([1])
    backing.publish(3, KEY)
    backing.release([3, 2])
    backing.check(HELD, [])
    return backing.state()


def queued(*order: int, length: int | None = None) -> Callable[[Tiers], Tiers]:
    """Set the device's free queue to these blocks, and its count to this number."""

    def damage(tiers: Tiers) -> Tiers:
        queue = make_free_queue(6, list(order))
        queue = attrs.evolve(queue, length=len(order) if length is None else length)
        return attrs.evolve(tiers, device=attrs.evolve(tiers.device, queue=queue))

    return damage


def unlisted(tiers: Tiers) -> Tiers:
    """Remove the key of block 3 from the index."""
    return attrs.evolve(tiers, device=attrs.evolve(tiers.device, index=HashIndex()))


def mislisted(tiers: Tiers) -> Tiers:
    """Let block 2 be found under the key of block 3."""
    index = HashIndexTransaction(tiers.device.index)
    index.insert(KEY, 2)
    return attrs.evolve(tiers, device=attrs.evolve(tiers.device, index=index.freeze()))


def overcounted(tiers: Tiers) -> Tiers:
    """Give block 4 an owner too many."""
    ref_counts = tiers.device.ref_counts.set(4, 2)
    return attrs.evolve(tiers, device=attrs.evolve(tiers.device, ref_counts=ref_counts))


DAMAGES: dict[str, list[Callable[[Tiers], Tiers]]] = {
    "PARTITION": [queued(2, 5), queued(2, 5, 4, 3)],
    "FQ-UNIQ": [queued(2, 5, 3, length=4)],
    "NULL": [queued(2, 5, 0, 3)],
    "IDX-SOUND": [mislisted],
    "IDX-COMPLETE": [unlisted],
    "PRIORITY-ORDER": [queued(3, 2, 5), queued(2, 3, 5)],
}


@pytest.mark.parametrize(
    ("name", "damage"), [(name, each) for name, listed in DAMAGES.items() for each in listed]
)
def test_a_property_finds_what_breaks_it(name: str, damage: Callable[[Tiers], Tiers]) -> None:
    damaged = damage(world())
    assert list(PROPERTIES[name](damaged))
    with pytest.raises(InvariantViolation, match=name):
        check_tiers(damaged)


def test_every_property_has_its_damage() -> None:
    assert set(DAMAGES) == set(PROPERTIES)


def test_priorities_are_compared(backend: Backend) -> None:
    backing = Backing(3, eviction="priority", backend=backend)
    backing.take(3)
    for block in range(3):
        backing.publish(block, bytes([block]) * KEY_SIZE)
    backing.set_priority([0], time=5.0)
    backing.release([0, 1, 2])
    backing.check([])
    state = backing.state()
    for order in ([0, 1, 2], [2, 1, 0], [1, 0, 2]):
        device = attrs.evolve(state.device, queue=make_free_queue(3, order))
        with pytest.raises(
            InvariantViolation, match=r"PRIORITY-ORDER: device block \d is free before"
        ):
            check_tiers(attrs.evolve(state, device=device))


def test_owners_are_those_that_the_facade_has(backend: Backend) -> None:
    tiers = world(backend)
    check_tiers(tiers)
    check_tiers(tiers, HELD, [])
    for held, detail in (
        ([1, 4], "device block 1 counts 2 owners, 1 hold it"),
        ([1, 1], "device block 4 counts 1 owners, 0 hold it"),
        ([1, 1, 4, 2], "device block 2 counts 0 owners, 1 hold it"),
    ):
        with pytest.raises(InvariantViolation, match=f"REF: {detail}"):
            check_tiers(tiers, held)
    with pytest.raises(InvariantViolation, match="LEAK: device block 1 counts 2 owners"):
        check_tiers(tiers, [])
    with pytest.raises(InvariantViolation, match="REF: host block 0 counts 0 owners, 1 hold it"):
        check_tiers(tiers, HELD, [0])
    with pytest.raises(InvariantViolation, match="REF: device block 4 counts 2 owners"):
        check_tiers(overcounted(tiers), HELD)
