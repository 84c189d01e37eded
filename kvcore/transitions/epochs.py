# SPDX-License-Identifier: Apache-2.0
"""Epochs of weights: new weights without a flush.

Invariants: a batch runs with the weights of the epoch in which it is taken. A key belongs to one
epoch, and look-ups find only those of the current one. A request belongs to the epoch in which its
count began. A request of an older epoch is stale: it keeps its blocks and goes on, but does not
publish, hit or load anything until its count is 0 and it is admitted again.
Twin: rust/src/transitions/epochs.rs.
"""

from __future__ import annotations

from msgspec.structs import replace

from kvcore.state.state import State
from kvcore.state.transaction import Transaction, transition
from kvcore.transitions.in_flight import give_back
from kvcore.types.arguments import read_int
from kvcore.types.config import MAX_EPOCH
from kvcore.types.errors import EpochWentBack, InOpenBatch
from kvcore.types.events import AllBlocksCleared
from kvcore.types.values import Outcome


def advance_epoch(state: State, epoch: int | None = None) -> Outcome[State, int]:
    """Begin an epoch of new weights: the next one, or the given later one; value: its number.

    Batches taken before run with the old weights, and may be in flight. No content computed before
    is findable any more; blocks keep their owners, and free ones leave first. Raises EpochWentBack,
    InOpenBatch if the open batch schedules a request or has a store or load.
    """
    given = read_int(epoch)

    def change(tx: Transaction) -> int:
        number = tx.epoch + 1 if given is None else given
        if not isinstance(number, int) or not tx.epoch < number <= MAX_EPOCH:
            raise EpochWentBack(epoch=number, current=tx.epoch, least=tx.epoch + 1, most=MAX_EPOCH)
        check_open_batch(tx)
        tx.epoch = number
        tx.batch = replace(tx.batch, starts_epoch=True)
        tx.device.start_epoch()
        if tx.config.has_states:
            give_back(tx, lambda _: True)
        tx.effects.announce(AllBlocksCleared())
        return number

    return transition(state, change)


def stale_requests(state: State) -> list[str]:
    """Return the requests that count tokens computed with older weights, in row order."""
    tx = Transaction(state)
    return [name for name in state.rows if name and tx.is_stale(state.requests[name])]


def check_open_batch(tx: Transaction) -> None:
    """Raise InOpenBatch if the open batch computes, stores or loads something."""
    for name, record in zip(tx.rows, tx.scheduled, strict=True):
        if record is not None:
            raise InOpenBatch(kind="request", value=name)
    for number, operation in sorted(tx.operations.items()):
        if operation.batch == tx.batch.number:
            raise InOpenBatch(kind="operation", value=number)
