# SPDX-License-Identifier: Apache-2.0
"""A model with windowed layers: with groups that give blocks back after their window it answers,
bit for bit, as from contiguous tensors that keep the full history and mask it.
"""

import attrs
import pytest
from kvcore_runtime.attention.visibility import FULL, Visibility
from kvcore_runtime.cache.errors import GroupsDoNotHoldModel, UnequalPages
from kvcore_runtime.cache.layer_groups import make_groups
from kvcore_runtime.engine.engine import Engine, EngineOptions
from kvcore_runtime.engine.errors import InvalidOption
from kvcore_runtime.engine.scheduler import Preemption
from kvcore_runtime.engine.sequence import GenerationRequest
from kvcore_runtime.model.model import Llama
from kvcore_runtime.model.sampling import Sampling

from kvcore import Config, Group
from kvcore.types.commands import Batch, CopyOnWrite, Evict, SwapIn, SwapOut
from tests.conftest import Backend
from tests.runtime.model.questions import (
    SLIDING,
    SYSTEM,
    answer,
    assert_drained,
    assert_same_answers,
    model_of,
    references,
    requests,
)

CHUNKED = Visibility(kind="chunked_local", window=40)
MODELS = {
    "alternating": (FULL, SLIDING, FULL, SLIDING),
    "chunks": (CHUNKED, FULL),
    "three kinds": (SLIDING, FULL, CHUNKED, SLIDING),
    "windows only": (SLIDING, SLIDING),
    "one in three": (FULL, SLIDING, SLIDING),
}
NULL_BLOCK = 0


@pytest.fixture
def backend(backend_of_engine: Backend) -> Backend:
    """Return the twin; `make explore` has Python, too."""
    return backend_of_engine


def model(name: str) -> Llama:
    return model_of(MODELS[name])


def make_engine(
    name: str,
    backend: Backend,
    num_blocks: int,
    num_host_blocks: int = 0,
    *,
    groups: tuple[Group, ...] = (),
    token_budget: int = 64,
    preemption: Preemption = "swap",
) -> Engine:
    config = Config(
        num_blocks,
        num_host_blocks=num_host_blocks,
        groups=groups or make_groups(MODELS[name], 16),
        max_num_batched_tokens=token_budget,
    )
    options = EngineOptions(
        backend=backend,
        token_budget=token_budget,
        preemption=preemption,
        guard=True,
        keep_logits=True,
    )
    return Engine(model(name), config, options)


@pytest.mark.parametrize(
    ("name", "num_blocks", "num_host_blocks", "token_budget", "preemption"),
    [
        pytest.param("alternating", 300, 0, 256, "swap", id="all fits"),
        pytest.param("alternating", 300, 0, 24, "swap", id="small chunks"),
        pytest.param("alternating", 31, 60, 64, "swap", id="swaps"),
        pytest.param("alternating", 33, 0, 40, "recompute", id="recomputes"),
        pytest.param("chunks", 18, 20, 24, "swap", id="chunks"),
        pytest.param("windows only", 10, 20, 64, "swap", id="windows only"),
        pytest.param("three kinds", 40, 20, 64, "swap", id="three kinds"),
        pytest.param("one in three", 30, 0, 64, "recompute", id="one in three"),
    ],
)
def test_windowed_groups_answer_as_the_full_history_masked(
    backend: Backend,
    name: str,
    num_blocks: int,
    num_host_blocks: int,
    token_budget: int,
    preemption: Preemption,
) -> None:
    engine = make_engine(
        name,
        backend,
        num_blocks,
        num_host_blocks,
        token_budget=token_budget,
        preemption=preemption,
    )
    assert_same_answers(answer(engine, requests()), references(model(name)))
    assert_drained(engine)


@pytest.mark.parametrize("name", ["alternating", "chunks"])
def test_a_full_attention_group_keeps_windowed_layers_too(backend: Backend, name: str) -> None:
    engine = make_engine(name, backend, 120, groups=(Group(16),))
    assert_same_answers(answer(engine, requests()), references(model(name)))
    assert_drained(engine)


