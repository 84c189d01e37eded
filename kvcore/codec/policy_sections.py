# SPDX-License-Identifier: Apache-2.0
"""The sections of canonical bytes for eviction policies: arrivals, and what the policies remember.

The order of arrival determines what is due, so the keys that waiting requests will look up are not
written, nor are places that follow from them.
Twin: rust/src/codec/policy_sections.rs.
"""

from __future__ import annotations

from itertools import islice

import attrs
from immutables import Map
from msgspec.structs import replace

from kvcore.pool.free_queue import num_older
from kvcore.pool.policy_pool import PolicyTransaction
from kvcore.pool.policy_state import KEYLESS, with_places
from kvcore.state.state import State
from kvcore.state.waiting import with_waiting
from kvcore.types.effects import Effects
from kvcore.types.policies import BUILT_IN, MAIN
from kvcore.types.policy import ORDERS_END, Uses
from kvcore.types.wire import Reader, Writer


def write_waiting(out: Writer, state: State) -> None:
    """Write the due number of each request, in row order, and the next one."""
    for name in state.rows:
        if name is not None:
            out.u64(state.waiting[name][0])
    out.u64(state.next_due)


def write_uses(out: Writer, state: State) -> None:
    """Write a policy's memory, the uses of each block with a key, and those of evicted contents."""
    policy = state.device.policy
    assert policy is not None
    out.u32(len(policy.memory))
    for number in policy.memory:
        out.u64(number)
    for _, known in sorted(policy.uses.items()):
        _write_use(out, known)
    out.u32(len(policy.left))
    for number, key in sorted(policy.left.items()):
        out.sized(key)
        out.u64(number)
        _write_use(out, policy.ghosts[key])
    out.u64(policy.next_number)


def _write_use(out: Writer, known: Uses) -> None:
    out.u32(known.uses)
    out.u64(known.last)
    out.u64(known.before)
    out.u32(known.depth)
    section, order = known.place or KEYLESS
    out.u8(section)
    out.u64(order)


def read_waiting(source: Reader, state: State) -> State:
    """Read arrivals; return the state with them. Raises DamagedState."""
    dues = {name: source.u64() for name in state.rows if name is not None}
    next_due = source.u64()
    sees = state.device.policy is not None and BUILT_IN[str(state.config.eviction)].sees_waiting
    rises = len(set(dues.values())) == len(dues) and all(due < next_due for due in dues.values())
    if not sees or not 0 < next_due < ORDERS_END or not rises:
        raise source.damaged("the order of arrival of the requests is impossible")
    return with_waiting(state, dues, next_due)


def read_uses(source: Reader, state: State) -> State:
    """Read what the policy remembers; return the state with it. Raises DamagedState."""
    device = state.device
    if device.policy is None:
        raise source.damaged("the policy does not remember uses")
    memory = tuple(source.u64() for _ in range(source.u32()))
    keyed = [block for block, key in enumerate(device.keys) if key is not None]
    uses = {block: _read_use(source) for block in keyed}
    num_left = source.u32()
    if num_left > len(device.keys):
        raise source.damaged("more evicted contents than blocks")
    ghosts, left, last = {}, {}, -1
    for _ in range(num_left):
        key, number = source.key(), source.u64()
        known = replace(_read_use(source), number=number)
        if number <= last or key in ghosts or known.place is not None:
            raise source.damaged("the order of evictions is impossible")
        ghosts[key], left[number], last = known, key, number
    next_number = source.u64()
    if len(memory) != len(device.policy.memory) or last >= next_number:
        raise source.damaged("the uses that the policy remembers are impossible")
    policy = attrs.evolve(
        device.policy,
        memory=memory,
        uses=Map(uses),
        ghosts=Map(ghosts),
        left=Map(left),
        next_number=next_number,
    )
    return replace(state, device=attrs.evolve(device, policy=policy))


def _read_use(source: Reader) -> Uses:
    uses, last, before, depth = source.u32(), source.u64(), source.u64(), source.u32()
    place = (source.u8(), source.u64())
    is_place = KEYLESS[0] < place[0] <= MAIN and place[1] < ORDERS_END
    if not uses or not before <= last or not (is_place or place == KEYLESS):
        raise source.damaged("the use of a content is impossible")
    return Uses(uses, last, before, depth, place if place[0] else None)


def place_blocks(source: Reader, state: State) -> State:
    """Return the state with the places that its policy gives to free blocks. Raises
    DamagedState.
    """
    device = state.device
    if device.policy is None:
        return state
    sees_waiting = BUILT_IN[str(state.config.eviction)].sees_waiting
    if sees_waiting and len(state.waiting) < len(state.requests):
        raise source.damaged("requests without an arrival")
    tx = PolicyTransaction(device, Effects(), state.batch.number)
    places = {}
    for block in islice(device.queue, num_older(device.queue), None):
        known = device.policy.uses.get(block)
        places[block] = tx.place_of(block) if known is None else known.place or KEYLESS
        if known is not None and known.place is None:
            raise source.damaged("a free block has no place")
    if list(places.values()) != sorted(places.values()):
        raise source.damaged("the free queue is not in the order of its policy")
    return replace(state, device=attrs.evolve(device, policy=with_places(device.policy, places)))
