# SPDX-License-Identifier: Apache-2.0
"""`kvcore.compat` and steps that are scheduled before their tokens are known.

Blocks of four tokens, nine usable ones unless a test says otherwise. As vLLM's asynchronous
scheduler does, the tests raise `num_computed_tokens` when they schedule, lower it for rejected
drafts when the output comes, and name what is finished by `cache_blocks`.
"""

from __future__ import annotations

from typing import Any

import pytest

from kvcore import Config, Group
from kvcore.compat import KVCacheManager
from kvcore.types.errors import TooManyTokens
from tests.compat.worker import EngineRequest
from tests.conftest import Backend


class HashedRequest(EngineRequest):
    """A request that brings a hash for each full block, as vLLM's do."""

    @property
    def block_hashes(self) -> list[bytes]:
        """Return bytes that name all tokens of a block and those before it."""
        tokens = bytes(self.all_token_ids)
        return [tokens[:end].ljust(32, b"-") for end in range(4, len(tokens) + 1, 4)]


@pytest.fixture(params=[EngineRequest, HashedRequest])
def kind(request: pytest.FixtureRequest) -> Any:
    """Return the class of the requests: without hashes of their own, and with them."""
    return request.param


@pytest.fixture
def manager(backend: Backend) -> KVCacheManager:
    """Make a manager with one group."""
    return KVCacheManager(Config(10, 4, hash_seed=b"unit", record_new_blocks=True), backend=backend)


def schedule(manager: KVCacheManager, request: EngineRequest, count: int) -> tuple[int, ...]:
    """Schedule this many tokens in a step of their own. Returns the new blocks."""
    manager.new_step_starts()
    got = manager.allocate_slots(request, count)
    assert got is not None
    request.num_computed_tokens += count
    return got.blocks[0]


def output(
    manager: KVCacheManager, request: EngineRequest, tokens: list[int], finished: int
) -> None:
    """Hand in the tokens of a step. finished: those that no step in flight computes."""
    request.output += tokens
    manager.cache_blocks(request, finished)


def num_found(manager: KVCacheManager, kind: Any, tokens: list[int]) -> int:
    """Count the tokens of a new request with these tokens that would be hit."""
    return manager.get_computed_blocks(kind(f"asks {tokens}", tokens))[1]


def counts(manager: KVCacheManager) -> tuple[int, int, int]:
    """Return the counts of "r" in the core: tokens, computed ones and those to come."""
    core = manager.core
    return core.num_tokens("r"), core.num_computed_tokens("r"), core.num_output_placeholders("r")


def test_a_block_is_found_once_its_tokens_are_there(manager: KVCacheManager, kind: Any) -> None:
    request = kind("r", [1, 2, 3, 4, 5, 6, 7])
    schedule(manager, request, 7)
    schedule(manager, request, 1)
    schedule(manager, request, 1)
    assert counts(manager) == (7, 9, 2)
    tokens = [1, 2, 3, 4, 5, 6, 7, 8, 9]
    assert num_found(manager, kind, tokens) == 4
    output(manager, request, [8, 9], 8)
    assert num_found(manager, kind, tokens) == 8


def test_a_block_that_the_last_output_fills_is_found_later(
    manager: KVCacheManager, kind: Any
) -> None:
    request = kind("r", [1, 2])
    schedule(manager, request, 2)
    schedule(manager, request, 1)
    output(manager, request, [7], 2)
    schedule(manager, request, 1)
    output(manager, request, [8], 3)
    output(manager, request, [9], 4)
    request.status = "FINISHED_STOPPED"
    manager.free(request)
    assert num_found(manager, kind, [1, 2, 7, 8, 9, 5]) == 4


def test_a_session_may_replace_the_token_that_nobody_computed(
    manager: KVCacheManager, kind: Any
) -> None:
    """In vLLM's streaming sessions the next input replaces the last sampled token."""
    request = kind("r", [1, 2, 3, 4, 5, 6])
    schedule(manager, request, 6)
    schedule(manager, request, 1)
    schedule(manager, request, 1)
    output(manager, request, [7], 6)
    # It stops here; what is in flight is dropped, and the count falls to what is certain.
    request.num_computed_tokens = 6
    request.prompt, request.output = [1, 2, 3, 4, 5, 6, 20, 21, 22], []
    table = manager.get_block_ids("r")[0]
    assert schedule(manager, request, 3) == (3,)
    assert manager.get_block_ids("r")[0] == [*table, 3]
    assert counts(manager) == (9, 9, 0)
    assert num_found(manager, kind, [*request.prompt, 0]) == 8


