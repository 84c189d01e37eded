# SPDX-License-Identifier: Apache-2.0
"""The adapter's manager beside vLLM's own: the same calls, and the same answers.

Blocks of four tokens.
"""

from __future__ import annotations

import random
from typing import Any

import pytest

from tests.engines.vllm.environment import ABSENT

pytest.importorskip("vllm", reason=ABSENT)

import kvcore_vllm
import torch
from vllm.lora.request import LoRARequest
from vllm.v1.kv_cache_interface import ChunkedLocalAttentionSpec, FullAttentionSpec
from vllm.v1.request import RequestStatus

from tests.engines.vllm.both import WINDOW, Answer, Both
from tests.engines.vllm.engine import BLOCK_SIZE, FULL, SHAPE, make_engine, make_request, steps

pytestmark = pytest.mark.vllm

HALVES = FullAttentionSpec(**SHAPE | {"dtype": torch.float16})
CHUNKS = ChunkedLocalAttentionSpec(attention_chunk_size=8, **SHAPE)


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


@pytest.mark.parametrize(
    ("num_in_flight", "computed", "found"), [(0, 12, 8), (4, 12, 0), (0, 4, 4), (0, 0, 0)]
)
def test_loaded_blocks_stay_findable_once_the_output_of_their_step_came(
    num_in_flight: int, computed: int, found: int
) -> None:
    both = Both()
    both.add("r", list(range(12)))
    both.add("s", list(range(12)))

    def load_and_end(manager: Any, requests: dict[str, Any]) -> None:
        request = requests["r"]
        manager.new_step_starts()
        manager.allocate_slots(request, 4, num_external_computed_tokens=8)
        manager.take_new_block_ids()
        request.num_computed_tokens = computed  # less than 12 if a load failed
        request.num_in_flight_tokens = num_in_flight
        manager.evict_blocks(manager.get_block_ids("r")[0][computed // BLOCK_SIZE :])
        request.status = RequestStatus.FINISHED_STOPPED
        manager.free(requests.pop("r"))

    for side in both.sides:
        load_and_end(*side)
    (vllm, _), (kvcore, requests) = both.sides
    assert kvcore.get_computed_blocks(requests["s"])[1] == found
    assert vllm.get_computed_blocks(both.sides[0][1]["s"])[1] == min(8, computed)


def test_blocks_of_two_precisions_are_zeroed_unless_a_load_writes_them() -> None:
    both = Both(FULL, HALVES)
    both.add("r", list(range(9)))
    both.admit("r")
    both.add("loaded", list(range(50, 62)))
    zeroed = []

    def load(manager: Any, requests: dict[str, Any]) -> list[int]:
        request = requests["loaded"]
        manager.new_step_starts()
        options = {"num_external_computed_tokens": 8, "delay_cache_blocks": True}
        manager.allocate_slots(request, 0, **options, skip_zeroing_group_ids=(1,))
        request.num_computed_tokens = 8
        return sorted(manager.take_new_block_ids())

    zeroed.append(both.ask(load))

    def fail(manager: Any, _: dict[str, Any]) -> list[int]:
        manager.record_blocks_for_zeroing("loaded", 4)
        return sorted(manager.take_new_block_ids())

    zeroed.append(both.ask(fail))
    assert [len(blocks) for blocks in zeroed] == [2, 2]


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
            [each.block_pool is pool for each in manager.coordinator.single_type_managers],
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


def test_keys_of_blocks_are_vllms_while_blocks_are_used_again() -> None:
    both = Both(FULL, WINDOW, num_blocks=17, max_model_len=16)
    dice = random.Random(3)

    def keys(manager: Any, _: dict[str, Any]) -> list[bytes]:
        return [bytes(block.block_hash or b"") for block in manager.block_pool.blocks]

    changed, before = 0, both.ask(keys)
    for number in range(20):
        prompt = [*([1, 2, 3, 4] * dice.randrange(3)), *(dice.randrange(9) for _ in range(5))]
        both.add(str(number), prompt)
        both.admit(str(number))
        if number % 3:
            both.decode(str(number), dice.randrange(9))
        both.free(str(number))
        changed += both.ask(keys) != before
        before = both.ask(keys)
    assert changed > 10


@pytest.mark.parametrize("groups", [(FULL,), (WINDOW,), (FULL, WINDOW)])
def test_a_cached_block_is_found_by_its_hash(groups: Any) -> None:
    both = Both(*groups)
    both.add("r", list(range(9)))
    both.admit("r")

    def found(manager: Any, requests: dict[str, Any]) -> list[list[int] | None]:
        every = [*requests["r"].block_hashes, bytes(32)]
        blocks = [
            manager.block_pool.get_cached_block(each, list(range(len(groups)))) for each in every
        ]
        return [each and [block.block_id for block in each] for each in blocks]

    assert [each is None for each in both.ask(found)] == [False, False, True]


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


@pytest.mark.parametrize("tail", [[50, 51, 52, 53], [60, 61, 62, 63]])
def test_stored_events_are_of_the_request_that_stored_whoever_shares_its_blocks(
    tail: list[int],
) -> None:
    both = Both(enable_kv_cache_events=True)
    both.add("r", [*range(8), 50, 51, 52, 53, 1])
    both.add("s", [*range(8), *tail, 2])  # shares two blocks or three with r
    for _, requests in both.sides:
        for name in requests:
            requests[name].session_id = name
    assert both.admit("r", 4) == 0
    assert both.admit("s", 1) == 4

    def chunk(manager: Any, requests: dict[str, Any]) -> None:
        manager.new_step_starts()
        manager.allocate_slots(requests["r"], 9)
        manager.take_new_block_ids()

    both.ask(chunk)
    first, second = both.ask(lambda manager, _: manager.take_events())
    assert first.session_id == second.session_id == "r"
    assert first.token_ids == [0, 1, 2, 3]
    assert second.token_ids == [4, 5, 6, 7, 50, 51, 52, 53]


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
