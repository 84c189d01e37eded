# SPDX-License-Identifier: Apache-2.0
"""Laws of the transitions, each on states that random runs lead to."""

from __future__ import annotations

from typing import Any

import attrs
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from kvcore import Refused, Request
from kvcore.codec.decode import decode
from kvcore.codec.encode import encode
from kvcore.pool.floors import NO_TENANT
from kvcore.pool.free_queue import make_free_queue, num_older
from kvcore.pool.policy_state import KEYLESS, with_places
from kvcore.state.state import State
from kvcore.trace.calls import Misuse
from kvcore.transitions import queries
from kvcore.transitions.allocate import allocate_slots, can_allocate
from kvcore.transitions.free import free
from kvcore.transitions.requests import add_tokens
from kvcore.transitions.truncate import truncate
from kvcore.transitions.window import remove_skipped_blocks
from kvcore.types.values import Appended, Status, Verdict
from tests.helpers.lockstep import Lockstep
from tests.helpers.machine import Machine
from tests.helpers.worlds import allocations, by_status, configs

RUNS = st.integers(0, 25)
CALLS_UNTIL_REFUSED = 8
"""Most calls fit: this many are tried, and a run without a refusal is dropped."""


@st.composite
def runs(draw: st.DrawFn) -> Lockstep:
    """Draw a run of the Python core after some calls of any rules; its request "fresh" waits."""
    machine = Machine()
    machine.run = Lockstep(draw(configs()), twin=False)
    machine.hits = []
    data = draw(st.data())
    for _ in range(draw(RUNS)):
        machine.anything(data)
    machine.run.call("add_request", Request("fresh", [0, 1, 0]))
    return machine.run


def apart_from_order(state: State) -> dict[str, Any]:
    """Return what undoing a call must restore: everything but keys, queue order, commands,
    statistics, and the number of the batch whose output a request takes.
    """
    return {
        "owners": list(state.device.ref_counts),
        "free": set(state.device.queue),
        "host": None if state.host is None else list(state.host.ref_counts),
        "requests": {
            name: replace(each, preempted=False, output_from=0, samplers=())
            for name, each in state.requests.items()
        },
        "scheduled": state.batch.scheduled,
    }


@given(runs(), st.data())
def test_append_equals_its_calls_one_by_one(run: Lockstep, data: st.DataObject) -> None:
    run.call("take_batch")
    names = [
        name
        for name in by_status(run.state, Status.RUNNING)
        if run.state.batch.scheduled[run.state.requests[name].row] is None
        and run.state.requests[name].num_computed == len(run.state.requests[name].tokens)
    ]
    assume(names)
    chosen = data.draw(st.lists(st.sampled_from(names), min_size=1, max_size=4, unique=True))
    tokens = data.draw(st.lists(st.integers(0, 1), min_size=len(chosen), max_size=len(chosen)))
    whole = run.call("append", chosen, tokens)
    assume(not isinstance(whole, Misuse))
    state, done, refused = run_before(run), 0, None
    for name, token in zip(chosen, tokens, strict=True):
        longer = add_tokens(state, name, [token]).state
        outcome = allocate_slots(longer, name, 1)
        if isinstance(outcome.value, Refused):
            refused = outcome.value  # which keeps the trim of windows, and not the token
            state = remove_skipped_blocks(state, name, state.requests[name].num_accepted).state
            break
        state, done = outcome.state, done + 1
    assert whole == Appended(done, refused)
    assert encode(run.state) == encode(state)


@given(runs(), st.data())
def test_free_in_the_open_batch_undoes_allocate_slots(run: Lockstep, data: st.DataObject) -> None:
    waiting = by_status(run.state, Status.WAITING)
    before = run.state
    name, count, hit, options = data.draw(allocations(run, [], waiting))
    assume(
        not isinstance(run.call("allocate_slots", name, count, hit, **options), Misuse | Refused)
    )
    undone = free(run.state, name).state
    assert apart_from_order(undone) == apart_from_order(before)
    kept = set(undone.device.index)
    assert kept <= set(before.device.index)
    assert all(block_keys(undone, block) for block in undone.device.index.values())


def block_keys(state: State, blocks: tuple[int, ...]) -> bool:
    """Tell whether each of these blocks has a key."""
    return all(state.device.keys[block] is not None for block in blocks)


def left(state: State, name: str) -> int:
    """Count the tokens of a request that can still be scheduled."""
    request = state.requests[name]
    if request.drafts or request.num_loading:
        return 0
    return min(len(request.tokens), state.config.length_limit) - request.num_computed


