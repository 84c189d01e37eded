# SPDX-License-Identifier: Apache-2.0
"""Installing the adapter for transformers, undoing it, and what it refuses."""

from __future__ import annotations

import inspect
import sys
from typing import Any

import pytest

from tests.engines.transformers.environment import ABSENT

pytest.importorskip("transformers", reason=ABSENT)

import kvcore_transformers
from kvcore_transformers import NotServed, pinned
from kvcore_transformers.allocators import Full, Pool, Sliding
from kvcore_transformers.cache import KvcoreCache
from kvcore_transformers.install import replacements
from kvcore_transformers.offloading import Offload
from kvcore_transformers.schedulers import Fifo
from kvcore_transformers.shadow import ShadowCache
from transformers.generation.continuous_batching import continuous_api
from transformers.generation.continuous_batching.distributed import DistributedHelper

from tests.engines.transformers.models import draw_prompts, serve, settings, tiny

pytestmark = pytest.mark.transformers


def standing() -> list[Any]:
    """Return the objects in the places that the adapter replaces."""
    return [
        holder[name] if isinstance(holder, dict) else vars(holder)[name]
        for holder, name, _ in replacements()
    ]


def test_uninstall_leaves_transformers_as_it_was() -> None:
    before = standing()
    with kvcore_transformers.installed():
        assert all(now is not then for now, then in zip(standing(), before, strict=True))
        assert isinstance(serve(tiny(), [[1, 2, 3]]).cache, KvcoreCache)
    assert all(now is then for now, then in zip(standing(), before, strict=True))
    assert not isinstance(serve(tiny(), [[1, 2, 3]]).cache, KvcoreCache)


def test_an_exception_in_the_block_uninstalls() -> None:
    before = standing()
    with pytest.raises(ZeroDivisionError), kvcore_transformers.installed():
        raise ZeroDivisionError
    assert standing() == before


def test_a_second_install_and_an_uninstall_of_nothing_are_refused() -> None:
    before = standing()
    with pytest.raises(NotServed, match="is not installed: there is nothing to undo"):
        kvcore_transformers.uninstall()
    with kvcore_transformers.installed():
        during = standing()
        with pytest.raises(NotServed, match=r"is installed: call uninstall\(\) first"):
            kvcore_transformers.install()
        assert standing() == during
    assert standing() == before


def test_what_others_put_on_top_must_be_undone_before(monkeypatch: pytest.MonkeyPatch) -> None:
    with kvcore_transformers.installed():
        during = standing()
        with monkeypatch.context() as patch:
            patch.setattr(continuous_api, "PagedAttentionCache", object)
            with pytest.raises(NotServed, match="PagedAttentionCache was replaced after install"):
                kvcore_transformers.uninstall()
        assert standing() == during


def test_another_transformers_is_refused_in_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    before = standing()
    # transformers puts another module in its own place while it is imported.
    monkeypatch.setattr(sys.modules["transformers"], "__version__", "5.24.0")
    sentence = "kvcore_transformers serves transformers 5.23.0; this is 5.24.0"
    with pytest.raises(NotServed, match=f"^{sentence}$"):
        kvcore_transformers.install()
    assert standing() == before


def test_the_release_is_as_pinned_and_a_difference_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert pinned.differences() == []
    native: Any = inspect.getmro(KvcoreCache)[1]
    monkeypatch.setattr(native, "free_blocks", lambda self, name: (self, name))
    monkeypatch.setattr(native, "seize", lambda self: self, raising=False)
    monkeypatch.delattr(native, "reset")
    with pytest.raises(NotServed) as refused:
        kvcore_transformers.install()
    assert str(refused.value) == (
        "this transformers 5.23.0 is not as released: PagedAttentionCache.free_blocks took"
        " (self request_id no_cache), takes (self name); PagedAttentionCache.reset took (self),"
        " is gone; PagedAttentionCache.seize is new, takes (self)"
    )


def test_an_attribute_that_the_adapter_reads_is_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    changed = dict(pinned.ATTRIBUTES)
    changed["scheduler.Scheduler"] += " hungry_requests"
    changed["requests.RequestStatus"] += " RESTING"
    monkeypatch.setattr(pinned, "ATTRIBUTES", changed)
    assert pinned.differences() == [
        "Scheduler.hungry_requests is gone",
        "RequestStatus.RESTING is gone",
    ]


