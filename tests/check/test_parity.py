# SPDX-License-Identifier: Apache-2.0
"""The comparison of a call that both languages make covers everything that the call returned."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from kvcore import Config, Group, Request
from kvcore.check.search.parity import Parity
from kvcore.state.state import State, make_state
from kvcore.trace.calls import Call, perform
from kvcore.types.commands import COLUMNS, Batch
from kvcore.types.errors import InvariantViolation
from kvcore.types.values import Appended, Outcome
from tests.conftest import need_twin

CONFIG = Config(4, groups=(Group(1),), hash_seed=b"")
CALLS = (
    Call("add_request", (Request("a", [1]),)),
    Call("allocate_slots", ("a", 1)),
    Call("take_batch"),
    Call("append", (["a"], [2])),
)


def play(num_calls: int) -> tuple[Parity, State, Call, Outcome[State, Any]]:
    """Return the comparison of the last of some calls, the state before it, and its outcome."""
    need_twin()
    parity, state = Parity(CONFIG), make_state(CONFIG)
    for call in CALLS[: num_calls - 1]:
        outcome = perform(state, call)
        parity(state, call, outcome)
        state = outcome.state
    call = CALLS[num_calls - 1]
    return parity, state, call, perform(state, call)


def test_the_places_that_tables_grew_by_are_compared() -> None:
    parity, state, call, outcome = play(4)
    assert isinstance(outcome.value, Appended)
    assert [column.tolist() for column in outcome.value.grown] == [[0], [0], [1], [2]]
    parity(state, call, outcome)
    for other in (b"", outcome.value.columns[:12] + b"\3\0\0\0"):
        wrong = replace(outcome.value, columns=other)
        assert wrong == outcome.value
        with pytest.raises(InvariantViolation, match=r"REFINE: append.*\[\[0\], \[0\], \[1\], \["):
            parity(state, call, Outcome(outcome.state, outcome.commands, wrong))


@pytest.mark.parametrize("column", COLUMNS)
def test_each_column_of_a_batch_is_compared(column: str) -> None:
    parity, state, call, outcome = play(3)
    assert isinstance(outcome.value, Batch)
    parity(state, call, outcome)
    wrong = Batch(outcome.value.number, bytearray(outcome.value.buffer), outcome.value.keys)
    wrong.column(column)[1] += 1
    with pytest.raises(InvariantViolation, match=f"REFINE: take_batch.*'{column}': "):
        parity(state, call, Outcome(outcome.state, outcome.commands, wrong))