@given(runs(), st.data())
def test_cutting_nothing_in_the_open_batch_undoes_allocate_slots(
    run: Lockstep, data: st.DataObject
) -> None:
    run.call("allocate_slots", "fresh", 1)
    land(run)
    before = run.state
    lefts = {name: left(before, name) for name in by_status(before, Status.RUNNING)}
    names = [name for name, count in lefts.items() if count > 0]
    assume(names)
    name = data.draw(st.sampled_from(names))
    request = before.requests[name]
    outcome = allocate_slots(before, name, data.draw(st.integers(1, lefts[name])))
    assume(not isinstance(outcome.value, Refused))
    undone = truncate(outcome.state, name, len(request.tokens)).state.requests[name]
    assert undone.num_computed == request.num_computed
    for group, table, kept in zip(before.config.groups, request.tables, undone.tables, strict=True):
        needed = len(table) if group.is_cross else -(-undone.num_computed // group.block_size)
        assert len(kept) == min(len(table), needed)


@given(runs(), st.data())
def test_can_allocate_says_what_allocate_slots_does(run: Lockstep, data: st.DataObject) -> None:
    name, count, hit, options = data.draw(allocations(run, []))
    before = run.state
    value = run.call("allocate_slots", name, count, hit, **options)
    assume(not isinstance(value, Misuse))
    verdict = can_allocate(before, name, count, hit=hit, **options)
    expected = Verdict(value.reason.value) if isinstance(value, Refused) else Verdict.OK
    assert verdict is expected


@given(runs())
def test_queries_leave_the_state_as_it_is(run: Lockstep) -> None:
    before = encode(run.state)
    for name in run.state.requests:
        hit = queries.get_computed_blocks(run.state, name)
        assert hit.num_tokens < len(run.state.requests[name].tokens)
        queries.get_blocks(run.state, name)
        queries.get_num_common_prefix_blocks(run.state, name)
    queries.usage(run.state)
    assert encode(run.state) == before


@given(runs())
def test_encoded_state_is_read_back_as_itself(run: Lockstep) -> None:
    data = encode(run.state)
    assert decode(data) == run.state
    assert encode(decode(data)) == data


@given(runs())
def test_everyone_can_leave_at_any_moment_without_a_trace(run: Lockstep) -> None:
    for _ in range(len(run.state.requests)):
        for name in list(run.state.requests):
            if not isinstance(run.call("free", name), Misuse):
                run.call("remove_request", name)
    land(run)
    for number in sorted(run.state.operations):
        run.call("complete_operation", number, True)
    for block, count in list(run.state.device.pins.items()):
        run.call("unpin", [block] * count)
    state = run.state
    assert not state.requests
    assert state.device.num_free == state.device.num_usable
    assert state.host is None or state.host.num_free == state.host.num_usable
    assert not any(state.batch.scheduled)
    land(run)
    assert run.call("reset_prefix_cache") is True
    assert not run.state.device.index


def land(run: Lockstep) -> None:
    """Take the open batch and complete all that are in flight."""
    for number in [each.number for each in run.state.in_flight]:
        run.call("complete", number)
    run.call("take_batch")
    for number in [each.number for each in run.state.in_flight]:
        run.call("complete", number)


@given(configs(), st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=7), max_size=12))
@settings(max_examples=30)
def test_state_is_the_initial_one_after_requests_have_come_and_gone(
    config: Any, prompts: list[list[int]]
) -> None:
    run = Lockstep(config, twin=False)
    initial = run.state
    for number, prompt in enumerate(prompts):
        name = f"request {number}"
        run.call("add_request", Request(name, prompt))
        run.call("allocate_slots", name, len(prompt))
        land(run)
        run.call("take_events")
        run.call("free", name)
        run.call("remove_request", name)
    run.call("reset_prefix_cache")
    for _ in range(2):
        land(run)
    for name in ("take_events", "take_stats", "take_new_block_ids"):
        run.call(name)
    state = run.state
    assert sorted(state.device.queue) == sorted(initial.device.queue)
    policy = state.device.policy  # besides its counters, nothing is left
    assert policy is None or not any((policy.dues, policy.uses, policy.ghosts, policy.left))
    same = replace(
        state,
        device=attrs.evolve(state.device, queue=initial.device.queue, policy=initial.device.policy),
        next_due=initial.next_due,
        batch=initial.batch,
        rows=initial.rows,
        free_rows=initial.free_rows,
    )
    assert same == initial
    assert len(state.rows) <= config.max_rows(1)


@settings(suppress_health_check=list(HealthCheck))
@given(runs(), st.data())
def test_a_refusal_says_how_many_blocks_are_missing(run: Lockstep, data: st.DataObject) -> None:
    for _ in range(CALLS_UNTIL_REFUSED):
        name, count, hit, options = data.draw(allocations(run, []))
        before = run.state
        value = run.call("allocate_slots", name, count, hit, **options)
        if isinstance(value, Refused):
            break
    assume(isinstance(value, Refused))
    missing = value.needed - value.available
    kept_free = before.config.watermark_blocks + options.get("reserved_blocks", 0)
    assert missing > 0
    assume(value.available or not kept_free)
    enough = allocate_slots(roomier(before, missing), name, count, hit, **options).value
    assert not isinstance(enough, Refused) or enough.needed > value.needed
    scarce = allocate_slots(roomier(before, missing - 1), name, count, hit, **options).value
    assert isinstance(scarce, Refused)
    assert scarce.needed == value.needed


def roomier(state: State, count: int) -> State:
    """Return the pool with this many fresh blocks before all others of this epoch in the queue."""
    if not count:
        return state
    old = state.device
    first, last = old.num_blocks, old.num_blocks + count
    order, num_first = [*old.queue], num_older(old.queue)
    policy, floors = old.policy, old.floors
    order[num_first:num_first] = range(first, last)
    if floors is not None:
        floors = attrs.evolve(floors, takers=floors.takers.extend([NO_TENANT] * count))
    if policy is not None:
        longer = attrs.evolve(policy, places=policy.places.extend([KEYLESS] * count))
        policy = with_places(longer, {block: longer.places[block] for block in order[num_first:]})
    pool = attrs.evolve(
        old,
        policy=policy,
        floors=floors,
        ref_counts=old.ref_counts.extend([0] * count),
        keys=old.keys.extend([None] * count),
        queue=make_free_queue(last, order, num_first),
    )
    return replace(state, device=pool)


def run_before(run: Lockstep) -> State:
    """Return the state before the last call of a run, by making all but that one again."""
    again = Lockstep(run.state.config, twin=False)
    for call in run.calls[:-1]:
        again.call(call.name, *call.args, **call.options)
    return again.state
