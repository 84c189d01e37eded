# SPDX-License-Identifier: Apache-2.0
"""Pins: owners of blocks that are not requests, to keep content.

Twin: rust/src/transitions/pins.rs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from kvcore.state.state import State
from kvcore.state.transaction import Transaction, transition
from kvcore.types.arguments import read_ints
from kvcore.types.values import Outcome


def pin(state: State, block_ids: Iterable[int]) -> Outcome[State, None]:
    """Hold blocks that have an owner or a key, once per occurrence in the list.

    Raises UnknownBlock, UnusedBlock.
    """
    blocks = read_ints(block_ids)

    def change(tx: Transaction) -> None:
        tx.device.check_pins(blocks)
        for block in blocks:
            tx.device.pin(block)

    return transition(state, change)


def unpin(state: State, block_ids: Iterable[int]) -> Outcome[State, None]:
    """Undo `pin`; blocks that an unfinished operation holds keep that pin. Raises UnknownBlock,
    NotPinned.
    """
    blocks = read_ints(block_ids)

    def change(tx: Transaction) -> None:
        held = Counter(operation.block for operation in tx.operations.values())
        tx.device.check_unpins(blocks, held)
        for block in blocks:
            tx.device.unpin(block)

    return transition(state, change)
