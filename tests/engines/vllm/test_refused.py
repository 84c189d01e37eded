# SPDX-License-Identifier: Apache-2.0
"""Features that the adapter for vLLM does not serve: the engine stops at its start."""

from __future__ import annotations

import logging
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from tests.engines.vllm.environment import ABSENT

pytest.importorskip("vllm", reason=ABSENT)

import kvcore_vllm
from kvcore_vllm import NotServed
from kvcore_vllm.install import check_connectors
from kvcore_vllm.short_ways import KVCacheManager
from vllm.config import KVTransferConfig
from vllm.v1.kv_cache_interface import (
    EncoderOnlyAttentionSpec,
    KVCacheConfig,
    KVCacheGroupRole,
    KVCacheGroupSpec,
    SlidingWindowMLASpec,
)

from tests.engines.vllm.both import STATE, Both, make
from tests.engines.vllm.engine import FULL, SHAPE, make_cache, make_engine

pytestmark = pytest.mark.vllm

REPLAY = SlidingWindowMLASpec(sliding_window=6, bounded_replay=True, **SHAPE)


@pytest.mark.parametrize(
    ("group", "sentence"),
    [
        (
            replace(STATE, num_speculative_blocks=1),
            (
                r"speculative tokens beside state-space layers \(num_speculative_blocks=1\), "
                r"which layer layer1 needs: accepting one moves a state .* append to theirs$"
            ),
        ),
        (
            replace(STATE, num_prefill_checkpoint_blocks=1),
            "states inside a chunk, which layer layer1 needs",
        ),
        (
            replace(STATE, mamba_cache_mode="none"),
            "the mode 'none' of states in blocks of 4 tokens with caching, which layer layer1",
        ),
        (REPLAY, "groups of SlidingWindowMLASpec that are not cached, which layer layer1 needs"),
        (
            EncoderOnlyAttentionSpec(**SHAPE),
            "groups of EncoderOnlyAttentionSpec, which layer layer1",
        ),
    ],
)
def test_a_group_that_is_not_served_stops_the_engine_and_its_layer_is_named(
    group: Any, sentence: str
) -> None:
    refused = f"^kvcore does not serve {sentence}"
    with pytest.raises(NotServed, match=refused):
        make_engine(kvcore_vllm.Scheduler, cache_config=make_cache(FULL, group))


def test_what_has_no_counterpart_is_refused_by_name() -> None:
    layers = ["a", "b", "c"]
    role = KVCacheGroupRole.HISPARSE_SOURCE
    hisparse = KVCacheConfig(
        num_blocks=9,
        kv_cache_tensors=[],
        kv_cache_groups=[KVCacheGroupSpec(layers, FULL, role=role)],
    )
    given: Any = {"max_model_len": 16, "scheduler_block_size": 4, "hash_block_size": 4}
    with pytest.raises(
        NotServed, match=r"HiSparse groups \(hisparse_source\), which layer a and 2"
    ):
        KVCacheManager(hisparse, **given)
    empty = KVCacheConfig(num_blocks=9, kv_cache_tensors=[], kv_cache_groups=[])
    with pytest.raises(NotServed, match="models without a cache"):
        KVCacheManager(empty, **given)
    with pytest.raises(NotServed, match="pcp_world_size=2"):
        make(KVCacheManager, pcp_world_size=2)
    with pytest.raises(
        NotServed, match="hashes of 2 tokens, which are finer than the groups' blocks"
    ):
        make(KVCacheManager, hash_block_size=2)
    with pytest.raises(NotServed, match="8 tokens are predicted by as many modules"):
        make(KVCacheManager, use_eagle=True, num_prefill_lookahead=8)
    with pytest.raises(ValueError, match="retention"):
        make(KVCacheManager, cache={"prefix_cache_retention_interval": 4})


@pytest.mark.parametrize("is_async", [False, True])
def test_a_model_with_a_scheduler_of_its_own_is_served_by_the_plugin_only(is_async: bool) -> None:
    config = SimpleNamespace(
        scheduler_config=SimpleNamespace(async_scheduling=is_async), diffusion_config=object()
    )
    with pytest.raises(NotServed, match=r"^diffusion models have a scheduler of their own: set"):
        kvcore_vllm.Scheduler(config)


def test_connectors_that_need_vllms_own_pool_are_refused_by_name() -> None:
    check_connectors(None, 1)
    both = {"kv_role": "kv_both"}
    check_connectors(KVTransferConfig(kv_connector="OffloadingConnector", **both), 1)
    nixl = KVTransferConfig(kv_connector="NixlConnector", **both)
    with pytest.raises(NotServed, match="serve NixlConnector beside state-space layers"):
        check_connectors(nixl, 2, has_states=True)
    with pytest.raises(NotServed, match="OffloadingConnector with 2 groups: it asks vLLM's own"):
        check_connectors(KVTransferConfig(kv_connector="OffloadingConnector", **both), 2)
    inner = [{"kv_connector": "NixlConnector"}, {"kv_connector": "SimpleCPUOffloadConnector"}]
    deeper = [
        {"kv_connector": "MultiConnector", "kv_connector_extra_config": {"connectors": inner}}
    ]
    for listed in (inner, deeper):
        several = KVTransferConfig(
            kv_connector="MultiConnector", kv_connector_extra_config={"connectors": listed}, **both
        )
        with pytest.raises(NotServed, match="SimpleCPUOffloadConnector: it reads the free queue"):
            check_connectors(several, 1)


def test_a_small_pool_is_taken_and_told(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    with caplog.at_level(logging.INFO):
        both = Both(num_blocks=5)
        assert "one request of max_model_len=64 tokens needs 16 blocks" in caplog.text
    both.add("r", list(range(14)))
    assert both.admit("r", num_lookahead_tokens=2) == 0
    both.decode("r", 99)
    both.add("long", list(range(30)))
    assert both.admit("long", full_sequence_must_fit=True) is None
