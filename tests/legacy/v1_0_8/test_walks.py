# SPDX-License-Identifier: Apache-2.0
"""Random lives of the manager of vLLM 0.8.5 on both backends at once, from a seed.

Both get the same calls. Answers, errors and batches are compared, and the blocks behind them; a
call that raises changes nothing, and one that is refused gives back what the window does not see.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from kvcore.legacy.v1_0_8.kv_cache_manager import KVCacheManager
from kvcore.legacy.v1_0_8.kv_cache_utils import KVCacheBlock
from kvcore.types.errors import KvcoreError
from tests.conformance.legacy_utils.requests import EngineRequest, RequestStatus
from tests.conformance.legacy_utils.stories import all_of, make
from tests.conftest import need_twin

NUM_STEPS = 1000
CHECK_EVERY = 25
BACKENDS: tuple[Any, ...] = ("python", "rust")
WORLDS: list[dict[str, Any]] = [
    {},
    {"window": 5},
    {"window": 1, "use_eagle": True},
    {"use_eagle": True, "log_stats": True},
    {"enable_caching": False},
]


@pytest.fixture(autouse=True, scope="module")
def twin() -> None:
    """Skip the tests without the twin, or fail in CI."""
    need_twin()


def ids(value: Any) -> Any:
    """Return an answer with ids for blocks."""
    if isinstance(value, KVCacheBlock):
        return value.block_id, value.ref_cnt, value.block_hash
    if isinstance(value, list | tuple):
        return [ids(each) for each in value]
    return value


class Pair:
    """A manager on each backend, with the same calls; hits are kept to be used late."""

    def __init__(self, seed: int, options: dict[str, Any]) -> None:
        self.dice = random.Random(seed)
        self.managers = [make("python", 10, **options), make("rust", 10, **options)]
        self.requests: list[EngineRequest] = []
        self.hits: list[list[list[KVCacheBlock]]] = []
        self.num_made = 0
        self.known = [all_of(manager) for manager in self.managers]
        self.seen: set[str] = set()

    def ask(self, call: Callable[[KVCacheManager, int], Any]) -> list[Any] | None:
        """Return the answer of both; None if both raise the same."""
        answers: list[Any] = []
        before = self.known
        for number, manager in enumerate(self.managers):
            try:
                answers.append(call(manager, number))
            except KvcoreError as error:
                assert all_of(manager) == before[number]
                answers.append(error)
        first, second = answers
        if isinstance(first, KvcoreError):
            assert type(first) is type(second)
            assert str(first) == str(second)
            self.seen.add(type(first).__name__)
            return None
        assert ids(first) == ids(second)
        self.known = [all_of(manager) for manager in self.managers]
        assert self.known[0] == self.known[1]
        return answers

    def step(self) -> None:
        """Make one call, of any kind, for any request."""
        dice = self.dice
        if len(self.requests) < 4 and dice.random() < 0.5:
            tokens = [dice.randrange(2) for _ in range(dice.choice([1, 4, 8, 9, 13, 16]))]
            self.requests.append(EngineRequest(str(self.num_made), [5, 5, 5, 5, *tokens]))
            self.num_made += 1
            return
        if not self.requests:
            return
        request = dice.choice(self.requests)
        kinds = [self.schedule] * 6 + [self.leave, self.disturb, self.ask_around]
        dice.choice(kinds)(request)

    def schedule(self, request: EngineRequest) -> None:
        """Look up if nothing is held, and allocate."""
        dice = self.dice
        held = request.request_id in self.managers[0].req_to_blocks
        found: list[Any] = [None, None]
        if not held:
            looked = self.ask(lambda manager, _: manager.get_computed_blocks(request))
            assert looked is not None
            found = [blocks for blocks, _ in looked]
            self.hits.append(found)
            request.num_computed_tokens = 0
        elif request.num_computed_tokens == request.num_tokens:
            request.all_token_ids.append(dice.randrange(2))
        start = request.num_computed_tokens + 4 * len(found[0] or [])
        count = max(1, dice.randint(1, max(1, request.num_tokens - start)))
        request.spec_token_ids = [7] * dice.choice([0, 0, 0, 3])
        count += len(request.spec_token_ids)
        ahead = dice.choice([0, 0, 3])
        got = self.ask(
            lambda manager, number: manager.allocate_slots(request, count, found[number], ahead)
        )
        if got is not None and got[0] is None:
            self.seen.add("refused")
        elif got is not None:
            request.num_computed_tokens = start + count - len(request.spec_token_ids)
            request.status = RequestStatus.RUNNING
        request.spec_token_ids = []

    def leave(self, request: EngineRequest) -> None:
        """Preempt or finish."""
        self.ask(lambda manager, _: manager.free(request))
        request.num_computed_tokens = 0
        request.status = RequestStatus.PREEMPTED
        if self.dice.random() < 0.6:
            self.ask(lambda manager, _: manager.free_block_hashes(request))
            self.requests.remove(request)

    def disturb(self, request: EngineRequest) -> None:
        """Ask for no tokens, and hand in old hits or hits of another pool."""
        dice = self.dice
        old = dice.choice(self.hits) if self.hits else [[], []]
        if dice.random() < 0.3:
            old = old[::-1]
        count = dice.choice([0, 1, 4000])
        before = self.known[0]
        self.ask(lambda manager, number: manager.allocate_slots(request, count, old[number]))
        if self.known[0] != before:
            self.seen.add("old hits were still good")
            self.ask(lambda manager, _: manager.free(request))
            request.num_computed_tokens = 0

    def ask_around(self, request: EngineRequest) -> None:
        """Make all other queries."""
        self.ask(lambda manager, _: manager.reset_prefix_cache())
        self.ask(lambda manager, _: manager.make_prefix_cache_stats())
        self.ask(lambda manager, _: manager.get_num_common_prefix_blocks(request, 2))
        self.ask(lambda manager, _: manager.usage)
        self.ask(lambda manager, _: manager.block_pool.free_block_queue.get_all_free_blocks())
        self.ask(lambda manager, _: manager.take_batch())


@pytest.mark.parametrize("options", WORLDS, ids=str)
@pytest.mark.parametrize("seed", range(3))
def test_both_backends_agree_call_by_call(options: dict[str, Any], seed: int) -> None:
    pair = Pair(seed, options)
    for number in range(NUM_STEPS):
        pair.step()
        if number % CHECK_EVERY == 0:
            for manager in pair.managers:
                manager.check()
    assert {"refused", "InvalidCount"} <= pair.seen
    for manager in pair.managers:
        for name in list(manager.req_to_blocks):
            manager.free(EngineRequest(name, [1]))
        manager.check()
        assert manager.block_pool.get_num_free_blocks() == 9
