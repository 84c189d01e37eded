# SPDX-License-Identifier: Apache-2.0
"""Bytes of a page, of a request, and amounts of memory, on paper."""

from __future__ import annotations

from typing import Any

import pytest

from kvcore.sizing import ChunkedLocalSpec, CrossAttentionSpec, Limits, parse_memory
from kvcore.sizing.amounts import format_memory
from kvcore.sizing.errors import InvalidMemory, UnknownDtype, WindowOnLatent
from kvcore.sizing.units import DTYPE_BYTES, MAX_MEMORY_BYTES
from kvcore.types.errors import InvalidCount, WrongArgument
from tests.sizing.models import BLOCK, PAGE, full, sliding


@pytest.mark.seed("S001-45")
@pytest.mark.parametrize(
    ("dtype", "num_bytes"), [("float32", 4), ("float16", 2), ("bf16", 2), ("fp8", 1), ("int8", 1)]
)
def test_a_page_holds_a_key_and_a_value_of_each_head(dtype: str, num_bytes: int) -> None:
    spec = full(block_size=32, num_kv_heads=8, head_size=128, dtype=dtype)
    assert spec.page_bytes == 2 * 32 * 8 * 128 * num_bytes
    assert spec.token_bytes * 32 == spec.page_bytes


@pytest.mark.seed("S001-45")
def test_a_latent_page_holds_one_vector_a_token() -> None:
    spec = full(num_kv_heads=1, head_size=512 + 64, use_mla=True)
    assert spec.page_bytes == 1 * BLOCK * (512 + 64) * 2
    assert spec.kind == "mla"


@pytest.mark.seed("S001-46")
@pytest.mark.parametrize(("length", "blocks"), [(1, 1), (16, 1), (17, 2), (1024, 64)])
def test_full_attention_needs_a_page_for_each_begun_block(length: int, blocks: int) -> None:
    limits = Limits(max_model_len=length, max_num_batched_tokens=8)
    assert full().max_bytes(limits) == blocks * PAGE


@pytest.mark.seed("S001-47", "S000-11")
@pytest.mark.parametrize(
    ("window", "batched", "length", "blocks"),
    [
        (128, 64, 4096, 12 + 1),  # 127 + 64 = 191 tokens
        (128, 65, 4096, 12 + 1),  # 192 tokens fill 12 blocks
        (128, 66, 4096, 13 + 1),
        (128, 64, 100, 7 + 1),  # the length is the lesser bound
        (1, 1, 4096, 1 + 1),
        (128, None, 4096, 256 + 1),  # a step of any size
    ],
)
def test_a_window_needs_what_it_sees_a_step_and_one_block(
    window: int, batched: int | None, length: int, blocks: int
) -> None:
    limits = Limits(max_model_len=length, max_num_batched_tokens=batched)
    assert sliding(window).max_bytes(limits) == blocks * PAGE


@pytest.mark.seed("S000-11")
@pytest.mark.parametrize(
    ("chunk", "batched", "length", "blocks"),
    [(64, 32, 4096, 6), (64, 33, 4096, 7), (64, 32, 50, 4), (64, None, 4096, 256)],
)
def test_a_chunk_needs_itself_and_a_step(
    chunk: int, batched: int | None, length: int, blocks: int
) -> None:
    spec = ChunkedLocalSpec(
        block_size=BLOCK, num_kv_heads=1, head_size=64, dtype="fp16", window=chunk
    )
    limits = Limits(max_model_len=length, max_num_batched_tokens=batched)
    assert spec.max_bytes(limits) == blocks * PAGE


def test_cross_attention_needs_the_encoders_tokens_whatever_the_length() -> None:
    spec = CrossAttentionSpec(
        block_size=BLOCK, num_kv_heads=1, head_size=64, dtype="fp16", max_encoder_tokens=1500
    )
    needs = {spec.max_blocks(Limits(max_model_len=length)) for length in (1, 448, 4096)}
    assert needs == {94}  # 93 * 16 = 1488 < 1500


