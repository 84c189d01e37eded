# SPDX-License-Identifier: Apache-2.0
"""Qwen3-Next's layers in their real shapes, out of its configuration file, with random weights:
their pages have the bytes that `kvcore size` computes, and from blocks they answer, bit for bit, as
from one state per request that never moved.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from kvcore_runtime.cache.errors import InvalidLayout
from kvcore_runtime.engine.engine import Engine, EngineOptions
from kvcore_runtime.engine.forward import make_runtime
from kvcore_runtime.engine.sequence import GenerationRequest
from kvcore_runtime.errors import UnsupportedModelFile
from kvcore_runtime.model.contiguous import Generation, generate_reference
from kvcore_runtime.model.hybrid import read_hybrid
from kvcore_runtime.model.model import Llama, tiny_model
from kvcore_runtime.model.sampling import Sampling, derive_seed

from kvcore import Config
from kvcore.sizing import Limits, Model, SizeReport, StateSpec, make_manager_config, size_model
from kvcore.types.commands import CopyOnWrite, Evict, SwapIn, SwapOut, Zero
from tests.conftest import Backend
from tests.runtime.engine.spoiled import Foreseen, Spoiled
from tests.runtime.model.questions import QUESTIONS, SYSTEM, assert_drained, assert_same_answers
from tests.sizing.models import CONFIGS, HYBRIDS, write

QWEN = CONFIGS / "qwen3-next-80b-a3b.json"
LIMITS = Limits(max_model_len=1024, null_block=True)
NUM_BLOCKS = 10
NUM_DRAFTS, NUM_IDS = 2, 260
EVENTS = {
    *("Zero", "CopyOnWrite", "Evict", "SwapOut", "SwapIn", "hits inside", "recomputed"),
    *("overlapped", "accepted", "rejected", "forks"),
}
PERIOD = 4
"""Three layers with states, then one of attention."""


@pytest.fixture
def backend(backend_of_engine: Backend) -> Backend:
    """Return the twin; `make explore` has Python, too."""
    return backend_of_engine


def sized(model: Model, num_blocks: int = NUM_BLOCKS, **options: Any) -> SizeReport:
    """Return the report of `kvcore size` on a pool of some blocks."""
    limits = attrs.evolve(LIMITS, num_blocks=num_blocks)
    return size_model(model, 2**31, limits, **options)


@pytest.mark.parametrize("state_dtype", [..., "float32"])
@pytest.mark.parametrize("num_layers", [PERIOD, 2 * PERIOD])
def test_the_cache_takes_the_bytes_that_kvcore_size_computes(
    tmp_path: Path, num_layers: int, state_dtype: Any
) -> None:
    path = write(tmp_path, json.loads(QWEN.read_text()), mamba_ssm_dtype=state_dtype)
    shape, model = read_hybrid(path, num_layers=num_layers, hidden_size=8)
    report = sized(model)
    config = make_manager_config(report.config, LIMITS)
    llama = tiny_model(dtype=torch.bfloat16, config=shape)
    runtime, _ = make_runtime(llama, config, max_rows=2, max_tokens=8)
    cache = runtime.cache
    assert cache.blocks.data.nbytes == NUM_BLOCKS * report.config.block_bytes
    for group_id, group in enumerate(report.config.groups):
        if isinstance(group.spec, StateSpec):
            parts = cache.states[group_id]
            assert sum(each[0].nbytes for each in parts) == (
                len(group.layer_names) * group.spec.state_bytes
            )
        else:
            content = cache.groups[group_id].data[0]
            per_token = len(group.layer_names) * group.spec.token_bytes
            assert content.nbytes == group.spec.block_size * per_token
    assert {len(each) for each in cache.states.values()} == {2}
    assert len(cache.states) + len({0}) == len(report.config.groups)


def test_states_larger_than_a_page_are_refused() -> None:
    """A block of 528 tokens is one step of 16 short of a state."""
    shape, model = read_hybrid(QWEN, num_layers=PERIOD, hidden_size=8)
    config = make_manager_config(sized(model).config, LIMITS)
    groups = tuple(attrs.evolve(each, block_size=528, page_bytes=None) for each in config.groups)
    small, llama = Config(9, groups=groups), tiny_model(dtype=torch.bfloat16, config=shape)
    with pytest.raises(InvalidLayout, match=r"1097728 bytes of 1 layers .* 1081344 bytes"):
        make_runtime(llama, small, max_rows=2, max_tokens=8)


@pytest.mark.parametrize("name", [each for each in HYBRIDS if "qwen" not in each])
def test_other_families_are_refused_by_name(name: str) -> None:
    with pytest.raises(UnsupportedModelFile, match="expected qwen3_next"):
        read_hybrid(CONFIGS / f"{name}.json")


class Life:
    """An engine of this model whose pool is too small for its requests.

    report: what `kvcore size` says of its layers; groups and pages follow from it. answers: for
    the drafter, None for a life without drafts and batches in flight, but with swaps.
    """

    def __init__(
        self, model: Llama, report: SizeReport, backend: Backend, answers: Foreseen | None
    ) -> None:
        drafts = answers is not None
        config = make_manager_config(report.config, LIMITS)
        groups = [
            attrs.evolve(each, draft_states=NUM_DRAFTS * drafts) if each.is_state else each
            for each in config.groups
        ]
        config = attrs.evolve(
            config,
            groups=tuple(groups),
            hash_block_size=8,
            num_host_blocks=0 if drafts else 12,
            max_num_batched_tokens=24,
            max_in_flight=int(drafts),
        )
        options = EngineOptions(
            backend=backend,
            token_budget=24,
            preemption="recompute" if drafts else "swap",
            guard=True,
            keep_logits=True,
            drafter=None
            if answers is None
            else Spoiled(drafter=answers, seed=1, share=0.3, num_tokens=NUM_IDS),
        )
        self.engine = Engine(model, config, options)

    def answer(self, requests: Sequence[GenerationRequest]) -> tuple[dict[str, Any], Counter[str]]:
        """Return the answers to these requests, the last of which comes late, and what happened."""
        engine, completions = self.engine, {}
        for some in (requests[:-1], requests[-1:]):
            for each in some:
                engine.add_request(each)
            for done in engine.run():
                completions[f"{done.request_id}#{done.sample}"] = done
        assert_drained(engine)
        seen = {
            kind.__name__: engine.metrics.commands[kind.kind]
            for kind in (Zero, CopyOnWrite, Evict, SwapOut, SwapIn)
        }
        seen["hits inside"] = engine.scheduler.num_hits_inside
        seen["recomputed"] = engine.scheduler.preemptions.by_recompute
        seen["overlapped"] = engine.metrics.num_overlapped
        seen["accepted"] = engine.metrics.num_accepted_drafts
        seen["rejected"] = engine.metrics.num_drafts - engine.metrics.num_accepted_drafts
        seen["forks"] = sum(not name.endswith("#0") for name in completions)
        return completions, +Counter(seen)


def make_requests(start: bytes, length: int) -> list[GenerationRequest]:
    """Return prompts with one beginning; the second asks for two samples."""
    return [
        GenerationRequest(
            request_id=f"r{number}",
            prompt=tuple(start + question[:length]),
            sampling=Sampling(temperature=0.9, seed=number, max_tokens=9 + number),
            num_samples=2 if number == 1 else 1,
        )
        for number, question in enumerate(QUESTIONS[:4])
    ]


def expected(model: Llama, requests: Sequence[GenerationRequest]) -> dict[str, Generation]:
    """Return the answers to requests, each from states of its own that never moved."""
    samples = [(each, sample) for each in requests for sample in range(each.num_samples)]
    samplings = [
        attrs.evolve(each.sampling, seed=derive_seed(each.sampling.seed, sample))
        for each, sample in samples
    ]
    prompts = [each.prompt for each, _ in samples]
    found = generate_reference(model, prompts, samplings, keep_logits=True)
    names = [f"{each.request_id}#{sample}" for each, sample in samples]
    return dict(zip(names, found, strict=True))


def check_lives(
    model: Llama, report: SizeReport, requests: Sequence[GenerationRequest], backend: Backend
) -> Counter[str]:
    """Answer requests in two lives, compare the answers, and return what happened."""
    right, happened = expected(model, requests), Counter[str]()
    prompts = {each.request_id: each.prompt for each in requests}
    known = [(*prompts[name.split("#")[0]], *each.tokens) for name, each in right.items()]
    for answers in (None, Foreseen(tuple(known))):
        completions, seen = Life(model, report, backend, answers).answer(requests)
        assert_same_answers(completions, right)
        happened += seen
    return happened


@pytest.mark.parametrize("state_dtype", [..., pytest.param("float32", marks=pytest.mark.slow)])
def test_answers_from_blocks_are_those_of_states_that_never_moved(
    tmp_path: Path, state_dtype: Any, backend: Backend
) -> None:
    """Four layers of a narrow model: what each keeps has the real shape, hits end every 8 tokens
    in blocks of attention of 544 or more, and states stay every 16.
    """
    path = write(tmp_path, json.loads(QWEN.read_text()), mamba_ssm_dtype=state_dtype)
    shape, model = read_hybrid(path, num_layers=PERIOD, hidden_size=32)
    llama = tiny_model(dtype=torch.bfloat16, invariant=True, config=shape)
    report = sized(model, 18, checkpoint_interval=16)
    happened = check_lives(llama, report, make_requests(SYSTEM[:17], 7), backend)
    assert set(happened) == EVENTS


@pytest.mark.slow
def test_eight_layers_of_the_real_width_answer_alike(backend: Backend) -> None:
    shape, model = read_hybrid(QWEN, num_layers=2 * PERIOD)
    llama = tiny_model(dtype=torch.bfloat16, invariant=True, config=shape)
    report = sized(model, 18, checkpoint_interval=16)
    happened = check_lives(llama, report, make_requests(SYSTEM[:17], 7), backend)
    assert set(happened) == EVENTS


@pytest.mark.slow
def test_prompts_longer_than_a_block_of_attention_answer_alike(backend: Backend) -> None:
    shape, model = read_hybrid(QWEN, num_layers=PERIOD, hidden_size=32)
    llama = tiny_model(dtype=torch.bfloat16, invariant=True, config=shape)
    report = sized(model, 22, checkpoint_interval=16)
    happened = check_lives(llama, report, make_requests((SYSTEM * 9)[:561], 7), backend)
    assert set(happened) == EVENTS
