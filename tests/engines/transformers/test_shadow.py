# SPDX-License-Identifier: Apache-2.0
"""kvcore as the shadow of transformers' cache: it decides nothing, and reports one difference."""

from __future__ import annotations

import gc
from typing import Any

import pytest

from tests.engines.transformers.environment import ABSENT

pytest.importorskip("transformers", reason=ABSENT)

import kvcore_transformers
import torch
from kvcore_transformers import NotServed
from kvcore_transformers.install import shadowing
from kvcore_transformers.offloading import Offload
from kvcore_transformers.shadow import Behind, Shadow, ShadowCache
from transformers.generation.continuous_batching import continuous_api
from transformers.generation.continuous_batching.utils import logger

from tests.engines.transformers.models import LAYERS, Served, draw_prompts, serve, settings, tiny
from tests.engines.transformers.streams import act_streams

pytestmark = pytest.mark.transformers
SMALL = 16


@pytest.fixture(autouse=True)
def shadow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVCORE_SHADOW", "1")


def standing() -> list[Any]:
    """Return the objects in the places of the shadow, and where kvcore would be."""
    names = ("PagedAttentionCache", "OffloadingManager", "FIFOScheduler")
    method = vars(continuous_api.ContinuousMixin)["init_continuous_batching"]
    return [method, *(vars(continuous_api)[name] for name in names)]


def in_shadow(
    prompts: list[list[int]], *rest: Any, kind: str = "full", **changed: Any
) -> tuple[Served, Shadow]:
    """Return the answers of transformers with kvcore as its shadow: the same as alone."""
    native = serve(tiny(kind), prompts, **changed)
    with kvcore_transformers.installed():
        served = serve(tiny(kind), prompts, *rest, **changed)
    assert isinstance(served.cache, ShadowCache)
    assert served.errors == native.errors == {}
    assert (served.tokens, served.hits) == (native.tokens, native.hits)
    return served, served.cache.shadow


def check_clean(shadow: Shadow) -> None:
    """Raise if there was a difference, or if kvcore still holds something."""
    assert shadow.difference is None
    assert shadow.kvcore is not None
    manager = shadow.kvcore.manager
    manager.check()
    assert shadow.kvcore.requests == {}
    assert manager.num_free_blocks == manager.config.num_usable_blocks


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("kind", LAYERS)
def test_in_a_roomy_pool_there_is_no_difference(kind: str, n: int) -> None:
    served, shadow = in_shadow(draw_prompts(1), kind=kind, n=n)
    check_clean(shadow)
    assert shadow.hit_tokens["transformers"] == served.hits
    assert shadow.hit_tokens["kvcore"] > 100
    if kind == "full":
        assert shadow.hit_tokens["kvcore"] >= served.hits > 100


@pytest.mark.parametrize("scheduler_type", ["fifo", "prefill_first"])
def test_under_eviction_kvcore_finds_more_and_that_is_counted(scheduler_type: str) -> None:
    more = 0
    for seed in range(2):
        changed: dict[str, Any] = {"num_blocks": SMALL, "scheduler_type": scheduler_type}
        _, shadow = in_shadow(draw_prompts(seed), **changed)
        check_clean(shadow)
        assert min(shadow.num_evictions.values()) > 0
        assert shadow.num_refused > 0
        more += shadow.hit_tokens["kvcore"] - shadow.hit_tokens["transformers"]
    assert more > 0