@pytest.mark.seed("S001-59")
def test_a_type_id_names_kind_window_block_and_page() -> None:
    chunked = ChunkedLocalSpec(
        block_size=BLOCK, num_kv_heads=1, head_size=64, dtype="float16", window=8192
    )
    assert full().type_id == f"full_attention_{BLOCK}_{PAGE}"
    assert sliding(128).type_id == f"sliding_window_128_{BLOCK}_{PAGE}"
    assert chunked.type_id == f"chunked_local_8192_{BLOCK}_{PAGE}"
    assert full(use_mla=True).type_id == f"mla_{BLOCK}_{PAGE // 2}"


@pytest.mark.seed("S001-47")
def test_no_window_is_kept_as_latent_vectors() -> None:
    with pytest.raises(WindowOnLatent) as caught:
        sliding(128, use_mla=True)
    assert caught.value.fields == {"kind": "sliding_window", "window": 128}


@pytest.mark.parametrize("name", ["block_size", "num_kv_heads", "head_size", "window"])
@pytest.mark.parametrize("value", [0, -1])
def test_a_spec_without_size_is_refused(name: str, value: int) -> None:
    with pytest.raises(InvalidCount) as caught:
        sliding(**{name: value})
    assert caught.value.fields == {"name": name, "value": value, "least": 1}


@pytest.mark.parametrize("value", [1.5, True, "16", None])
def test_sizes_are_integers(value: Any) -> None:
    with pytest.raises(WrongArgument, match="block_size must be an integer"):
        full(block_size=value)
    with pytest.raises(WrongArgument, match="max_model_len must be an integer"):
        Limits(max_model_len=value)


@pytest.mark.parametrize("name", ["max_model_len", "max_num_batched_tokens", "num_blocks"])
def test_limits_are_at_least_one(name: str) -> None:
    options: dict[str, Any] = {"max_model_len": 1024, name: 0}
    with pytest.raises(InvalidCount, match=f"{name} is 0"):
        Limits(**options)


def test_an_unknown_dtype_is_named_beside_those_that_are_known() -> None:
    with pytest.raises(
        UnknownDtype, match="dtype float12 is not known; known are float32, "
    ) as caught:
        full(dtype="float12")
    assert caught.value.fields == {"value": "float12", "known": tuple(DTYPE_BYTES)}


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("80GiB", 80 * 2**30),
        ("80 GB", 80 * 10**9),
        ("1.5gib", 3 * 2**29),
        ("512MiB", 512 * 2**20),
        (" 24 kb ", 24_000),
        ("1TiB", 2**40),
        ("4096B", 4096),
        ("4096 bytes", 4096),
        ("0.1GiB", 107_374_182),  # 107374182.4 rounded down
        ("1024TiB", MAX_MEMORY_BYTES),
    ],
)
def test_memory_is_read_in_the_unit_that_is_written(text: str, size: int) -> None:
    assert parse_memory(text) == size


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "a number and a unit"),
        ("GiB", "a number and a unit"),
        ("nan", "a number and a unit"),
        ("inf GiB", "a number and a unit"),
        ("1e3GiB", "a number and a unit"),
        ("8 0GiB", "a number and a unit"),
        ("٨GiB", "a number and a unit"),
        ("80G", "unit g is not one of"),
        ("80 parsec", "unit parsec is not one of"),
        ("-80GiB", "at least 1 byte"),
        ("80", "the unit is missing: give one of bytes, KiB, MiB, GiB, TiB, KB, MB, GB, TB"),
        ("-80", "the unit is missing"),
        ("0GiB", "at least 1 byte"),
        ("0.5 bytes", "at least 1 byte"),
        ("1025TiB", "at most 1024 TiB"),
        ("9" * 31, "a number and a unit"),
        ("9" * 30 + "GiB", "at most 1024 TiB"),
    ],
)
def test_what_is_no_memory_is_refused_with_the_text(text: str, reason: str) -> None:
    with pytest.raises(InvalidMemory, match=reason) as caught:
        parse_memory(text)
    assert caught.value.fields["value"] == text


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 bytes"),
        (1, "1 byte"),
        (1023, "1023 bytes"),
        (1024, "1.00 KiB"),
        (3 * 2**20, "3.00 MiB"),
        (512 * 2**20, "512.00 MiB"),
        (3 * 2**29, "1.50 GiB"),
        (80 * 2**40, "81920.00 GiB"),
    ],
)
def test_memory_is_shown_in_a_unit_that_it_reaches(num_bytes: int, text: str) -> None:
    assert format_memory(num_bytes) == text
