# SPDX-License-Identifier: Apache-2.0
"""Why the adapter refuses speculative tokens beside recurrent states: a run of both managers.

vLLM's workers append to their rows and never change a column. vLLM holds `num_speculative_blocks`
more blocks per request from its first step on, behind the position that the step reaches with its
speculative tokens; a worker copies the state of the last accepted token to the column where the
next step continues. kvcore takes blocks for the speculative tokens of one step, behind the position
of the known tokens, and gives them back; to accept a token it moves the block of its state to the
state's position.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.engines.vllm.environment import ABSENT

pytest.importorskip("vllm", reason=ABSENT)

from vllm.v1.core.kv_cache_manager import KVCacheManager as VllmManager
from vllm.v1.core.single_type_kv_cache_manager import register_all_kvcache_specs

from kvcore import Config, Group, KVCacheManager, Request
from kvcore.compat import KVCacheManager as Compat
from kvcore.types.errors import TooManyDrafts
from tests.engines.vllm.both import STATE, make
from tests.engines.vllm.engine import BLOCK_SIZE, FULL, make_config, make_request

pytestmark = pytest.mark.vllm
NUM_BLOCKS = 40
PROMPT = list(range(6))
DRAFTS = [90, 91]
ACCEPTED = (1, 2, 0, 2, 1)
STATES = 1
"""The number of the group of states."""
GROUPS = (
    Group(BLOCK_SIZE),
    Group(BLOCK_SIZE, kind="state", draft_states=len(DRAFTS)),
)


class Vllm:
    """vLLM's manager, and the row of its worker, which gets the new blocks of each step."""

    def __init__(self) -> None:
        register_all_kvcache_specs(make_config())
        state = replace(STATE, num_speculative_blocks=len(DRAFTS))
        self.manager = make(VllmManager, FULL, state, num_blocks=NUM_BLOCKS)
        self.request = make_request("r", PROMPT, max_tokens=30)
        self.row: list[int] = []

    def step(self, num_tokens: int) -> None:
        """Schedule a step of the request."""
        self.manager.new_step_starts()
        got = self.manager.allocate_slots(
            self.request, num_tokens, num_lookahead_tokens=len(DRAFTS)
        )
        self.manager.take_new_block_ids()
        self.row += got.get_block_ids()[STATES]
        self.request.num_computed_tokens += num_tokens

    def decode(self, token: int, num_accepted: int) -> list[int]:
        """Take a token, schedule it with drafts, and accept some. Returns the manager's table."""
        self.request.append_output_token_ids(token)
        self.request.spec_token_ids = DRAFTS
        self.step(1 + len(DRAFTS))
        table: list[int] = self.manager.get_block_ids("r")[STATES]
        self.request.spec_token_ids = []
        self.request.num_computed_tokens -= len(DRAFTS) - num_accepted
        self.request.append_output_token_ids(DRAFTS[:num_accepted])
        return table

    @property
    def num_held(self) -> int:
        """Blocks of states that the request holds."""
        held = [each for each in self.manager.get_block_ids("r")[STATES] if each]
        return len(held)


class Kvcore:
    """kvcore's manager in the same run, and a row to which only new columns are appended."""

    def __init__(self) -> None:
        self.manager = KVCacheManager(Config(NUM_BLOCKS, groups=GROUPS))
        self.manager.add_request(Request("r", PROMPT))
        self.row: list[int] = []

    def step(self, num_tokens: int) -> None:
        """Schedule a step of the request."""
        self.manager.allocate_slots("r", num_tokens)
        self.manager.take_batch()
        self.row += self.table[len(self.row) :]

    def decode(self, token: int, num_accepted: int) -> None:
        """Take a token, schedule it with drafts, and accept some."""
        self.manager.add_tokens("r", [token])
        self.manager.add_drafts("r", DRAFTS)
        self.step(1 + len(DRAFTS))
        self.manager.accept("r", num_accepted)

    @property
    def table(self) -> list[int]:
        """The request's table of states."""
        return list(self.manager.get_block_ids("r")[STATES])

    @property
    def state_column(self) -> int:
        """The column of the state after all computed tokens."""
        return (self.manager.num_computed_tokens("r") - 1) // BLOCK_SIZE


def test_vllm_never_changes_a_column_that_its_worker_has() -> None:
    vllm = Vllm()
    vllm.step(len(PROMPT))
    assert vllm.num_held == 1 + len(DRAFTS)  # before there is any speculative token
    for number, num_accepted in enumerate(ACCEPTED):
        table = vllm.decode(50 + number, num_accepted)
        assert len(table) == len(vllm.row)
        assert all(mine in (0, theirs) for mine, theirs in zip(table, vllm.row, strict=True))
        end = vllm.request.num_computed_tokens + len(DRAFTS) - num_accepted
        running = -(-end // BLOCK_SIZE) - 1  # with the speculative tokens, accepted or not
        assert all(table[running : running + 1 + len(DRAFTS)])
        assert vllm.num_held > len(DRAFTS)


def test_kvcore_moves_the_state_of_an_accepted_token_to_another_column() -> None:
    kvcore, moved = Kvcore(), []
    kvcore.step(len(PROMPT))
    assert sum(map(bool, kvcore.table)) == 1
    for number, num_accepted in enumerate(ACCEPTED):
        kvcore.decode(50 + number, num_accepted)
        column = kvcore.state_column
        moved.append(kvcore.table[column] != kvcore.row[column])
        assert len(kvcore.table) == column + 1  # the blocks of the others were given back
    assert all(moved)  # since the first step accepts a token


def test_tokens_to_come_are_one_at_a_time_beside_states() -> None:
    """As asynchronous scheduling needs it, where the ids of a step's drafts are not yet known."""
    config = Config(NUM_BLOCKS, groups=GROUPS)
    compat = Compat(config, keep_tokens=False, ends_steps=True, reads_tables=True)
    request: Any = make_request("r", PROMPT, max_tokens=30)
    assert compat.allocate_slots(request, len(PROMPT)) is not None
    compat.new_step_starts()
    request.num_computed_tokens = len(PROMPT)
    with pytest.raises(TooManyDrafts):
        compat.allocate_slots(request, 1 + len(DRAFTS))
    assert compat.allocate_slots(request, 1) is not None
