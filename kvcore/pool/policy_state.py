# SPDX-License-Identifier: Apache-2.0
"""The records of a pool for the eviction policy that orders its queue; changed in policy_pool.py.

Twin: rust/src/pool/policy_state.rs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import attrs
from immutables import Map
from pyrsistent import PVector, pvector

from kvcore.types.policies import DUE_SECTION
from kvcore.types.policy import EvictionPolicy, Memory, Place, Uses, failed, is_memory

KEYLESS: Place = (0, 0)
"""The place of blocks that have no key."""


@attrs.frozen
class PolicyState:
    """The state of a policy, as a value.

    places: place of each block in the queue, KEYLESS for other blocks. tails: each place that has
    blocks, in order, with its last block. lengths: section -> number of its blocks. dues: key ->
    due numbers of the waiting requests that will look it up, in order. uses: uses of each block
    with a key, if the policy remembers them. ghosts: uses of the contents evicted most recently, by
    key. left: number of an eviction -> evicted key. next_number: of the next eviction.
    """

    memory: Memory
    places: PVector[Place]
    tails: tuple[tuple[Place, int], ...] = ()
    lengths: Map[int, int] = Map()
    dues: Map[bytes, tuple[int, ...]] = Map()
    uses: Map[int, Uses] = Map()
    ghosts: Map[bytes, Uses] = Map()
    left: Map[int, bytes] = Map()
    next_number: int = 0

    @property
    def num_due(self) -> int:
        """Free blocks that waiting requests will look up."""
        return self.lengths.get(DUE_SECTION, 0) if self.dues else 0

    @property
    def is_remembered(self) -> bool:
        """Whether any value differs from its default."""
        return len(self.uses) > 0 or self.next_number > 0 or any(self.memory)


def make_policy_state(policy: EvictionPolicy, num_blocks: int, free: Sequence[int]) -> PolicyState:
    """Make the state of a policy for a pool without keys. free: its free blocks, front first."""
    try:
        memory = policy.start(num_blocks)
    except Exception as error:
        raise failed(policy, "start", error) from error
    if not is_memory(memory):
        raise failed(policy, "start", f"answers {memory!r}")
    state = PolicyState(memory, pvector([KEYLESS] * num_blocks))
    return with_places(state, dict.fromkeys(free, KEYLESS))


def with_places(state: PolicyState, places: Mapping[int, Place]) -> PolicyState:
    """Return the state in which free blocks have these places. places: in queue order, ascending;
    equal ones are allowed.
    """
    return attrs.evolve(
        state,
        places=pvector([places.get(block, KEYLESS) for block in range(len(state.places))]),
        tails=tuple({place: block for block, place in places.items()}.items()),
        lengths=Map(Counter(section for section, _ in places.values())),
    )
