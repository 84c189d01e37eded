# SPDX-License-Identifier: Apache-2.0
"""The property of a state that has pins of prefixes.

Twin: rust/src/invariants/claims.rs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from kvcore.state.state import State


def wrong_pins(state: State) -> Iterator[str]:
    """Yield what is wrong with pins of prefixes: their blocks, their epoch, their owners."""
    pool, first, most = state.device, state.config.epoch, state.config.most_pinned
    held = Counter(operation.block for operation in state.operations.values())
    named = {block for pin in state.named_pins.values() for block in pin.blocks}
    for name, pin in sorted(state.named_pins.items()):
        held.update(pin.blocks)
        if not pin.blocks or len(set(pin.blocks)) < len(pin.blocks):
            yield f"pin {name!r} names blocks {list(pin.blocks)}"
        if not first <= pin.epoch <= state.epoch:
            yield f"pin {name!r} is of epoch {pin.epoch}, not {first} to {state.epoch}"
    for block in sorted(named):
        if block < pool.first_block or pool.pins.get(block, 0) < held[block]:
            yield f"block {block} has {pool.pins.get(block, 0)} pins, but {held[block]} hold it"
    if len(named) > most:
        yield f"pins hold {len(named)} blocks, {most} may be pinned"
