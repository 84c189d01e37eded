# SPDX-License-Identifier: Apache-2.0
"""`kvcore.compat` and the counts of an engine: drafts, and tokens that are still to come.

Nine usable blocks of two tokens unless a test says otherwise.
"""

from __future__ import annotations

import pytest

from kvcore import Group
from kvcore.compat import KVCacheManager
from kvcore.types.errors import BeyondModelLength, InvalidToken, TooManyTokens
from tests.compat.stories import admit, decode, finish, make, num_found
from tests.compat.worker import EngineRequest
from tests.conftest import Backend


@pytest.fixture
def manager(backend: Backend) -> KVCacheManager:
    """Make a manager with one group."""
    return make(backend)


def drafted(manager: KVCacheManager) -> EngineRequest:
    """Return a request with 4 computed tokens, a sampled fifth and scheduled drafts 6, 7, 8."""
    request, _ = admit(manager, "r", [1, 2, 3, 4])
    request.output, request.spec_token_ids = [5], [6, 7, 8]
    decode(manager, request, 4)
    return request


@pytest.mark.seed("S000-30")
@pytest.mark.parametrize("num_accepted", [0, 1, 2, 3])
def test_drafts_are_published_when_they_were_accepted(
    manager: KVCacheManager, num_accepted: int
) -> None:
    request = drafted(manager)
    table = manager.get_block_ids("r")[0]
    assert num_found(manager, [1, 2, 3, 4, 5, 6, 7, 8, 9]) == 4
    # The model goes on with 0 if it does not repeat a draft.
    request.output += [*[6, 7, 8][:num_accepted], 0]
    request.num_computed_tokens -= 3 - num_accepted
    request.spec_token_ids = []
    decode(manager, request, 1)
    tokens = request.all_token_ids
    assert manager.core.num_tokens("r") == len(tokens) == 6 + num_accepted
    assert manager.core.num_computed_tokens("r") == len(tokens)
    assert num_found(manager, [*tokens, 9]) == len(tokens) // 2 * 2
    # Blocks of rejected drafts stay at their places and are written again.
    assert manager.get_block_ids("r")[0][: len(table)] == table
    finish(manager, request)


def test_accepted_drafts_were_computed_by_the_step_before(manager: KVCacheManager) -> None:
    request = drafted(manager)
    request.output += [6, 7, 8]
    request.spec_token_ids = []
    manager.new_step_starts()
    # An engine may go on before it has a token behind the drafts.
    assert manager.allocate_slots(request, 1) is not None
    assert num_found(manager, [*request.all_token_ids, 9]) == 8
    manager.free(request)
    # It left this step, and what the step before computed stays.
    assert num_found(manager, [*request.all_token_ids, 9]) == 8
    request.output.append(0)
    request.num_computed_tokens = 0
    assert manager.get_computed_blocks(request)[1] == 8


def test_a_wrong_token_behind_accepted_drafts_can_be_put_right(manager: KVCacheManager) -> None:
    request = drafted(manager)
    request.output += [6, 7, -1]
    request.num_computed_tokens, request.spec_token_ids = 7, []
    manager.new_step_starts()
    with pytest.raises(InvalidToken):
        manager.allocate_slots(request, 1)
    assert manager.core.num_tokens("r") == 7
    request.output[-1] = 9
    assert manager.allocate_slots(request, 1) is not None
    assert manager.core.num_tokens("r") == 8


def test_asking_twice_in_a_step_gives_nothing_new(manager: KVCacheManager) -> None:
    request, _ = admit(manager, "r", [1, 2, 3, 4])
    request.output, request.spec_token_ids = [5], [6, 7, 8]
    manager.new_step_starts()
    assert manager.allocate_slots(request, 4) is not None
    assert manager.allocate_slots(request, 4) is manager.empty_kv_cache_blocks
    assert manager.core.num_draft_tokens("r") == 3
    hitting = EngineRequest("hitting", [1, 2, 3, 4, 9, 9])
    blocks, num_hit = manager.get_computed_blocks(hitting)
    assert manager.allocate_slots(hitting, 2, num_hit, blocks) is not None
    assert manager.allocate_slots(hitting, 2) is manager.empty_kv_cache_blocks
    hitting.num_computed_tokens = num_hit
    assert num_found(manager, [*hitting.prompt, 0]) == 6
    manager.free(hitting)
    assert num_found(manager, [*hitting.prompt, 0]) == 4