def test_blocks_of_one_page_may_hold_more_tokens_of_fewer_layers(backend: Backend) -> None:
    """One full layer with 32 tokens per block and two sliding ones with 16 have equal pages."""
    groups = (Group(32), Group(16, kind="sliding_window", window=21))
    for num_blocks in (200, 28):
        engine = make_engine("one in three", backend, num_blocks, 30, groups=groups)
        assert [each.data.shape[1] for each in engine.runtime.cache.groups] == [1, 2]
        assert [each.data.shape[3] for each in engine.runtime.cache.groups] == [32, 16]
        assert_same_answers(answer(engine, requests()), references(model("one in three")))
        assert_drained(engine)


def test_a_small_pool_brings_about_all_that_is_claimed(backend: Backend) -> None:
    swapping = make_engine("alternating", backend, 33, 24)
    answer(swapping, requests())
    for kind in (Evict, CopyOnWrite, SwapOut, SwapIn):
        assert swapping.metrics.commands[kind.kind] > 0, kind
    assert swapping.manager.take_stats().hits > 0
    assert swapping.scheduler.preemptions.by_swap > 0
    computing = make_engine("alternating", backend, 33, preemption="recompute")
    answer(computing, requests())
    assert computing.scheduler.preemptions.by_recompute > 0


def test_a_long_answer_holds_no_more_than_its_window(backend: Backend) -> None:
    held: list[tuple[int, int]] = []

    def count(engine: Engine, _batch: Batch) -> None:
        row = engine.scheduler.running[0].row
        table = engine.runtime.tables.row_blocks(row)
        held.append((len(table), len([block for block in table if block != NULL_BLOCK])))

    config = Config(5, groups=make_groups(MODELS["windows only"], 16), max_num_batched_tokens=16)
    options = EngineOptions(backend=backend, token_budget=16, guard=True)
    engine = Engine(model("windows only"), config, options, observe=count)
    request = GenerationRequest(
        request_id="long", prompt=tuple(SYSTEM), sampling=Sampling(max_tokens=160)
    )
    answer(engine, [request])
    assert held[-1][0] == 15  # 68 + 160 tokens, of which the last takes no slot
    # 21 tokens that a query sees lie in at most 3 blocks, 20 + 16 in at most 4.
    assert max(in_use for _, in_use in held) <= 4
    assert max(in_use for _, in_use in held[5:]) == 3
    assert_drained(engine)


def test_a_later_turn_hits_behind_what_its_window_has_dropped(backend: Backend) -> None:
    engine = make_engine("alternating", backend, 200)
    first = GenerationRequest(
        request_id="1", prompt=tuple(SYSTEM), sampling=Sampling(max_tokens=20)
    )
    (done,) = answer(engine, [first]).values()
    before = engine.metrics.num_computed_tokens
    prompt = (*first.prompt, *done.tokens, *b"And then?")
    second = GenerationRequest(request_id="2", prompt=prompt, sampling=Sampling(max_tokens=1))
    answer(engine, [second])
    # 68 + 20 tokens, the last of which was never computed: five whole blocks are cached.
    assert engine.metrics.num_computed_tokens - before == len(prompt) - 80


def test_groups_that_do_not_hold_the_model_are_refused(backend: Backend) -> None:
    for groups, error, message in (
        ((Group(16, kind="sliding_window", window=20),), GroupsDoNotHoldModel, "full_attention"),
        (
            (Group(16), Group(16, kind="sliding_window", window=20)),
            GroupsDoNotHoldModel,
            "no layer lies in group 1",
        ),
        (
            (Group(32), Group(16, kind="sliding_window", window=21)),
            UnequalPages,
            "group 1 has 2 layers with blocks of 16 tokens, group 0 has 2 with blocks of 32",
        ),
    ):
        with pytest.raises(error, match=message):
            make_engine("alternating", backend, 300, groups=groups)


def test_a_budget_beyond_what_the_pool_was_made_for_is_refused(backend: Backend) -> None:
    config = Config(40, groups=make_groups(MODELS["chunks"], 16), max_num_batched_tokens=32)
    with pytest.raises(InvalidOption, match="max_num_batched_tokens is 32, expected 64 or more"):
        Engine(model("chunks"), config, EngineOptions(backend=backend, token_budget=64))
    smaller = attrs.evolve(EngineOptions(backend=backend), token_budget=32)
    assert Engine(model("chunks"), config, smaller).is_idle
