# SPDX-License-Identifier: Apache-2.0
"""Replicas behind a router: stories on paper, and laws of all rules and both models."""

from __future__ import annotations

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcore.replay.workload import TraceRequest
from kvcore.route.command_options import MODELS, RULES
from kvcore.route.fleet import Fleet
from kvcore.route.jobs import UnitsDiffer, read_jobs
from kvcore.route.results import WITH_INDEX, Options, Result, Waits
from tests.replay.small_traces import ask, traces
from tests.route.runs import fleet_of, run

CHAT = [ask(1, 8, 0, 1, 2), ask(2, 8, 0, 1, 2), ask(3, 8, 0, 1, 2, at=10.0)]
"""Two blocks, three times: the third when both others are done."""


def options(rules: tuple[str, ...] = RULES) -> st.SearchStrategy[Options]:
    """Draw small fleets of every kind."""
    return st.builds(
        Options,
        num_replicas=st.integers(2, 4),
        num_blocks=st.integers(12, 60),
        rule=st.sampled_from(rules),
        model=st.sampled_from(MODELS),
        scale=st.sampled_from([0.5, 8.0]),
        delay=st.sampled_from([0.0, 0.3, 9.0]),
        loss=st.sampled_from([0.0, 0.4]),
        replay=st.booleans(),
        num_dead=st.integers(0, 1),
        prefill_rate=st.just(20.0),
        seconds_per_decode=st.just(0.1),
        seed=st.integers(0, 9),
    )


def virtual(result: Result) -> Result:
    """Return what is the same on every machine."""
    return attrs.evolve(result, router_seconds=0.0)


def run_with(requests: list[TraceRequest], plan: Options) -> Result:
    """Run on the Python core."""
    return Fleet(read_jobs(requests, None, 1.0), plan, "python").run()


def test_round_robin_computes_a_prompt_on_each_replica() -> None:
    result = run(CHAT)
    assert (result.blocks, result.hit_blocks) == (6, 2)
    assert result.first_token == Waits(p50=2.0, p95=2.0, p99=2.0)
    assert result.busiest == 9 / 8.5  # the third computes one token, on the first replica
    assert result.copies == 2.0
    assert result.seconds == 10.25


def test_prefix_lets_requests_wait_where_their_prefix_is() -> None:
    result = run(CHAT, rule="prefix")
    assert (result.blocks, result.hit_blocks) == (6, 4)
    assert result.first_token == Waits(p50=2.0, p95=2.0, p99=2.0)
    assert (result.busiest, result.copies) == (2.0, 1.0)


def test_least_loaded_goes_round_a_long_prompt() -> None:
    long, short = ask(1, 40, 0, *range(10)), [ask(n, 4, 0, 10 + n, at=n) for n in range(2, 6)]
    result = run([long, *short], rule="least-loaded")
    assert result.busiest == 40 / 28  # the short ones, of 4 tokens each, all went to the other


def test_the_cost_rule_weighs_a_prefix_against_a_queue() -> None:
    """The first replica has 3 blocks of the last prompt, and a queue of 6 when that comes."""
    first, queued = ask(1, 12, 0, 1, 2, 3), ask(2, 36, 0, 1, 2, 3, *range(4, 10), at=4.0)
    requested = ask(3, 16, 0, 1, 2, 3, 99, at=4.0)
    assert run([first, queued, requested], rule="cost").hit_blocks == 3
    idle = ask(3, 16, 0, 1, 2, 3, 99, at=8.0)  # 2 blocks of the queue are left: 3 against 4
    assert run([first, queued, idle], rule="cost").hit_blocks == 6


def test_the_cost_rule_counts_what_waits_behind_a_prompt() -> None:
    """Two prompts go where 3 of their blocks are, which leaves 1 and 8 blocks: 10 against 4."""
    prompts = ((1, 2, 3), (1, 2, 3, 4), (1, 2, 3, *range(50, 58)), (1, 2, 3, 99))
    times = (0.0, 4.0, 4.0, 4.0)
    requests = [
        ask(n, 4 * len(ids), 0, *ids, at=at)
        for n, (ids, at) in enumerate(zip(prompts, times, strict=True))
    ]
    assert run(requests, rule="cost").hit_blocks == 6
    assert run(requests[:3], rule="cost").hit_blocks == 6


def test_requests_that_decode_count_once_whatever_the_scale() -> None:
    """The first replica decodes 9 blocks, and has 3 of the 4 blocks that are asked for."""
    requests = [ask(1, 36, 99, *range(9)), ask(2, 16, 0, 0, 1, 2, 99, at=20.0)]
    assert run(requests, rule="cost", scale=1.0).hit_blocks == 0
    assert run(requests, rule="cost", scale=4.0).hit_blocks == 3


def test_hash_keeps_prefixes_together_whatever_follows() -> None:
    requests = [ask(n, 12, 0, 1, 2, 3 + n, at=9.0 * n) for n in range(8)]
    assert run(requests, rule="hash", num_replicas=5).hit_blocks == 14


