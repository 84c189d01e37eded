# SPDX-License-Identifier: Apache-2.0
"""Properties of what one call does to pins, and of the content that a pinned prefix keeps.

Twin: rust/src/check/properties/claims.rs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

from kvcore.state.state import RequestState, State
from kvcore.trace.calls import Call, perform
from kvcore.transitions.prefix_lookup import first_missing, needed
from kvcore.types.values import Outcome, Status

TAKES_KEYS = frozenset({"evict_blocks", "rewind", "advance_epoch"})
"""The transitions that take keys from blocks that are pinned."""


def pins(before: State, call: Call, outcome: Outcome[State, Any]) -> Iterator[str]:
    """PINS: a block's pins are those of its operations, of `pin` and `unpin`, and of pinned
    prefixes, which only `pin_prefix` and `unpin_prefix` change.
    """
    after = outcome.state
    named = dict(after.named_pins)
    if call.name == "pin_prefix":
        del named[call.args[0]]
    elif call.name == "unpin_prefix":
        named[call.args[0]] = before.named_pins[call.args[0]]
    if named != dict(before.named_pins):
        yield f"{call.name} leaves the pins {dict(after.named_pins)}"
    same = after.device.pins is before.device.pins and after.operations is before.operations
    if same and after.named_pins is before.named_pins:
        return
    held = Counter(pins_alone(before))
    if call.name == "pin":
        held.update(call.args[0])
    elif call.name == "unpin":
        held.subtract(call.args[0])
    expected = {block: count for block, count in held.items() if count}
    if pins_alone(after) != expected:
        yield f"{call.name} leaves the pins {pins_alone(after)}, not {expected}"


def pins_alone(state: State) -> dict[int, int]:
    """Count the pins of each block by its id."""
    held = Counter(operation.block for operation in state.operations.values())
    held.update(block for pin in state.named_pins.values() for block in pin.blocks)
    left = {block: count - held[block] for block, count in state.device.pins.items()}
    return {block: count for block, count in left.items() if count}


def pin_hit(before: State, call: Call, outcome: Outcome[State, Any]) -> Iterator[str]:
    """PIN-HIT: if the prefix that a new pin covers was findable, it stays so when everything else
    that is cached is evicted; and until `evict_blocks`, a report or new weights, its blocks keep a
    key.
    """
    if call.name != "pin_prefix":
        had, has = before.device.has_key, outcome.state.device.has_key
        for name, pin in before.named_pins.items() if call.name not in TAKES_KEYS else ():
            for block in pin.blocks:
                if had(block) and not has(block):
                    yield f"{call.name} takes the keys of block {block}, which pin {name!r} holds"
        return
    request, length, after = before.requests[call.args[1]], outcome.value, outcome.state
    if is_found(before, request, length):
        for name in sorted(after.requests):
            if after.requests[name].status is not Status.WAITING:
                after = perform(after, Call("free", (name,))).state
        pool = after.device
        idle = [b for b in range(pool.num_blocks) if pool.has_key(b) and b not in pool.pins]
        if not is_found(perform(after, Call("evict_blocks", (idle,))).state, request, length):
            yield f"not all of the {length} tokens that pin {call.args[0]!r} covers are kept"


def is_found(state: State, request: RequestState, length: int) -> bool:
    """Return whether a look-up can find this many tokens of a request in all groups."""
    config = state.config
    return all(
        first_missing(state, request, group_id, needed(config, group_id, length)) is None
        for group_id in range(len(config.groups))
    )
