# SPDX-License-Identifier: Apache-2.0
"""From prompt to text in vLLM's EngineCore over kvcore, with an executor that samples by a rule."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.engines.vllm.environment import ABSENT

pytest.importorskip("vllm", reason=ABSENT)

import kvcore_vllm
from kvcore_vllm.short_ways import KVCacheManager
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.core import EngineCore

from kvcore.record.reader import read_calls
from kvcore.record.segment import read_segment
from kvcore.replay.records.rerun import rerun
from tests.engines.vllm.engine import make_cache, make_config, make_engine
from tests.engines.vllm.engine import run as run_scheduler
from tests.engines.vllm.letters import Letters, answer

pytestmark = pytest.mark.vllm

RULES = "You are a clerk. "
PROMPTS = {f"r{n}": f"{RULES}{'Say it again. ' * (n % 3)}#{n}" for n in range(8)}
COUNT = 12


def make_core(*, is_async: bool, num_blocks: int = 40) -> Any:
    """Make vLLM's core over kvcore, with room for two or three requests."""
    config = make_config(async_scheduling=is_async, scheduler_cls="kvcore_vllm.Scheduler")
    config.cache_config.num_gpu_blocks_override = num_blocks
    core = EngineCore(config, Letters, log_stats=True)
    assert type(core.scheduler.kv_cache_manager) is KVCacheManager
    return core


def add(core: Any, name: str, prompt: str, count: int = COUNT) -> None:
    """Add a prompt."""
    request = EngineCoreRequest(
        request_id=name,
        prompt_token_ids=list(map(ord, prompt)),
        mm_features=None,
        sampling_params=SamplingParams(max_tokens=count, ignore_eos=True),
        pooling_params=None,
        arrival_time=0.0,
        lora_request=None,
        cache_salt=None,
        data_parallel_rank=None,
    )
    core.add_request(*core.preprocess_add_request(request))


def add_all(core: Any, turn: object) -> dict[str, str]:
    """Add all prompts; return the expected answer to each."""
    prompts = {f"{name}-{turn}": prompt for name, prompt in PROMPTS.items()}
    for name, prompt in prompts.items():
        add(core, name, prompt)
    return {name: answer(prompt, COUNT) for name, prompt in prompts.items()}


def run(core: Any, most: int = 400) -> tuple[dict[str, str], int]:
    """Step until nothing is left. Returns the texts, and how many tokens were hit."""
    texts: dict[str, str] = {}
    num_hits = 0
    for _ in range(most):
        step = (core.step_fn()[0] or {}).get(0)
        for each in step.outputs if step else ():
            said = "".join(map(chr, each.new_token_ids))
            texts[each.request_id] = texts.get(each.request_id, "") + said
        if step and step.scheduler_stats:
            num_hits += step.scheduler_stats.prefix_cache_stats.hits
        core.scheduler.kv_cache_manager.compat.core.check()
        if not core.scheduler.has_requests() and not core.batch_queue:
            return texts, num_hits
    raise AssertionError(f"after {most} steps {sorted(core.scheduler.requests)} are left")


@pytest.mark.parametrize("is_async", [False, True])
def test_texts_are_the_models_while_blocks_are_hit_evicted_and_taken_away(is_async: bool) -> None:
    core = make_core(is_async=is_async, num_blocks=28)
    hits = []
    for turn in range(3):
        expected = add_all(core, turn)
        texts, num_hits = run(core)
        assert texts == expected
        hits.append(num_hits)
    assert min(hits) > 0
    assert core.scheduler.kv_cache_manager.usage == 0.0


@pytest.mark.parametrize("is_async", [False, True])
def test_requests_may_be_aborted_after_any_step(is_async: bool) -> None:
    core = make_core(is_async=is_async)
    for moment in range(16):
        expected = add_all(core, moment)
        for _ in range(moment):
            core.step_fn()
        gone = {f"r1-{moment}", f"r2-{moment}"}
        core.abort_requests(sorted(gone))
        texts, _ = run(core)
        assert all(said and expected[name].endswith(said) for name, said in texts.items())
        assert moment > 5 or texts.keys() == expected.keys() - gone
        assert core.scheduler.kv_cache_manager.usage == 0.0
    expected = add_all(core, "end")
    assert run(core)[0] == expected


def test_two_engines_in_one_process_do_not_meet() -> None:
    cores = [make_core(is_async=is_async) for is_async in (False, True)]
    expected = [add_all(core, "r") for core in cores]
    add(cores[1], "other", "Only here.")
    for _ in range(5):
        for core in cores:
            core.step_fn()
    texts = [run(core)[0] for core in cores]
    assert texts[1].pop("other") == answer("Only here.", COUNT)
    for said, whole in zip(texts, expected, strict=True):
        assert said.keys() == whole.keys()
        assert all(part and whole[name].endswith(part) for name, part in said.items())


def test_after_a_failed_step_and_a_reset_nothing_of_it_is_hit() -> None:
    core = make_core(is_async=False)
    core.model_executor.fails = 3
    add_all(core, "lost")
    with pytest.raises(RuntimeError, match=r"^the model failed$"):
        run(core)
    core.scheduler.kv_cache_manager.compat.core.check()
    assert not core.reset_prefix_cache()  # blocks are used
    core.abort_requests(list(core.scheduler.requests))
    assert core.reset_prefix_cache()
    add(core, "first", PROMPTS["r0"])
    assert run(core) == ({"first": answer(PROMPTS["r0"], COUNT)}, 0)
    expected = add_all(core, "next")
    assert run(core)[0] == expected


def test_after_new_weights_and_a_reset_nothing_old_is_hit() -> None:
    core = make_core(is_async=True)
    add(core, "old", PROMPTS["r0"])
    run(core)
    add(core, "same", PROMPTS["r0"])
    assert run(core)[1] > 0
    assert core.reset_prefix_cache()
    add(core, "new", PROMPTS["r0"])
    assert run(core) == ({"new": answer(PROMPTS["r0"], COUNT)}, 0)


@pytest.mark.parametrize("num_blocks", [33, 9])
def test_a_run_of_vllms_scheduler_is_recorded_and_made_again(
    num_blocks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVCORE_RECORD", str(tmp_path))
    cache_config = make_cache(num_blocks=num_blocks)
    scheduler = make_engine(kvcore_vllm.Scheduler, cache_config=cache_config)
    prompts = {name: [*range(16), place] for place, name in enumerate("abcd")}
    answered = run_scheduler(scheduler, prompts)
    assert answered == dict.fromkeys(prompts, 3)
    segment = read_segment(tmp_path / "0000" / "00000000.kvcrec")
    names = [call.name for call in read_calls(segment)]
    assert names.count("add_request") == len(prompts)
    assert {"get_computed_blocks", "allocate_slots", "take_batch", "free"} <= {*names}
    done = rerun(tmp_path / "0000", ["rust", "python"])
    assert (done.num_calls, done.difference) == (len(names), None)
