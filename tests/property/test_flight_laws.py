# SPDX-License-Identifier: Apache-2.0
"""Laws of batches in flight: cancelling undoes, completing late changes nothing but the queue."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from kvcore import Config, Group, Request
from kvcore.state.state import State
from kvcore.types.config import Publish
from kvcore.types.values import Status
from tests.helpers.lockstep import Lockstep
from tests.helpers.worlds import by_status

Step = tuple[list[list[int]], bool, bool]
"""Prompts that arrive in a step, whether requests go on, and whether the first one ends before."""

PROMPTS = st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=7), max_size=2)
STEPS = st.lists(st.tuples(PROMPTS, st.booleans(), st.booleans()), min_size=1, max_size=6)
PUBLISHES = st.sampled_from(["scheduled", "completed"])
LARGE = 400
"""Blocks enough that nothing is evicted."""


def config(max_in_flight: int, publish: Publish = "scheduled") -> Config:
    """Return a pool in which every step fits."""
    return Config(LARGE, 2, max_in_flight=max_in_flight, publish=publish, hash_seed=b"laws")


def make(run: Lockstep, step: Step) -> None:
    """Make the calls of one step, without its batch."""
    prompts, goes_on, ends = step
    running = by_status(run.state, Status.RUNNING)
    if ends and running:
        run.call("free", running[0])
        run.call("remove_request", running[0])
    running = by_status(run.state, Status.RUNNING)
    if goes_on and running:
        run.call("append", running, [0] * len(running))
    for prompt in prompts:
        name = f"r{sum(call.name == 'add_request' for call in run.calls)}"
        run.call("add_request", Request(name, prompt))
        hit = run.hit(name)
        run.call("allocate_slots", name, len(prompt) - hit.num_tokens, hit)


def take(run: Lockstep) -> None:
    """Take the batch; the oldest one is completed if that is needed."""
    state = run.state
    if state.config.max_in_flight and len(state.in_flight) == state.config.max_in_flight:
        run.call("complete", state.in_flight[0].number)
    run.call("take_batch")


def complete_all(run: Lockstep) -> None:
    """Nothing is in flight any more."""
    while run.state.in_flight:
        run.call("complete", run.state.in_flight[0].number)


def counts(state: State, names: Sequence[str]) -> dict[str, Any]:
    """Return what a cancel must restore: counts, tables, owners, keys and free blocks."""
    some = {name: state.requests[name] for name in names}
    return {
        "computed": {name: each.num_computed for name, each in some.items()},
        "tables": {name: each.tables for name, each in some.items()},
        "owners": list(state.device.ref_counts),
        "keys": set(state.device.index),
        "free": set(state.device.queue) | set(state.device.quarantine or ()),
    }


@given(STEPS, PUBLISHES, st.booleans(), st.booleans())
def test_cancel_right_after_take_undoes_the_batch(
    steps: list[Step], publish: Publish, late: bool, ran: bool
) -> None:
    run = Lockstep(config(2, publish))
    for step in steps[:-1]:
        make(run, step)
        take(run)
    if not late:
        complete_all(run)
    elif len(run.state.in_flight) == 2:
        run.call("complete", run.state.in_flight[0].number)
    names = sorted(run.state.requests)
    before = counts(run.state, names)
    prompts, goes_on, _ = steps[-1]
    make(run, (prompts, goes_on, False))
    number = run.state.batch.number
    run.call("take_batch")
    if ran:
        run.catch_up()
    run.call("cancel", number)
    assert counts(run.state, names) == before
    added = [each for name, each in run.state.requests.items() if name not in names]
    assert not any(each.num_computed or any(each.tables) for each in added)
    run.catch_up()


@given(STEPS, st.integers(1, 3))
def test_completing_late_changes_nothing_but_the_order_of_the_queue(
    steps: list[Step], max_in_flight: int
) -> None:
    at_once, late = Lockstep(config(0)), Lockstep(config(max_in_flight))
    for run in (at_once, late):
        for step in steps:
            make(run, step)
            take(run)
        complete_all(run)
    one, other = at_once.state, late.state
    names = sorted(one.requests)
    assert counts(one, names) == counts(other, names)
    if not any(ends for _, _, ends in steps):
        assert list(one.device.queue) == list(other.device.queue)
    assert not len(other.device.quarantine or ())


@given(STEPS, st.integers(1, 3), st.integers(0, 2))
def test_a_cancelled_engine_that_goes_on_ends_where_it_would_have(
    steps: list[Step], max_in_flight: int, index: int
) -> None:
    """What was taken back is scheduled again, and all of it is there; nothing leaks."""
    run = Lockstep(config(max_in_flight))
    for step in steps:
        make(run, step)
        take(run)
    run.call("cancel", run.state.in_flight[index % len(run.state.in_flight)].number)
    for name, request in sorted(run.state.requests.items()):
        hit = run.hit(name) if request.status is Status.WAITING else None
        start = request.num_computed + (hit.num_tokens if hit is not None else 0)
        if len(request.tokens) > start:
            run.call("allocate_slots", name, len(request.tokens) - start, hit)
    take(run)
    complete_all(run)
    run.catch_up()
    done = {name: each.num_computed for name, each in run.state.requests.items()}
    assert done == {name: len(each.tokens) for name, each in run.state.requests.items()}
    for name in sorted(done):
        run.call("free", name)
        run.call("remove_request", name)
    take(run)
    complete_all(run)
    assert run.state.device.num_free == run.state.config.num_usable_blocks


def test_a_late_batch_is_judged_by_the_encoders_that_it_was_taken_with() -> None:
    groups = (Group(1), Group(1, kind="cross_attention"))
    run = Lockstep(
        Config(6, groups=groups, enable_caching=False, null_block=False, max_in_flight=1)
    )
    run.call("add_request", Request("a", [0]))
    run.call("allocate_slots", "a", 1)
    run.call("take_batch")
    run.call("free", "a")
    run.call("allocate_slots", "a", 1, num_encoder_tokens=1)
    run.call("complete", 0)
