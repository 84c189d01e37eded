# SPDX-License-Identifier: Apache-2.0
"""Amounts of memory that no device has: every call that takes one refuses them, with the number."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kvcore.sizing import (
    Limits,
    check_enough_kv_cache_memory,
    create_kv_cache_group_specs,
    estimate_max_model_len,
    get_kv_cache_config,
    make_grouped_config,
    make_layout,
    make_uniform_config,
    read_model,
    size_model,
)
from kvcore.sizing.errors import InvalidMemory, NoCacheMemory
from kvcore.types.errors import InvalidCount, WrongArgument
from tests.sizing.models import CONFIGS, PAGE, full, layers

PIB = 2**50
LIMITS = Limits(max_model_len=16)
LAYER = layers(full())
MODEL = read_model(CONFIGS / "llama-3-8b.json")


def size(num_bytes: Any) -> object:
    return size_model(MODEL, num_bytes, LIMITS)


def on_one_layer(call: Callable[..., object]) -> Callable[[Any], object]:
    return lambda num_bytes: call(LAYER, num_bytes, LIMITS)


FROM_ZERO = {
    call.__name__: on_one_layer(call) for call in (estimate_max_model_len, make_uniform_config)
}
FROM_ONE = {
    call.__name__: on_one_layer(call)
    for call in (check_enough_kv_cache_memory, get_kv_cache_config, make_grouped_config)
}
FROM_ONE["size_model"] = size
CALLS = FROM_ZERO | FROM_ONE


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_memory_is_a_positive_amount(call: Callable[[Any], object]) -> None:
    call(PAGE)
    for num_bytes in (-1, -(2**90)):
        with pytest.raises(NoCacheMemory, match=rf"\({num_bytes} bytes\)") as caught:
            call(num_bytes)
        assert caught.value.fields == {"available": num_bytes}


@pytest.mark.parametrize("call", FROM_ONE.values(), ids=FROM_ONE)
def test_no_memory_is_none_to_size_a_cache_in(call: Callable[[Any], object]) -> None:
    with pytest.raises(NoCacheMemory, match=r"\(0 bytes\)"):
        call(0)


@pytest.mark.parametrize("call", FROM_ZERO.values(), ids=FROM_ZERO)
def test_what_only_counts_counts_to_zero(call: Callable[[Any], object]) -> None:
    found = call(0)
    assert getattr(found, "num_blocks", found) == 0


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_memory_is_at_most_a_pebibyte(call: Callable[[Any], object]) -> None:
    call(PIB)
    for num_bytes in (PIB + 1, 2**60 + 1, 2**90):
        with pytest.raises(InvalidMemory, match=f"{num_bytes} bytes: must be at most 1024 TiB"):
            call(num_bytes)


@pytest.mark.parametrize("value", [1.5, float("nan"), "80GiB", True, None])
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_memory_is_an_integer(call: Callable[[Any], object], value: Any) -> None:
    with pytest.raises(WrongArgument, match=r"_bytes must be an integer, not ") as caught:
        call(value)
    assert caught.value.fields["value"] is value


def test_blocks_of_a_layout_are_counted_and_come_to_a_pebibyte_at_most() -> None:
    groups = create_kv_cache_group_specs(LAYER, [list(LAYER)])
    assert make_layout(groups, PIB // PAGE).tensors[0].size_bytes == PIB
    with pytest.raises(InvalidMemory, match=f"memory {PIB + PAGE} bytes: must be at most"):
        make_layout(groups, PIB // PAGE + 1)
    with pytest.raises(InvalidCount, match="num_blocks is -1, must be an integer of at least 0"):
        make_layout(groups, -1)
    with pytest.raises(WrongArgument, match=r"num_blocks must be an integer, not 1\.5"):
        make_layout(groups, 1.5)  # type: ignore[arg-type]  # the mistake under test