def test_kvcore_holds_no_more_than_the_engine_where_it_finds_more() -> None:
    _, shadow = in_shadow(draw_prompts(2), n=3, num_blocks=SMALL)  # requests wait in mid-prompt
    check_clean(shadow)
    assert shadow.hit_tokens["kvcore"] > shadow.hit_tokens["transformers"]


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("host_blocks", [0, 60])
def test_requests_that_give_way_come_back_in_both(
    host_blocks: int, is_async: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    act_streams(monkeypatch)
    empty = torch.empty  # transformers pins the host's memory, which needs a device

    def unpinned(*args: Any, **options: Any) -> torch.Tensor:
        return empty(*args, **(options | {"pin_memory": False}))

    monkeypatch.setattr(torch, "empty", unpinned)
    prompts = [[number * 7 + place for place in range(10)] for number in range(6)]
    pressed = {"num_blocks": SMALL, "new": 40, "max_requests_per_batch": 6}
    space = host_blocks * 4096 / 1024**3
    options: dict[str, Any] = pressed | {"cpu_offload_space": space, "use_async_batching": is_async}
    _, shadow = in_shadow(prompts, **options)
    check_clean(shadow)
    assert shadow.num_refused > 0


def test_a_window_that_needs_more_room_is_told_and_the_engine_goes_on() -> None:
    _, shadow = in_shadow(draw_prompts(1), kind="hybrid", num_blocks=SMALL)
    assert shadow.difference is not None
    assert ": can_store_request_tokens of request 'r" in shadow.difference
    assert " gave True with transformers (" in shadow.difference
    assert " and False with kvcore (" in shadow.difference


def test_the_first_difference_is_told_once_and_kvcore_is_asked_no_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    requested: list[str] = []
    errors: list[str] = []

    def finds_nothing(_: Behind, request_id: str, *rest: Any) -> int:
        requested.extend([request_id] if rest[-1] else [])
        return 0

    monkeypatch.setattr(Behind, "search_as", finds_nothing)
    monkeypatch.setattr(logger, "error", errors.append)
    _, shadow = in_shadow(draw_prompts(0))
    assert len(requested) == 1
    assert shadow.difference is not None
    assert f"search_prefix_match of request {requested[0]!r} gave " in shadow.difference
    assert " and 0 with kvcore (" in shadow.difference
    assert errors == [shadow.difference]
    assert ", parted, " in shadow.report()


@pytest.mark.parametrize("name", ["__init__", "can_store_request_tokens", "close_batch", "show"])
def test_an_error_of_kvcore_reaches_no_request(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any, **__: Any) -> Any:
        raise RuntimeError("a defect")

    monkeypatch.setattr(Behind, name, fails)
    if name == "show":
        monkeypatch.setattr(Behind, "free_blocks", fails)
    _, shadow = in_shadow(draw_prompts(0), n=2)
    assert shadow.difference is not None
    assert "RuntimeError('a defect') with kvcore" in shadow.difference
    assert ("it cannot tell what it holds" in shadow.difference) == (name == "show")


def test_only_every_so_many_steps_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Behind, "search_as", lambda *_: 0)
    monkeypatch.setenv("KVCORE_SHADOW_EVERY", "1000")
    _, shadow = in_shadow(draw_prompts(0), before_later_steps)
    assert shadow.difference is None
    assert shadow.num_steps > 1


def before_later_steps(manager: Any) -> None:
    """Let the first step be over: it is the one of a thousand that is compared."""
    shadow = manager.batch_processor.cache.shadow
    shadow.num_steps = max(1, shadow.num_steps)


def test_the_report_counts_and_comes_when_the_cache_is_dropped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    served, shadow = in_shadow(draw_prompts(0))
    report = served.cache.report()
    assert f"{shadow.num_calls} calls in {shadow.num_steps} steps, no difference" in report
    hits = " and ".join(map(str, shadow.hit_tokens.values()))
    assert f"transformers and kvcore: {hits} hit tokens, 0 and 0 evictions, " in report
    reported: list[str] = []
    monkeypatch.setattr(logger, "warning", reported.append)
    del served
    gc.collect()
    assert any(f"{shadow.num_calls} calls in {shadow.num_steps} steps" in each for each in reported)


def test_statistics_are_of_kvcore_behind() -> None:
    with kvcore_transformers.installed() as statistics:
        served = serve(tiny(), draw_prompts(0), num_blocks=SMALL)
    shadow = served.cache.shadow
    assert statistics.queries >= sum(map(len, draw_prompts(0)))
    assert statistics.hits == shadow.hit_tokens["kvcore"] > 0
    assert statistics.evictions == shadow.num_evictions["kvcore"] > 0


def test_uninstall_leaves_all_as_it_was_and_schedulers_are_never_replaced() -> None:
    before = standing()
    with kvcore_transformers.installed():
        during = standing()
        assert during[1] is ShadowCache
        assert during[2:] == before[2:]
        assert Offload not in during
        names = [name for _, name, _ in shadowing()]
        assert names == ["PagedAttentionCache", "init_continuous_batching", "__init__"]
    assert standing() == before


@pytest.mark.parametrize(
    ("variable", "value", "text"),
    [
        ("KVCORE_SHADOW_EVERY", "0", "KVCORE_SHADOW_EVERY='0' is not a number of steps, 1 or more"),
        ("KVCORE_SHADOW", "on", "KVCORE_SHADOW='on' is neither 0 nor 1"),
    ],
)
def test_a_wrong_variable_is_refused_before_anything_is_replaced(
    variable: str, value: str, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = standing()
    monkeypatch.setenv(variable, value)
    with pytest.raises(NotServed, match=f"^{text}$"):
        kvcore_transformers.install()
    assert standing() == before


def test_a_kept_manager_without_the_shadow_is_refused() -> None:
    model = tiny()
    generation, batching = settings()
    options: dict[str, Any] = {
        "generation_config": generation,
        "continuous_batching_config": batching,
        "persistent_manager": True,
    }
    model.generate_batch([[1, 2, 3]], **options)
    with kvcore_transformers.installed():
        with pytest.raises(NotServed, match="that was made without kvcore's shadow: call"):
            model.generate_batch([[1, 2, 3]], **options)
        model.destroy_cached_continuous_batching_manager()
        model.generate_batch([[1, 2, 3]], **options)
        model.destroy_cached_continuous_batching_manager()