def test_events_that_are_late_are_not_there_to_route_by() -> None:
    """The first prompt is computed at 2 s, the second comes at 3 s; events take 0.9 or 1.1 s."""
    requests = [ask(1, 8, 2, 1, 2), ask(2, 12, 0, 1, 2, 3, at=3.0)]
    assert run(requests, rule="cost", scale=9.0, delay=0.9).hit_blocks == 2
    assert run(requests, rule="cost", scale=9.0, delay=1.1).hit_blocks == 0


def test_a_manager_lets_a_request_wait_for_room() -> None:
    """Each request needs 4 of six blocks, with its 2 outputs; the first holds its until 5 s."""
    requests = [ask(1, 12, 2, 1, 2, 3), ask(2, 12, 2, 4, 5, 6), ask(3, 28, 1, *range(7, 14))]
    fleet = fleet_of(requests, num_replicas=1, num_blocks=6, model="manager")
    result = fleet.run()
    assert (result.requests, result.refused) == (2, 1)
    assert result.first_token == Waits(p50=3.0, p95=3.0, p99=3.0)
    assert result.seconds == 8.0
    assert fleet.replicas[0].waiting == fleet.replicas[0].queued == 0


def test_what_a_dead_replica_had_is_computed_again() -> None:
    """With round-robin, one of two dies when the third comes, whose wait goes on elsewhere."""
    requests = [ask(n, 8, 0, 1, 2, at=at) for n, at in ((1, 0.0), (2, 0.0), (3, 1.0), (4, 9.0))]
    result = run(requests, num_dead=1)
    assert result.requests == 4
    assert 1 <= result.again <= 2
    assert result.died_blocks == 0  # nothing was computed yet
    late = [ask(1, 8, 0, 1, 2), ask(2, 8, 0, 1, 3), ask(3, 8, 0, 1, 2, at=9.0)]
    assert run([*late, ask(4, 8, 0, 1, 3, at=9.0)], num_dead=1).died_blocks == 1


def test_the_end_of_a_prompt_leaves_the_model_before_its_beginning() -> None:
    """With two blocks, the third prompt finds the beginning of the first, whose end made room."""
    requests = [ask(1, 8, 0, 1, 2), ask(2, 4, 0, 3, at=5.0), ask(3, 8, 0, 1, 2, at=9.0)]
    assert run(requests, num_replicas=1, num_blocks=2).hit_blocks == 1


def test_units_that_differ_are_refused() -> None:
    other = attrs.evolve(CHAT[1], unit=8)
    with pytest.raises(UnitsDiffer, match="line 2 has 8 tokens per id, those before it 4"):
        read_jobs([CHAT[0], other], None, 1.0)


@given(requests=traces(), plan=options())
def test_no_fleet_finds_more_than_one_cache_without_limit(
    requests: list[TraceRequest], plan: Options
) -> None:
    workload = read_jobs(requests, None, 1.0)
    result = run_with(requests, plan)
    assert result.requests + result.refused == len(requests)
    if not result.refused:
        assert result.blocks == workload.num_blocks
        assert result.hit_blocks <= workload.num_blocks - workload.num_distinct


@given(requests=traces(), plan=options())
def test_the_same_seed_gives_the_same_result(requests: list[TraceRequest], plan: Options) -> None:
    assert virtual(run_with(requests, plan)) == virtual(run_with(requests, plan))


@given(requests=traces(), plan=options())
def test_with_one_replica_all_rules_are_equal(requests: list[TraceRequest], plan: Options) -> None:
    alone = attrs.evolve(plan, num_replicas=1, num_dead=0, loss=0.0)
    results = [run_with(requests, attrs.evolve(alone, rule=rule)) for rule in RULES]
    assert {attrs.evolve(virtual(each), options=alone) for each in results} == {
        attrs.evolve(virtual(results[0]), options=alone)
    }


@given(requests=traces(), plan=options(WITH_INDEX))
def test_without_loss_the_index_has_in_the_end_what_the_replicas_have(
    requests: list[TraceRequest], plan: Options
) -> None:
    fleet = Fleet(read_jobs(requests, None, 1.0), attrs.evolve(plan, loss=0.0), "python")
    fleet.run()
    index = fleet.feed.index
    assert index is not None
    for each in fleet.replicas:
        found = {name for _, name in index.keys(str(each.number), 0)}
        assert found == (each.cache.names() if each.alive else set())


@given(requests=traces(), plan=options(("round-robin", "hash")))
def test_a_manager_finds_what_the_model_does_but_the_last_block(
    requests: list[TraceRequest], plan: Options
) -> None:
    """This holds if everything fits, except for a prompt's partial or last block."""
    ample = attrs.evolve(plan, num_blocks=1_000, num_dead=0)
    model, manager = (
        run_with(requests, attrs.evolve(ample, model=each)).hit_blocks for each in MODELS
    )
    assert model - len(requests) <= manager <= model