def test_a_token_that_equals_a_rejected_draft_is_computed_again(manager: KVCacheManager) -> None:
    request = drafted(manager)
    # All drafts are rejected, though the engine samples a 6 all the same.
    request.output.append(6)
    request.num_computed_tokens -= 3
    request.spec_token_ids = []
    manager.new_step_starts()
    assert manager.core.num_computed_tokens("r") == 8
    assert manager.allocate_slots(request, 1) is manager.empty_kv_cache_blocks
    # Scheduled by this step, as any new token: who leaves the step takes it along.
    assert num_found(manager, [1, 2, 3, 4, 5, 6, 9]) == 6
    manager.free(request)
    assert num_found(manager, [1, 2, 3, 4, 5, 6, 9]) == 4


def test_drafts_of_a_refused_call_leave_nothing(manager: KVCacheManager) -> None:
    request, _ = admit(manager, "r", [1, 2, 3, 4])
    other, _ = admit(manager, "other", list(range(20, 34)))
    request.output, request.spec_token_ids = [5], [6, 7]
    manager.new_step_starts()
    assert manager.allocate_slots(request, 3) is None
    assert manager.core.num_draft_tokens("r") == 0
    finish(manager, other)
    request.output, request.spec_token_ids = [5, 8], []
    assert manager.allocate_slots(request, 2) is not None
    assert manager.core.num_tokens("r") == 6


def test_drafts_past_the_model_length_are_misuse(backend: Backend) -> None:
    manager = make(backend, max_model_len=6)
    request, _ = admit(manager, "r", [1, 2, 3, 4])
    request.output, request.spec_token_ids = [5], [6, 7]
    manager.new_step_starts()
    with pytest.raises(BeyondModelLength):
        manager.allocate_slots(request, 3)
    assert manager.core.num_draft_tokens("r") == 0
    assert manager.allocate_slots(request, 2, num_lookahead_tokens=9) is not None
    assert len(manager.get_block_ids("r")[0]) == 3
    with pytest.raises((BeyondModelLength, TooManyTokens)):
        manager.allocate_slots(EngineRequest("huge", [1]), 2**40)


def test_steps_can_be_scheduled_before_their_tokens_are_known(manager: KVCacheManager) -> None:
    """As with asynchronous scheduling, two steps are in flight before the first token is known."""
    request, table = admit(manager, "r", [1, 2, 3])
    assert decode(manager, request, 1) == ()
    assert decode(manager, request, 1) == (3,)
    assert num_found(manager, [1, 2, 3, 0, 0, 9]) == 2
    request.output += [4, 5]
    assert decode(manager, request, 1) == ()
    assert manager.get_block_ids("r")[0] == [*table[0], 3]
    assert num_found(manager, [1, 2, 3, 4, 5, 6, 9]) == 4
    request.output += [6]
    assert decode(manager, request, 1) == (4,)
    assert num_found(manager, [1, 2, 3, 4, 5, 6, 9]) == 6
    finish(manager, request)


@pytest.mark.seed("S000-28", "S000-36")
def test_encoder_blocks_are_new_beside_external_ones(backend: Backend) -> None:
    groups = (Group(2), Group(2, kind="cross_attention"))
    manager = make(backend, 20, groups=groups, enable_caching=False)
    request = EngineRequest("r", [1, 2, 3])
    got = manager.allocate_slots(request, 0, 0, None, 0, 3, num_encoder_tokens=4)
    assert got is not None
    assert [len(ids) for ids in got.blocks] == [0, 2]
    assert [len(ids) for ids in manager.get_block_ids("r")] == [2, 2]