def test_each_replaced_method_is_pinned_and_takes_what_the_release_gives_it() -> None:
    pins = {path.split(".")[1]: methods for path, methods in pinned.PARAMETERS.items()}
    named = {**pins["CacheAllocator"], **pins["FullAttentionCacheAllocator"]}
    num_checked = 0
    for ours, methods in (
        (KvcoreCache, pins["PagedAttentionCache"]),
        (ShadowCache, pins["PagedAttentionCache"]),
        (Full, named),
        (Sliding, {**named, **pins["SlidingAttentionCacheAllocator"]}),
        (Pool, pins["CachePool"]),
        (Offload, pins["OffloadingManager"]),
        (inspect.getmro(Fifo)[1], pins["Scheduler"]),
    ):
        for name, method in vars(ours).items():
            if not inspect.isfunction(method) or name not in methods or name == "__init__":
                continue
            parameters = inspect.signature(method).parameters
            if "args" not in parameters:
                assert len(parameters) == len(methods[name].split()), f"{ours}: {name}"
            num_checked += 1
    assert num_checked > 20


def test_tensor_parallelism_is_refused_and_the_attention_is_put_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = tiny()
    generation, batching = settings()
    model.set_attn_implementation("eager")  # which making a manager switches to its paged form
    made = DistributedHelper.__init__

    def of_two(self: Any, *args: Any, **kwargs: Any) -> None:
        made(self, *args, **kwargs)
        self.tp_size = 2

    monkeypatch.setattr(DistributedHelper, "__init__", of_two)
    sentence = "tensor parallelism over 2 devices is not served"
    with kvcore_transformers.installed(), pytest.raises(NotServed, match=sentence):
        model.init_continuous_batching(generation, batching)
    assert model.config._attn_implementation == "eager"


def test_a_layer_that_kvcore_does_not_follow_is_refused_by_its_number() -> None:
    model = tiny("hybrid")
    model.config.layer_types[1] = "chunked_attention"
    sentence = "layer 1 is chunked_attention: only full_attention and sliding_attention are served"
    with kvcore_transformers.installed(), pytest.raises(NotServed, match=sentence):
        serve(model, [[1, 2]])


def test_a_manager_that_has_no_cache_yet_when_it_is_uninstalled_makes_none() -> None:
    model = tiny()
    generation, batching = settings()
    with kvcore_transformers.installed():
        manager = model.init_continuous_batching(generation, batching)
    manager.start()
    manager.join(0.0)
    error = manager.background_thread_status.fatal_error
    assert isinstance(error, NotServed)
    assert str(error) == "kvcore_transformers was uninstalled before the manager made its cache"


def test_a_kept_manager_is_refused_if_it_is_not_ours_and_goes_on_if_it_is() -> None:
    model, prompts = tiny(), draw_prompts(1)
    generation, batching = settings()

    def generate() -> list[list[int]]:
        outputs = model.generate_batch(
            prompts,
            generation_config=generation,
            continuous_batching_config=batching,
            persistent_manager=True,
        )
        return [each.generated_tokens for each in outputs.values()]

    native = generate()
    with kvcore_transformers.installed():
        with pytest.raises(NotServed, match="a persistent manager that was made without kvcore"):
            generate()
        model.destroy_cached_continuous_batching_manager()
        assert generate() == native
    assert generate() == native  # over the cache that was made before uninstall
    cache = model.init_continuous_batching().batch_processor.cache
    assert isinstance(cache, KvcoreCache)
    model.destroy_cached_continuous_batching_manager()


def test_a_manager_with_a_cache_of_before_install_makes_no_other_step() -> None:
    generation, batching = settings()
    manager = continuous_api.ContinuousBatchingManager(tiny(), generation, batching)
    manager.start()
    manager.stop(block=True, keep_for_next_session=True)
    with kvcore_transformers.installed():
        manager.start()
        manager.join(0.0)
    error = manager.background_thread_status.fatal_error
    assert isinstance(error, NotServed)
    assert str(error) == "the manager made its cache before install(): make a new manager"
