# SPDX-License-Identifier: Apache-2.0
"""The adapter's manager beside vLLM's own: the same calls, and the same answers.

Blocks of four tokens. Requests are vLLM's own, one object for each side.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest

from tests.engines.vllm_environment import ABSENT

pytest.importorskip("vllm", reason=ABSENT)

import kvcore_vllm
import torch
from kvcore_vllm import NotServed
from kvcore_vllm.install import check_connectors
from kvcore_vllm.manager import KVCacheManager
from vllm.config import KVTransferConfig
from vllm.lora.request import LoRARequest
from vllm.v1.core.kv_cache_manager import KVCacheManager as VllmManager
from vllm.v1.core.single_type_kv_cache_manager import register_all_kvcache_specs
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    EncoderOnlyAttentionSpec,
    KVCacheConfig,
    KVCacheGroupRole,
    KVCacheGroupSpec,
    MambaSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
)
from vllm.v1.request import RequestStatus

from tests.engines.vllm_engine import (
    BLOCK_SIZE,
    FULL,
    SHAPE,
    make_cache,
    make_config,
    make_engine,
    make_request,
    steps,
)

pytestmark = pytest.mark.vllm

WINDOW = SlidingWindowSpec(sliding_window=6, **SHAPE)
CHUNKS = ChunkedLocalAttentionSpec(attention_chunk_size=8, **SHAPE)
MAMBA = MambaSpec(block_size=4, shapes=((1,),), dtypes=(torch.float32,))
REPLAY = SlidingWindowMLASpec(sliding_window=6, bounded_replay=True, **SHAPE)

Answer = Callable[[Any, dict[str, Any]], object]
"""What a side says, from its manager and its requests by name."""


def make(kind: Any, *groups: Any, num_blocks: int = 33, **options: Any) -> Any:
    """A manager of either kind."""
    model_length = options.pop("max_model_len", 64)
    return kind(
        make_cache(*groups, num_blocks=num_blocks, **options.pop("cache", {})),
        max_model_len=model_length,
        scheduler_block_size=BLOCK_SIZE,
        hash_block_size=options.pop("hash_block_size", BLOCK_SIZE),
        **options,
    )


class Both:
    """A manager of each kind, with requests of its own for each."""

    def __init__(self, *groups: Any, **options: Any) -> None:
        register_all_kvcache_specs(make_config())
        self.sides: list[tuple[Any, dict[str, Any]]] = [
            (make(kind, *groups, **options), {}) for kind in (VllmManager, KVCacheManager)
        ]

    def add(self, name: str, tokens: list[int], **options: Any) -> None:
        """A request comes."""
        for _, requests in self.sides:
            requests[name] = make_request(name, tokens, **options)

    def ask(self, answer: Answer) -> Any:
        """The one answer of both sides, which then have the same tables and the same free queue."""
        theirs, ours = (answer(*side) for side in self.sides)
        assert ours == theirs
        (vllm, requests), (kvcore, _) = self.sides
        for name in requests:
            assert kvcore.get_block_ids(name) == vllm.get_block_ids(name)
        assert list(kvcore.compat.core.state().device.queue) == [
            block.block_id for block in vllm.block_pool.free_block_queue.get_all_free_blocks()
        ]
        kvcore.compat.core.check()
        return ours

    def admit(self, name: str, count: int | None = None, **options: Any) -> int | None:
        """Look up and allocate, as a scheduler does; returns the hit's tokens, None if refused."""

        def answer(manager: Any, requests: dict[str, Any]) -> int | None:
            request = requests[name]
            manager.new_step_starts()
            hit, num_hit, _ = manager.get_computed_blocks(request)
            new = request.num_tokens - num_hit if count is None else count
            got = manager.allocate_slots(request, new, num_hit, hit, **options)
            manager.take_new_block_ids()
            if got is None:
                return None
            request.num_computed_tokens = num_hit + new
            request.status = RequestStatus.RUNNING
            return int(num_hit)

        num_hit: int | None = self.ask(answer)
        return num_hit

    def decode(self, name: str, token: int, num_in_flight: int = 0) -> None:
        """A token comes, and the next position is scheduled."""

        def answer(manager: Any, requests: dict[str, Any]) -> object:
            request = requests[name]
            request.append_output_token_ids(token)
            request.num_in_flight_tokens = num_in_flight
            manager.new_step_starts()
            got = manager.allocate_slots(request, 1)
            manager.take_new_block_ids()
            request.num_computed_tokens += 1
            return got and got.get_block_ids()

        self.ask(answer)

    def free(self, name: str) -> None:
        """A request is over."""

        def answer(manager: Any, requests: dict[str, Any]) -> None:
            requests[name].status = RequestStatus.FINISHED_STOPPED
            manager.free(requests.pop(name))

        self.ask(answer)