@pytest.mark.parametrize("num_accepted", [0, 1, 2, 3])
def test_rejected_drafts_move_what_is_scheduled_behind_them(
    manager: KVCacheManager, kind: Any, num_accepted: int
) -> None:
    """Two steps have a token and three drafts, whose ids the scheduler never sees."""
    request = kind("r", [1, 2, 3, 4, 5, 6])
    request.spec_token_ids = [-1, -1, -1]
    schedule(manager, request, 6)
    assert schedule(manager, request, 4) == (3,)
    output(manager, request, [7], 6)
    assert schedule(manager, request, 4) == (4,)
    assert counts(manager) == (7, 14, 7)
    # The first step of drafts comes back, the second is in flight.
    request.num_computed_tokens -= 3 - num_accepted
    output(manager, request, [8, 9, 10, 11][: num_accepted + 1], 7 + num_accepted)
    schedule(manager, request, 4)
    num_tokens, end = 8 + num_accepted, 15 + num_accepted
    assert counts(manager) == (num_tokens, end, end - num_tokens)
    assert len(manager.get_block_ids("r")[0]) == -(-end // 4)
    assert num_found(manager, kind, [*request.all_token_ids, 0]) == num_tokens // 4 * 4
    manager.core.check()


def test_a_request_that_ran_ahead_leaves_no_key_on_what_its_next_step_would_write(
    manager: KVCacheManager, kind: Any
) -> None:
    request = kind("r", [1, 2, 3, 4, 5, 6])
    schedule(manager, request, 6)
    schedule(manager, request, 4)
    # All drafts are rejected and nothing is in flight: token 7 has its place and is not computed.
    request.num_computed_tokens -= 3
    output(manager, request, [7, 8], 7)
    manager.new_step_starts()
    assert manager.allocate_slots(request, 4) is not None
    assert num_found(manager, kind, [*request.all_token_ids, 0]) == 8
    manager.free(request)
    assert num_found(manager, kind, [*request.all_token_ids, 0]) == 4


def test_what_does_not_fit_leaves_the_tokens_to_come(manager: KVCacheManager, kind: Any) -> None:
    request, other = kind("r", [1, 2, 3, 4]), kind("other", list(range(20, 52)))
    schedule(manager, request, 4)
    schedule(manager, other, 32)
    for _ in range(2):
        assert manager.allocate_slots(request, 1) is None
        assert counts(manager) == (4, 4, 0)
    other.status = "FINISHED_ABORTED"
    manager.free(other)
    schedule(manager, request, 1)
    assert counts(manager) == (4, 5, 1)
    with pytest.raises(TooManyTokens):
        manager.allocate_slots(request, 1000)


def test_a_window_is_trimmed_behind_the_tokens_that_are_known(backend: Backend) -> None:
    groups = (Group(4, kind="sliding_window", window=5),)
    manager = KVCacheManager(Config(10, groups=groups, hash_seed=b"unit"), backend=backend)
    request = EngineRequest("r", list(range(7)))
    schedule(manager, request, 7)
    schedule(manager, request, 4)
    schedule(manager, request, 4)
    manager.remove_skipped_blocks("r", 15)
    assert manager.get_block_ids("r")[0][0] == 1
    output(manager, request, [7, 8, 9, 10], 11)
    manager.remove_skipped_blocks("r", 11)
    assert manager.get_block_ids("r")[0][:2] == [0, 2]


@pytest.mark.parametrize("num_steps", [1, 3])
def test_a_window_is_trimmed_up_to_a_token_that_arrived_since(
    backend: Backend, kind: Any, num_steps: int
) -> None:
    """No call has named the token, and steps without the request may have passed."""
    groups = (Group(4, kind="sliding_window", window=5),)
    manager = KVCacheManager(Config(10, groups=groups, hash_seed=b"unit"), backend=backend)
    request = kind("r", list(range(7)))
    schedule(manager, request, 7)
    schedule(manager, request, 1)
    for _ in range(num_steps):
        manager.new_step_starts()
    manager.remove_skipped_blocks("r", 8)
    assert manager.get_block_ids("r")[0] == [1, 2]
    request.output.append(7)
    manager.remove_skipped_blocks("r", 8)
    assert manager.get_block_ids("r")[0] == [0, 2]
    schedule(manager, request, 1)
    assert manager.get_block_ids("r")[0] == [0, 2, 3]


@pytest.mark.parametrize("num_reserved", [0, 2, 3])
def test_reserved_blocks_are_not_asked_of_the_whole_sequence(
    backend: Backend, num_reserved: int
) -> None:
    """Ten tokens need five blocks of seven; the first four need two."""
    manager = KVCacheManager(Config(8, 2, hash_seed=b"unit"), backend=backend)
    options: dict[str, Any] = {"full_sequence_must_fit": True, "reserved_blocks": num_reserved}
    assert manager.allocate_slots(EngineRequest("r", list(range(10))), 4, **options) is not None
    manager.free(EngineRequest("r", list(range(10))))
    assert manager.allocate_slots(EngineRequest("long", [9] * 16), 4, **options) is None
    assert manager.last_refusal is not None
    assert manager.last_refusal.needed == 8
    options["reserved_blocks"] = 6
    assert manager.allocate_slots(EngineRequest("r", list(range(10))), 4, **options) is None
    assert manager.last_refusal.needed == 2


def test_a_step_that_ends_keeps_what_it_computes(manager: KVCacheManager, kind: Any) -> None:
    for step_ends, num_hit in ((False, 0), (True, 4)):
        request = kind("r", [1, 2, 3, 4, 5])
        manager.new_step_starts()
        assert manager.allocate_slots(request, 5) is not None
        if step_ends:
            manager.step_ends()
        manager.free(request)
        assert num_found(manager, kind, [1, 2, 3, 4, 9]) == num_hit


def test_counts_show_that_a_step_is_over(manager: KVCacheManager, kind: Any) -> None:
    request = kind("r", [1, 2, 3, 4, 5])
    manager.new_step_starts()
    assert not manager.is_step_over
    assert manager.allocate_slots(request, 5) is not None
    assert not manager.is_step_over
    request.num_computed_tokens = 5
    assert manager.is_step_over
    manager.step_ends()
    assert not manager.is_step_over
