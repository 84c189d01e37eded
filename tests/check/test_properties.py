# SPDX-License-Identifier: Apache-2.0
"""The registry of properties, and checks of batches and calls on wrong ones made by hand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from msgspec.structs import replace

from kvcore import Config, Group
from kvcore.check.properties.closure import evict_order, prefix_closed
from kvcore.check.properties.facts import FACTS, SENTENCES, SPECIFIED
from kvcore.check.properties.outcomes import OUTCOME_PROPERTIES, check_outcome
from kvcore.check.properties.registry import PROPERTIES, BrokenProperty, Property, broken, select
from kvcore.check.properties.transitions import TRANSITION_CHECKS
from kvcore.invariants import pool_and_state
from kvcore.oracle.hazards import BATCH_CHECKS
from kvcore.oracle.prefixes import PREFIX_PROPERTIES, Prefixes
from kvcore.state.state import State, make_state
from kvcore.trace.calls import Call, perform
from kvcore.transitions.queries import get_computed_blocks
from kvcore.types.commands import (
    Allocate,
    Command,
    CopyOnWrite,
    Evict,
    Load,
    SwapIn,
    SwapOut,
    Zero,
    segments,
)
from kvcore.types.errors import InvariantViolation
from kvcore.types.keys import KEY_SIZE
from kvcore.types.values import Outcome, Refused, Request

KEY = bytes(KEY_SIZE)
NUM_SPECIFIED = 45
NUM_COMPANIONS = 17
"""Names that the list gives beside its 45 numbered ones."""


def run(*calls: Call, num_blocks: int = 3) -> State:
    """Return the state after these calls on an empty pool of blocks of two tokens."""
    state = make_state(Config(num_blocks, 2, null_block=False))
    for call in calls:
        state = perform(state, call).state
    return state


def prompt(name: str, *tokens: int) -> tuple[Call, Call, Call]:
    """Return a request that is admitted whole, with its batch taken."""
    added = Call("add_request", (Request(name, tokens),))
    return added, Call("allocate_slots", (name, len(tokens))), Call("take_batch")


def test_each_check_has_a_sentence_and_a_severity() -> None:
    named = {*pool_and_state.PROPERTIES, *OUTCOME_PROPERTIES, *PREFIX_PROPERTIES, *SENTENCES}
    assert named | set(TRANSITION_CHECKS) | set(BATCH_CHECKS) <= set(PROPERTIES)
    assert set(FACTS) == set(PROPERTIES)
    for name, each in PROPERTIES.items():
        assert each.name == name
        assert each.sentence, name


def test_each_specified_name_is_a_property_or_says_what_stands_for_it() -> None:
    assert len(SPECIFIED) == NUM_SPECIFIED + NUM_COMPANIONS
    for name, ours in SPECIFIED.items():
        if isinstance(ours, tuple):
            assert set(ours) <= set(PROPERTIES), name
        else:
            assert " " in ours, name


def test_a_world_is_checked_by_what_it_can_express() -> None:
    everything = select(None, frozenset({"append"}))
    assert {"EVICT-ORDER", "KV-READ"} < set(everything)
    assert "DETERMINISM" not in everything
    assert "EVICT-ORDER" not in select(None, frozenset({"truncate"}))
    assert set(select(frozenset({"LRU"}), frozenset())) == {"LRU"}
    assert "REF" not in select(None, frozenset(), observable=True)
    with pytest.raises(ValueError, match="there is no property SPEED"):
        select(frozenset({"SPEED"}), frozenset())


@pytest.mark.parametrize(
    ("name", "commands", "numbers"),
    [
        ("CMD-HAZARD", [Zero(1), Zero(1)], [0, 0]),
        ("CMD-HAZARD", [SwapOut(0, 0), SwapIn(1, 0)], [0, 0]),
        ("CMD-HAZARD", [Zero(1), Zero(2)], [1, 0]),
        ("CMD-COPYSET", [CopyOnWrite(0, 1), CopyOnWrite(2, 1)], [0, 0]),
        ("CMD-COPYSET", [CopyOnWrite(0, 1), CopyOnWrite(1, 2)], [0, 0]),
        ("CMD-COW-SRC", [Allocate(0), CopyOnWrite(0, 1)], [0, 0]),
        ("CMD-ORDER", [CopyOnWrite(0, 1), CopyOnWrite(1, 2)], [0, 0]),
        ("CMD-ORDER", [SwapIn(each, each) for each in range(5)] + [SwapOut(4, 9)], [0] * 6),
    ],
)
def test_a_wrong_batch_is_named(
    name: str, commands: Sequence[Command], numbers: Sequence[int]
) -> None:
    assert list(BATCH_CHECKS[name](run(), commands, numbers))
    right = list(BATCH_CHECKS[name](run(), commands, segments(commands)))
    assert not right or name == "CMD-COW-SRC"


def test_a_key_must_go_before_its_block_is_written() -> None:
    state = run(*prompt("a", 0, 1), Call("free", ("a",)))
    key = state.device.keys[0]
    assert key is not None
    first = BATCH_CHECKS["CMD-EVICT-FIRST"]
    assert list(first(state, [Allocate(0)], [0]))
    assert list(first(state, [Load(0, KEY, 0)], [0]))
    assert not list(first(state, [Evict(0, key), Allocate(0)], [0, 0]))


def changed(call: Call, *before: Call, **fields: Any) -> tuple[State, Call, Outcome[State, Any]]:
    """Return a call after others, with changed fields of its outcome."""
    state = run(*before)
    return state, call, replace(perform(state, call), **fields)


def test_the_order_of_the_free_queue_is_followed() -> None:
    add, allocate, _ = prompt("a", 0, 1)
    right = changed(allocate, add)
    assert not list(TRANSITION_CHECKS["LRU"](*right))
    assert list(TRANSITION_CHECKS["LRU"](*changed(allocate, add, commands=(Allocate(1),))))
    assert list(TRANSITION_CHECKS["LRU"](*changed(allocate, add, commands=())))


def test_a_key_changes_only_behind_its_eviction() -> None:
    story = (*prompt("a", 0, 1), Call("free", ("a",)))
    call = Call("evict_blocks", ([0],))
    assert not list(TRANSITION_CHECKS["HASH-MONO"](*changed(call, *story)))
    assert list(TRANSITION_CHECKS["HASH-MONO"](*changed(call, *story, commands=())))


def test_an_outcome_that_is_not_found_again_is_not_deterministic() -> None:
    add, allocate, _ = prompt("a", 0, 1)
    assert not list(TRANSITION_CHECKS["DETERMINISM"](*changed(allocate, add)))
    assert list(TRANSITION_CHECKS["DETERMINISM"](*changed(allocate, add, value=None)))
    assert list(TRANSITION_CHECKS["DETERMINISM"](*changed(allocate, add, state=run(add))))


def test_a_hit_keeps_its_blocks_and_leaves_a_token() -> None:
    story = (*prompt("a", 0, 1), Call("free", ("a",)))
    state = run(*story, Call("add_request", (Request("b", [0, 1, 2]),)))
    hit = get_computed_blocks(state, "b")
    assert hit.num_tokens == 2
    call = Call("allocate_slots", ("b", 1, hit))
    right = perform(state, call)
    for name in ("HIT-PRESERVE", "HIT-PINNED", "HIT-FRESH", "FULLHIT"):
        assert not list(TRANSITION_CHECKS[name](state, call, right))
    lost = perform(right.state, Call("evict_blocks", ([0],))).state
    assert list(TRANSITION_CHECKS["HIT-PRESERVE"](state, call, replace(right, state=lost)))
    evicted = replace(right, commands=(Evict(0, KEY),))
    assert list(TRANSITION_CHECKS["HIT-PINNED"](state, call, evicted))
    stale = perform(state, Call("evict_blocks", ([0],))).state
    assert list(TRANSITION_CHECKS["HIT-FRESH"](stale, call, right))
    b = right.state.requests["b"]
    short = right.state.requests.set("b", replace(b, tokens=b.tokens[:2]))
    full = replace(right, state=replace(right.state, requests=short))
    assert list(TRANSITION_CHECKS["FULLHIT"](state, call, full))


def test_a_child_that_outlives_its_parent_is_named() -> None:
    state = run(*prompt("a", 0, 1, 2, 3), Call("free", ("a",)))
    prefixes = Prefixes(state.config)
    prefixes.learn(state)
    assert not [*prefix_closed(state, prefixes), *evict_order(state, prefixes)]
    cut = perform(state, Call("evict_blocks", ([0],))).state
    assert list(prefix_closed(cut, prefixes))
    assert list(evict_order(cut, prefixes))


def test_a_property_that_raises_is_a_finding_of_its_own() -> None:
    def holds(_: State) -> Any:
        raise ZeroDivisionError("no blocks")

    mine = Property(name="MINE", sentence="mine", scope="state", severity="quality", holds=holds)
    with pytest.raises(BrokenProperty, match="MINE raised ZeroDivisionError: no blocks"):
        list(broken({"MINE": mine}, "state", run(), None))


def test_properties_of_a_scope_are_checked_together() -> None:
    state = run(*prompt("a", 0, 1))
    prefixes = Prefixes(state.config)
    prefixes.learn(state)
    assert not list(broken(PROPERTIES, "state", state, prefixes))
    wrong = replace(state, rows=state.rows.append("b"))
    assert [name for name, _ in broken(PROPERTIES, "state", wrong, prefixes)] == ["ROWS"]


def test_a_refusal_for_now_counts_what_the_open_batch_keeps_of_a_window() -> None:
    groups = (Group(1, kind="sliding_window", window=1), Group(1))
    state = make_state(Config(10, groups=groups, enable_caching=False))
    for call in (Call("add_request", (Request("a", [0] * 6),)), Call("allocate_slots", ("a", 1))):
        state = perform(state, call).state
    call = Call("allocate_slots", ("a", 3, None), {"num_external_computed_tokens": 2})
    outcome = perform(state, call)
    assert outcome.value.needed > state.device.num_usable
    check_outcome(state, call, outcome)
    taken = perform(state, Call("take_batch")).state
    with pytest.raises(InvariantViolation, match="ADMIT-EXACT"):
        check_outcome(taken, call, replace(outcome, state=taken))
    assert not isinstance(perform(taken, call).value, Refused)
