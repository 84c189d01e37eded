# SPDX-License-Identifier: Apache-2.0
"""The memory of a full-length request, the longest one that fits, and the message if none does."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcore.sizing import (
    LayerSpec,
    Limits,
    check_enough_kv_cache_memory,
    estimate_max_model_len,
    memory,
)
from kvcore.sizing.errors import NoCacheMemory, NoLayers, NotEnoughMemory
from kvcore.types.errors import KvcoreError
from tests.sizing.models import BLOCK, PAGE, full, layers, sliding

GIB = 2**30
LLAMA_7B = layers(*[full(num_kv_heads=32, head_size=128)] * 32)
"""S001-52: a token takes 32 layers * 2 * 32 heads * 128 * 2 bytes = 512 KiB."""


@pytest.mark.seed("S001-48", "S001-52")
@pytest.mark.parametrize(
    ("requested", "estimated"), [(16385, 16384), (16384, 16384), (16383, 16383), (1, 1)]
)
def test_the_worked_example_of_eight_gib(requested: int, estimated: int) -> None:
    token_bytes = 32 * 2 * 32 * 128 * 2
    assert 8 * GIB // token_bytes == 16384
    limits = Limits(max_model_len=requested)
    assert estimate_max_model_len(LLAMA_7B, 8 * GIB, limits) == estimated


@pytest.mark.seed("S001-49")
@pytest.mark.parametrize(
    ("available", "estimated"),
    [(0, 0), (PAGE - 1, 0), (PAGE, 16), (2 * PAGE - 1, 16), (100 * PAGE, 64)],
)
def test_an_estimate_is_zero_or_within_what_is_asked(available: int, estimated: int) -> None:
    assert estimate_max_model_len(layers(full()), available, Limits(max_model_len=64)) == estimated


def test_an_estimate_is_within_the_blocks_that_are_set() -> None:
    limits = Limits(max_model_len=16384, num_blocks=32)
    assert estimate_max_model_len(LLAMA_7B, 8 * GIB, limits) == 32 * BLOCK == 512
    assert estimate_max_model_len(LLAMA_7B, 0, limits) == 0
    null = Limits(max_model_len=16384, num_blocks=32, null_block=True)
    assert estimate_max_model_len(LLAMA_7B, 8 * GIB, null) == 31 * BLOCK
    assert (limits.num_blocks, limits.max_model_len) == (32, 16384)


specs = st.lists(
    st.one_of(st.just(full()), st.integers(1, 80).map(sliding)), min_size=1, max_size=4
)


@pytest.mark.seed("S001-48", "S001-49", "S001-50", "S001-51")
@given(specs, st.integers(0, 40 * PAGE), st.integers(1, 200), st.none() | st.integers(1, 64))
def test_bisection_finds_what_trying_every_length_finds(
    kinds: list[LayerSpec], available: int, requested: int, batched: int | None
) -> None:
    model = layers(*kinds)
    limits = Limits(max_model_len=requested, max_num_batched_tokens=batched)
    needs = [
        sum(
            spec.max_bytes(Limits(max_model_len=length, max_num_batched_tokens=batched))
            for spec in kinds
        )
        for length in range(1, requested + 1)
    ]
    assert needs == sorted(needs)
    fitting = [length for length, need in enumerate(needs, 1) if need <= available]
    assert estimate_max_model_len(model, available, limits) == max(fitting, default=0)
    assert (model, limits) == (
        layers(*kinds),
        Limits(max_model_len=requested, max_num_batched_tokens=batched),
    )


@pytest.mark.seed("S001-53")
@pytest.mark.parametrize("available", [0, -1, -GIB])
def test_no_memory_at_all_is_an_error_of_its_own(available: int) -> None:
    with pytest.raises(NoCacheMemory, match="no memory is available for the cache blocks") as found:
        check_enough_kv_cache_memory(layers(full()), available, Limits(max_model_len=1))
    assert found.value.fields == {"available": available}


@pytest.mark.seed("S001-54")
def test_memory_that_is_just_enough_passes() -> None:
    limits = Limits(max_model_len=16384)
    check_enough_kv_cache_memory(LLAMA_7B, 8 * GIB, limits)
    with pytest.raises(NotEnoughMemory):
        check_enough_kv_cache_memory(LLAMA_7B, 8 * GIB - 1, limits)


@pytest.mark.seed("S001-54", "S001-55")
def test_too_little_memory_is_said_with_all_numbers() -> None:
    with pytest.raises(NotEnoughMemory) as caught:
        check_enough_kv_cache_memory(LLAMA_7B, 8 * GIB, Limits(max_model_len=32768))
    assert isinstance(caught.value, ValueError)
    assert isinstance(caught.value, KvcoreError)
    assert str(caught.value) == (
        "one request of 32768 tokens needs 16.00 GiB of KV cache, but 8.00 GiB are available; "
        "the longest request that fits has 16384 tokens"
    )
    assert caught.value.fields == {
        "max_model_len": 32768,
        "needed_bytes": 16 * GIB,
        "available_bytes": 8 * GIB,
        "longest_model_len": 16384,
    }


@pytest.mark.seed("S001-56")
def test_nothing_is_said_of_a_longest_length_where_no_length_fits() -> None:
    with pytest.raises(NotEnoughMemory) as caught:
        check_enough_kv_cache_memory(layers(full()), PAGE - 1, Limits(max_model_len=64))
    assert str(caught.value).endswith("0.00 GiB are available")
    assert caught.value.fields["longest_model_len"] == 0


@pytest.mark.seed("S001-56")
def test_nothing_is_estimated_for_a_request_that_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Limits] = []

    def record(_need: object, _available: int, limits: Limits) -> int:
        calls.append(limits)
        return 0

    monkeypatch.setattr(memory, "longest_length", record)
    limits = Limits(max_model_len=64)
    check_enough_kv_cache_memory(layers(full()), 4 * PAGE, limits)
    assert calls == []
    with pytest.raises(NotEnoughMemory):
        check_enough_kv_cache_memory(layers(full()), 4 * PAGE - 1, limits)
    assert calls == [limits]


def test_the_null_block_is_one_block_of_every_layer_more() -> None:
    model = layers(full(), full(), sliding(16))
    bare = Limits(max_model_len=64, max_num_batched_tokens=16)
    limits = Limits(max_model_len=64, max_num_batched_tokens=16, null_block=True)
    need = (4 + 4 + 3) * PAGE  # a window of 16 and a step of 16: 31 tokens in 2 blocks, and 1
    check_enough_kv_cache_memory(model, need, bare)
    check_enough_kv_cache_memory(model, need + 3 * PAGE, limits)
    with pytest.raises(NotEnoughMemory) as caught:
        check_enough_kv_cache_memory(model, need + 3 * PAGE - 1, limits)
    assert caught.value.fields["longest_model_len"] == 3 * BLOCK


def test_a_model_without_layers_is_refused() -> None:
    with pytest.raises(NoLayers):
        check_enough_kv_cache_memory({}, GIB, Limits(max_model_len=1))
