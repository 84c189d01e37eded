# SPDX-License-Identifier: Apache-2.0
"""Sizes under context parallelism, by hand: attention is shared by the ranks, all else is not."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvcore import KVCacheManager, Request
from kvcore.sizing import (
    FullAttentionSpec,
    Limits,
    make_manager_config,
    read_model,
    size_model,
    to_text,
)
from kvcore.sizing.command import main
from kvcore.sizing.errors import UnevenBlocks
from kvcore.types.errors import InvalidCount
from tests.conftest import Backend
from tests.sizing.models import CONFIGS

GIB, MIB = 2**30, 2**20
LIMITS = Limits(max_model_len=8192, null_block=True)


def report_of(name: str, **options: Any) -> Any:
    return size_model(read_model(CONFIGS / f"{name}.json"), 8 * GIB, LIMITS, **options)


def test_ranks_share_the_tokens_of_attention() -> None:
    """Llama 3 8B: 32 layers, key and value of 8 heads of 128 numbers of 2 bytes."""
    page = 16 * 2 * 8 * 128 * 2
    for ranks in (1, 2, 4):
        report = report_of("llama-3-8b", context_parallel=ranks)
        (group,) = report.config.groups
        assert group.spec.block_size == 16 * ranks
        assert report.config.block_bytes == 32 * page == 2 * MIB  # on each rank
        assert report.config.num_blocks == 8 * GIB // (2 * MIB)
        assert report.blocks_per_request == 8192 // (16 * ranks)
        assert report.num_full_requests == 4095 // (512 // ranks)
        assert report.hit_alignment == 16 * ranks


def test_ranks_keep_the_same_states() -> None:
    """Qwen3-Next: a state of 1,097,728 bytes takes a page of 544 tokens, of 2,048 bytes each."""
    report = report_of("qwen3-next-80b-a3b", context_parallel=4)
    attention, *states = (group.spec for group in report.config.groups)
    assert attention.block_size == 4 * 544
    assert attention.page_bytes == 544 * 2048
    for state in states:
        assert state.state_bytes == 1_097_728
        assert state.page_bytes == attention.page_bytes
        assert state.block_size == attention.block_size  # hits end where both have a block
    assert report.blocks_per_request == 4 + 3 * 2  # 8,192 tokens take four blocks of 2,176


def test_ranks_keep_the_same_windows() -> None:
    report = report_of("gemma-3-27b", context_parallel=2)
    sizes = {group.spec.kind: group.spec.block_size for group in report.config.groups}
    assert sizes == {"full_attention": 32, "sliding_window": 16}
    whole = report_of("gemma-3-27b", context_parallel=2, windows=False)
    assert {group.spec.block_size for group in whole.config.groups} == {32}


def test_a_latent_vector_is_shared_too() -> None:
    report = report_of("deepseek-v3", context_parallel=8)
    (group,) = report.config.groups
    assert group.spec.block_size == 128
    assert group.spec.page_bytes == 16 * (512 + 64) * 2


def test_a_manager_counts_blocks_of_all_ranks(backend: Backend) -> None:
    report = report_of("llama-3-8b", context_parallel=4)
    config = make_manager_config(report.config, report.limits, hash_seed=b"seed")
    manager = KVCacheManager(config, backend=backend)
    for name in ("a", "b"):
        manager.add_request(Request(name, range(150)))
        hit = manager.get_computed_blocks(name)
        assert manager.allocate_slots(name, 150 - hit.num_tokens, hit)
        manager.take_batch()
    assert hit.num_tokens == 2 * 64


def test_the_command_says_what_each_rank_keeps(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [str(CONFIGS / "gemma-3-27b.json"), "--memory", "80GiB", "--context-parallel", "2"]
    assert main(arguments) == 0
    line = "each with 16 tokens of a block of full attention, all with the same of the others"
    said = capsys.readouterr().out
    assert f"ranks      2, {line}; sizes below are of one rank\n" in said
    assert ", on a rank that keeps all of it\n" in said
    assert main([*arguments, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["context_parallel"] == 2


def test_one_rank_is_not_mentioned() -> None:
    assert "rank" not in to_text(report_of("llama-3-8b"))
    assert "no layer keeps all tokens" in to_text(report_of("mistral-7b-v0.1", context_parallel=2))


def test_bad_numbers_of_ranks_are_named() -> None:
    made: dict[str, Any] = {"num_kv_heads": 1, "head_size": 64, "dtype": "bfloat16"}
    with pytest.raises(UnevenBlocks, match="blocks of 16 tokens do not split over 3 ranks"):
        FullAttentionSpec(block_size=16, context_parallel=3, **made)
    with pytest.raises(InvalidCount, match="context_parallel"):
        report_of("llama-3-8b", context_parallel=0)
