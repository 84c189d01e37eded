# SPDX-License-Identifier: Apache-2.0
"""transformers gives the same tokens over kvcore as over its own cache and as `generate()`."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import pytest

from tests.engines.transformers.environment import ABSENT

pytest.importorskip("transformers", reason=ABSENT)

import kvcore_transformers

from kvcore.record.reader import read_calls
from kvcore.record.segment import read_segment
from kvcore.replay.records.rerun import rerun
from tests.engines.transformers.models import (
    LAYERS,
    both,
    draw_prompts,
    generated,
    reference,
    serve,
    tiny,
)

pytestmark = pytest.mark.transformers
ROOMY, SMALL = 60, 16


@pytest.mark.parametrize("num_blocks", [ROOMY, SMALL])
@pytest.mark.parametrize("kind", LAYERS)
def test_greedy_tokens_are_those_of_the_native_cache_and_of_generate(
    kind: str, num_blocks: int
) -> None:
    for seed in range(2):
        native, ours = both(kind, seed, num_blocks=num_blocks)
        assert ours.tokens == native.tokens == reference(kind, seed)
        assert ours.num_leaked() == 0
        if num_blocks == ROOMY:
            assert ours.hits >= max(native.hits, 1)
        else:
            assert ours.cache.statistics.evictions > 0


@pytest.mark.parametrize("num_blocks", [ROOMY, SMALL])
@pytest.mark.parametrize("kind", LAYERS)
def test_samples_of_one_prompt_share_blocks_and_give_the_same_tokens(
    kind: str, num_blocks: int
) -> None:
    native, ours = both(kind, 1, n=3, num_blocks=num_blocks)
    answers = reference(kind, 1)
    for tokens in (native.tokens, ours.tokens):
        assert len(tokens) == 3 * len(answers)
        assert tokens == {name: answers[name.split("__")[0]] for name in tokens}
    assert ours.num_leaked() == 0
    assert ours.cache.statistics.copies > 0


@pytest.mark.parametrize("kind", LAYERS)
def test_under_eviction_kvcore_finds_no_fewer_tokens(kind: str) -> None:
    num_hits = 0
    for seed in range(3):  # one at a time: no request begins anew, which would find itself
        native, ours = both(kind, seed, num_blocks=SMALL, max_requests_per_batch=1)
        assert ours.hits >= native.hits
        assert ours.computed <= native.computed
        num_hits += ours.hits - native.hits
    assert num_hits > 0


def test_layers_with_a_window_share_prefixes_which_the_native_cache_does_not() -> None:
    native, ours = both("hybrid", 0)
    assert native.hits == 0
    assert ours.hits > 100
    assert ours.computed < native.computed


def test_without_block_sharing_nothing_is_found() -> None:
    native, ours = both("full", 0, allow_block_sharing=False)
    assert ours.tokens == native.tokens
    assert ours.hits == native.hits == 0


@pytest.mark.parametrize("scheduler_type", ["fifo", "prefill_first"])
def test_each_scheduler_of_transformers_runs_over_kvcore(scheduler_type: str) -> None:
    model, prompts = tiny(), draw_prompts(1)
    with kvcore_transformers.installed():
        ours = serve(model, prompts, num_blocks=SMALL, scheduler_type=scheduler_type)
    assert ours.tokens == reference("full", 1)
    assert ours.num_leaked() == 0


def test_a_request_whose_tokens_cannot_be_read_in_a_step_gets_no_slot_in_it() -> None:
    model, prompts = tiny(), [[number % 128 for number in range(60)]]
    served = []
    for is_ours in (False, True):
        with kvcore_transformers.installed() if is_ours else nullcontext():
            served.append(serve(model, prompts, n=4, num_blocks=SMALL, safety_margin=0.0))
    answer = generated(model, prompts)["r0"]
    for each in served:  # four of 60 tokens, and the pool has 128, which a step reads at most
        assert each.errors == {}
        assert list(each.tokens.values()) == [answer] * 4
    assert served[1].num_leaked() == 0


@pytest.mark.parametrize("kind", LAYERS)
def test_a_run_of_transformers_is_recorded_and_made_again(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVCORE_RECORD", str(tmp_path))
    prompts = draw_prompts(1)
    with kvcore_transformers.installed():
        served = serve(tiny(kind), prompts, num_blocks=16)
    assert served.tokens == reference(kind, 1)
    names: list[str] = []
    for folder in tmp_path.iterdir():  # transformers makes the cache anew when it starts
        made = [call.name for call in read_calls(read_segment(folder / "00000000.kvcrec"))]
        done = rerun(folder, ["rust", "python"])
        assert (done.num_calls, done.difference) == (len(made), None)
        names += made
    assert names.count("add_request") >= len(prompts)
    assert {"get_computed_blocks", "allocate_slots", "take_batch", "free"} <= {*names}