@pytest.mark.parametrize(
    ("group", "sentence"),
    [
        (MAMBA, "state-space layers, which layer layer1 needs"),
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


def test_connectors_that_need_vllms_own_pool_are_refused_by_name() -> None:
    check_connectors(None, 1)
    both = {"kv_role": "kv_both"}
    check_connectors(KVTransferConfig(kv_connector="OffloadingConnector", **both), 1)
    with pytest.raises(NotServed, match="OffloadingConnector with 2 groups: it asks vLLM's own"):
        check_connectors(KVTransferConfig(kv_connector="OffloadingConnector", **both), 2)
    inner = [{"kv_connector": "NixlConnector"}, {"kv_connector": "SimpleCPUOffloadConnector"}]
    several = KVTransferConfig(
        kv_connector="MultiConnector", kv_connector_extra_config={"connectors": inner}, **both
    )
    with pytest.raises(NotServed, match="SimpleCPUOffloadConnector: it reads the free queue"):
        check_connectors(several, 1)


def test_a_small_pool_and_sparse_retention_are_taken_and_told(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    with caplog.at_level(logging.INFO):
        both = Both(num_blocks=5)
        assert "one request of max_model_len=64 tokens needs 16 blocks" in caplog.text
        make(KVCacheManager, FULL, WINDOW, cache={"prefix_cache_retention_interval": 0})
    assert caplog.text.count("keeps every cached block of a window") == 1
    both.add("r", list(range(14)))
    assert both.admit("r", num_lookahead_tokens=2) == 0
    both.decode("r", 99)
    both.add("long", list(range(30)))
    assert both.admit("long", full_sequence_must_fit=True) is None


def test_lookahead_ends_at_the_models_length_in_a_small_pool() -> None:
    both = Both(num_blocks=4, max_model_len=16)
    both.add("r", list(range(12)))
    assert both.admit("r", num_lookahead_tokens=4) is None
    both = Both(num_blocks=4, max_model_len=13)
    both.add("r", list(range(12)))
    assert both.admit("r", num_lookahead_tokens=4) is None
    both = Both(num_blocks=4, max_model_len=12)
    both.add("r", list(range(12)))
    assert both.admit("r", num_lookahead_tokens=4) == 0


@pytest.mark.parametrize("groups", [(FULL,), (FULL, WINDOW), (FULL, CHUNKS)])
def test_a_bounded_look_up_finds_what_vllm_finds(groups: Any) -> None:
    both = Both(*groups)
    both.add("r", list(range(21)))
    both.admit("r")
    both.free("r")
    both.add("s", list(range(24)))

    def bounded(most: int | None) -> Answer:
        def answer(manager: Any, requests: dict[str, Any]) -> object:
            blocks, num_tokens, boundary = manager.get_computed_blocks(requests["s"], most)
            return blocks.get_block_ids(), num_tokens, boundary

        return answer

    found = [both.ask(bounded(most))[1] for most in (None, 23, 19, 12, 11, 4, 3, 0)]
    assert found[0] == 20
    assert found[-2:] == [0, 0]


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("others", [False, True])
def test_the_watermark_binds_an_admission_beside_others(whole: bool, others: bool) -> None:
    refused = []
    for num_tokens in (20, 24, 28, 32):
        both = Both(num_blocks=9, watermark=0.25, max_model_len=32)
        both.add("r", list(range(num_tokens)))
        options = {"full_sequence_must_fit": whole, "has_scheduled_reqs": others}
        refused.append(both.admit("r", 20, **options) is None)
    assert refused == ([False, False, True, True] if whole and others else [False] * 4)


def test_blocks_that_are_freed_late_join_the_free_queue_as_in_vllm() -> None:
    both = Both(FULL, WINDOW)
    both.add("r", list(range(18)))
    both.admit("r", num_lookahead_tokens=9)
    held: dict[int, list[Any]] = {}

    def pop(manager: Any, requests: dict[str, Any]) -> object:
        requests["r"].status = RequestStatus.FINISHED_STOPPED
        held[id(manager)] = manager.pop_blocks_for_free(requests.pop("r"))
        return [block.block_id for block in held[id(manager)]], manager.reset_prefix_cache()

    ids, reset = both.ask(pop)
    assert len([each for each in ids if each]) == 14
    assert not reset
    both.ask(lambda manager, _: manager.block_pool.free_blocks(reversed(held[id(manager)])))
    both.ask(lambda manager, _: (manager.usage, manager.block_pool.get_num_free_blocks()))
    both.add("s", list(range(18)))
    assert both.admit("s") == 16


def test_blocks_behind_a_window_stay_while_a_step_in_flight_reads_them() -> None:
    both = Both(FULL, WINDOW)
    both.add("r", list(range(9)))
    both.admit("r")
    (kvcore, requests) = both.sides[1]
    num_held = []
    for token in range(12):
        both.decode("r", token, num_in_flight=6 if token > 3 else 0)
        table, given_back = kvcore.get_block_ids("r")[1], kvcore.compat.get_block_ids("r")[1]
        num_held.append(len([each for each in table if each not in given_back]))
    assert num_held == [0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 1, 1]
    both.ask(lambda manager, r: manager.remove_skipped_blocks("r", r["r"].num_computed_tokens))
    assert kvcore.compat.get_block_ids("r") == kvcore.get_block_ids("r")
    requests["r"].num_in_flight_tokens = both.sides[0][1]["r"].num_in_flight_tokens = 6
    both.decode("r", 7, num_in_flight=6)
    both.free("r")
    assert kvcore.usage == 0.0


def test_questions_of_the_pool_have_vllms_answers() -> None:
    both = Both(FULL, WINDOW)
    both.add("r", list(range(9)))
    both.admit("r")

    def answer(manager: Any, requests: dict[str, Any]) -> object:
        pool, request = manager.block_pool, requests["r"]
        found = pool.get_cached_block(request.block_hashes[1], [0, 1])
        pool.touch(found)
        owned = [block.ref_cnt for block in found]
        pool.free_blocks(found)
        tables = manager.get_blocks("r").blocks
        return (
            [block.block_id for block in found],
            owned,
            pool.get_cached_block(b"\0" * 32, [0]),
            [[pool.is_block_writable(block) for block in table] for table in tables],
            [[bytes(block.block_hash or b"") for block in table] for table in tables],
            manager.get_blocks("r").get_unhashed_block_ids_all_groups(),
            manager.get_block_ids_for_computed_tokens("r", 5),
            manager.estimate_cached_tokens(request),
            manager.coordinator.find_longest_cache_hit(request.block_hashes, 8)[1],
            manager.truncate_computed_blocks(manager.get_blocks("r"), 4).get_block_ids(),
            pool.get_usage(),
        )

    both.ask(answer)


def test_events_are_vllms_with_session_adapter_salt_and_reported_hits() -> None:
    both = Both(FULL, WINDOW, num_blocks=13, enable_kv_cache_events=True, max_model_len=24)
    lora = LoRARequest("sql", 3, "adapters/sql")
    both.add("r", list(range(10)), lora_request=lora, cache_salt="tenant")
    for _, requests in both.sides:
        requests["r"].session_id = "talk"

    def events(manager: Any, _: dict[str, Any]) -> list[Any]:
        return [type(event).__name__ + repr(event) for event in manager.take_events()]

    both.admit("r")
    (stored, other) = both.ask(events)
    assert "'tenant'" in stored
    assert "'talk'" in other
    both.decode("r", 50)
    both.decode("r", 51)
    both.decode("r", 52)
    assert len(both.ask(events)) == 2
    both.add("s", list(range(10)), lora_request=lora, cache_salt="tenant")
    for _, requests in both.sides:
        requests["s"].kv_cache_report_mode = "full"
    both.ask(lambda manager, requests: manager.get_computed_blocks(requests["s"])[1])
    assert len(both.ask(events)) == 2
    both.free("r")
    both.add("t", list(range(100, 124)))
    both.admit("t")
    assert any("BlockRemoved" in event for event in both.ask(events))
    both.free("t")
    assert both.ask(lambda manager, _: manager.reset_prefix_cache())
    assert both.ask(events)[-1].startswith("AllBlocksCleared")


def test_own_hashes_may_cover_the_tokens_behind_a_block() -> None:
    both = Both(num_hash_lookahead_tokens=1)
    both.add("r", list(range(8)), lookahead=1)
    both.admit("r")
    both.add("s", [*range(8), 60, 61], lookahead=1)

    def hit(manager: Any, requests: dict[str, Any]) -> object:
        return manager.get_computed_blocks(requests["s"])[1]

    assert both.ask(hit) == 4
    both.decode("r", 60)
    assert both.ask(hit) == 8


def test_tokens_that_a_chunk_writes_again_are_published_late() -> None:
    both = Both(use_eagle=True, num_prefill_lookahead=3)
    both.add("r", list(range(13)))
    both.admit("r", 8)
    both.add("s", list(range(13)))

    def num_keys(manager: Any, _: dict[str, Any]) -> object:
        tables = manager.get_blocks("r").blocks
        return [block.block_hash is not None for table in tables for block in table]

    assert both.ask(num_keys) == [True, False]

    def chunk(manager: Any, requests: dict[str, Any]) -> None:
        manager.new_step_starts()
        manager.allocate_slots(requests["r"], 5)
        manager.take_new_block_ids()
        requests["r"].num_computed_tokens += 5

    both.ask(chunk)
    assert both.ask(num_keys) == [True, True, False, False]


def test_a_session_goes_on_under_asynchronous_scheduling() -> None:
    starts = []
    for kind in (kvcore_vllm.AsyncScheduler, kvcore_vllm.AsyncScheduler.__mro__[1]):
        scheduler = make_engine(kind, is_async=True)
        scheduler.add_request(make_request("session", list(range(10)), resumable=True))
        steps(scheduler, 8, in_flight=2)
        scheduler.add_request(make_request("session", [42, 43, 44], resumable=True))
        steps(scheduler, 8, in_flight=2)
        scheduler.add_request(make_request("other", [*range(10), 7, 7, 42, 43, 44, 1]))
        starts.append(steps(scheduler, 8, in_flight=2)["other"])
    assert starts == [12, 12]
