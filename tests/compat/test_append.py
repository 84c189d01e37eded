# SPDX-License-Identifier: Apache-2.0
"""A decoded token under `kvcore.compat`: its cost, and that the fast path has the same outcome.

Costs are counts: calls of the core, function calls of Python, tokens read.
"""

from __future__ import annotations

import hashlib
import random
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from kvcore import Config, Group
from kvcore.compat import KVCacheManager, NoSlotLeft
from kvcore.manager import KVCacheManager as Core
from tests.compat.stories import CountingTokens, plain
from tests.compat.worker import EngineRequest
from tests.conftest import Backend

SIZE = 4
MAX_CALLS_INSIDE = 11
"""Function calls of a token inside a block, of Python and of C together."""


class HashedRequest(EngineRequest):
    """A request that brings its own hashes, of its tokens from the first on."""

    @property
    def block_hashes(self) -> list[bytes]:
        tokens = self.all_token_ids
        ends = range(SIZE, len(tokens) + 1, SIZE)
        return [hashlib.sha256(repr(tokens[:end]).encode()).digest() for end in ends]


def make(backend: Backend, num_blocks: int = 60, **options: Any) -> KVCacheManager:
    """Return a manager of blocks of SIZE tokens."""
    return KVCacheManager(Config(num_blocks, SIZE, hash_seed=b"unit", **options), backend=backend)


def record(manager: KVCacheManager, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Record the calls of the core from here on, by name."""
    calls: list[str] = []
    core = manager.core
    for name in [each for each in dir(Core) if not each.startswith("_")]:
        if callable(requested := getattr(core, name)):

            def counted(
                *given: Any, _name: str = name, _requested: Any = requested, **options: Any
            ) -> Any:
                calls.append(_name)
                return _requested(*given, **options)

            monkeypatch.setattr(core, name, counted)
    return calls


def decode(manager: KVCacheManager, requests: list[Any]) -> None:
    """Make a step that decodes a token of each request."""
    manager.new_step_starts()
    for request in requests:
        request.all_token_ids.append(7)
        request.num_tokens += 1
        assert manager.allocate_slots(request, 1) is not None
    for request in requests:
        request.num_computed_tokens += 1
    manager.step_ends()


def running(manager: KVCacheManager, count: int) -> list[Any]:
    """Return requests of five tokens, which are computed."""
    manager.new_step_starts()
    requests = [plain(f"r{n}", CountingTokens([n, 2, 3, 4, 5])) for n in range(count)]
    for request in requests:
        assert manager.allocate_slots(request, 5) is not None
        request.num_computed_tokens = 5
    manager.step_ends()
    return requests


def test_tokens_inside_blocks_are_one_call_of_the_core_a_step(
    backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager = make(backend)
    requests = running(manager, 8)
    calls = record(manager, monkeypatch)
    decode(manager, requests)
    assert calls == ["append", "take_batch"]
    decode(manager, requests)
    calls.clear()
    decode(manager, requests)  # blocks are filled
    assert calls == ["append", "take_batch"]
    calls.clear()
    decode(manager, requests)  # blocks begin
    assert calls == [*["append"] * 8, "take_batch"]
    assert manager.core.num_tokens("r7") == 9


def test_a_filled_block_with_its_own_hash_is_three_calls(
    backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager = make(backend)
    request = HashedRequest("r", [1, 2, 3])
    assert manager.allocate_slots(request, 3) is not None
    request.num_computed_tokens = 3
    manager.new_step_starts()
    request.output.append(4)
    calls = record(manager, monkeypatch)
    assert manager.allocate_slots(request, 1) is manager.empty_kv_cache_blocks
    assert manager.core.has_key(1)
    assert calls == ["append", "add_block_hashes", "cache_blocks", "has_key"]
    assert manager.get_computed_blocks(HashedRequest("other", [1, 2, 3, 4, 9]))[1] == 4


@pytest.mark.parametrize("kind", [EngineRequest, HashedRequest])
def test_a_block_that_was_filled_is_findable_for_whoever_asks(
    backend: Backend, kind: type[EngineRequest]
) -> None:
    def filled() -> tuple[KVCacheManager, EngineRequest]:
        manager, request = make(backend), kind("r", [1, 2, 3])
        manager.allocate_slots(request, 3)
        request.num_computed_tokens = 3
        manager.new_step_starts()
        request.output.append(4)
        assert manager.allocate_slots(request, 1) is manager.empty_kv_cache_blocks
        return manager, request

    other = kind("other", [1, 2, 3, 4, 9])
    manager, _ = filled()
    assert manager.get_computed_blocks(other)[1] == 4
    manager, _ = filled()
    assert manager.get_blocks("r").get_unhashed_block_ids() == []
    manager, _ = filled()
    manager.evict_blocks([1])
    assert manager.get_computed_blocks(other)[1] == 0
    manager, request = filled()
    manager.step_ends()
    request.status = "FINISHED_STOPPED"
    manager.free(request)
    assert manager.get_computed_blocks(other)[1] == 4
    assert manager.reset_prefix_cache()


def test_a_token_reads_itself_and_the_one_before(backend: Backend) -> None:
    manager = make(backend)
    (request,) = running(manager, 1)
    for _ in range(9):
        request.all_token_ids.num_read = 0
        decode(manager, [request])
        assert request.all_token_ids.num_read == 2


def num_calls(call: Callable[[], object]) -> int:
    """Count the functions of Python and C that a call runs, including itself."""
    seen: list[str] = []
    sys.setprofile(lambda _frame, event, _what: seen.append(event))
    call()
    sys.setprofile(None)
    return sum(event in ("call", "c_call") for event in seen) - 1  # the last is setprofile


def test_a_token_inside_a_block_takes_few_function_calls(backend: Backend) -> None:
    manager = make(backend)
    requests = running(manager, 3)
    for request in requests:
        request.all_token_ids.append(7)
        request.num_tokens += 1
    manager.new_step_starts()
    taken = [num_calls(partial(manager.allocate_slots, request, 1)) for request in requests]
    assert max(taken) <= MAX_CALLS_INSIDE
    for request in requests:
        request.num_computed_tokens += 1
    manager.step_ends()
    cached = num_calls(partial(manager.cache_blocks, requests[0], 6))
    assert cached <= MAX_CALLS_INSIDE


def test_a_slot_that_a_pin_takes_away_is_an_error_at_the_end_of_the_step(backend: Backend) -> None:
    manager = make(backend, 3)
    (request,) = running(manager, 1)
    manager.core.pin([2])
    request.all_token_ids.append(7)
    request.num_tokens += 1
    assert manager.allocate_slots(request, 1) is manager.empty_kv_cache_blocks
    with pytest.raises(NoSlotLeft, match="'r0'"):
        manager.step_ends()
    assert manager.core.num_computed_tokens("r0") == 5
    manager.core.unpin([2])
    assert manager.allocate_slots(request, 1) is not None


class LooksAlways(KVCacheManager):
    """Allocates as if each token had to be looked at."""

    def append(self, request: Any) -> None:
        del request


class AskedBetween(KVCacheManager):
    """Brings the core up to date after each allocation."""

    def allocate_slots(self, *args: Any, **options: Any) -> Any:
        got = super().allocate_slots(*args, **options)
        assert self.core is not None
        return got


GROUPS = {
    "one": (Group(SIZE),),
    "two": (Group(SIZE), Group(SIZE, kind="mla")),
    "two sizes": (Group(SIZE), Group(2 * SIZE)),
    "window": (Group(SIZE), Group(SIZE, kind="sliding_window", window=6)),
}


def serve(
    manager: KVCacheManager, kind: type[EngineRequest], seed: int, *, late: bool, num_steps: int
) -> list[Any]:
    """Serve random decoding requests; return the results, and the core's state at each step.

    late: a token is known a step after its slot was scheduled.
    """
    dice, number = random.Random(seed), 0
    requests: list[EngineRequest] = []
    due: list[EngineRequest] = []
    seen: list[Any] = []
    for _ in range(num_steps):
        manager.new_step_starts()
        scheduled = []
        for request in list(requests):
            count = 1 if late else request.num_tokens - request.num_computed_tokens
            got = manager.allocate_slots(request, count)
            if got is None or dice.random() < 0.03:
                manager.free(request)
                requests.remove(request)
                continue
            seen.append(got.blocks)
            scheduled.append((request, count))
        if len(requests) < 6:
            number += 1
            prompt = [dice.randrange(2) for _ in range(dice.randrange(3, 14))]
            request = kind(f"{number}", prompt)
            blocks, num_hit = manager.get_computed_blocks(request)
            count = len(prompt) - num_hit
            if manager.allocate_slots(request, count, num_hit, blocks) is not None:
                request.num_computed_tokens = num_hit
                requests.append(request)
                scheduled.append((request, count))
        for request, count in scheduled:
            request.num_computed_tokens += count
        manager.step_ends()
        now = [request for request, _ in scheduled]
        for request in due if late else now:
            if request in requests:
                request.output.append(dice.randrange(2))
                if late:
                    manager.cache_blocks(request, request.num_computed_tokens - 1)
                if dice.random() < 0.05:
                    request.status = "FINISHED_STOPPED"
                    manager.free(request)
                    requests.remove(request)
        due = now
        manager.core.check()
        seen += [manager.core.encode(), list(manager.take_events())]
    return seen


NUM_RUNS = {"rust": (2, 60), "python": (1, 24)}
"""Runs and their steps."""


@pytest.mark.parametrize("late", [False, True], ids=["known", "late"])
@pytest.mark.parametrize("kind", [EngineRequest, HashedRequest])
@pytest.mark.parametrize("groups", GROUPS)
@pytest.mark.parametrize("events", [False, True])
def test_the_short_way_leads_to_the_same(
    backend: Backend, groups: str, kind: type[EngineRequest], late: bool, events: bool
) -> None:
    config = Config(40, groups=GROUPS[groups], hash_seed=b"unit", enable_events=events)
    num_runs, num_steps = NUM_RUNS[backend]
    for seed in range(num_runs):
        ways = [
            serve(way(config, backend=backend), kind, seed, late=late, num_steps=num_steps)
            for way in (KVCacheManager, AskedBetween, LooksAlways)
        ]
        assert ways[0] == ways[1]
        assert ways[0] == ways[2]


class InRuns(KVCacheManager):
    """Schedules a token by `append_within_blocks` wherever that suffices."""

    num_alike = 0

    def allocate_slots(self, request: Any, num_new_tokens: int, *args: Any, **options: Any) -> Any:
        is_plain = num_new_tokens == 1 and not (args or options)
        if is_plain and self.append_within_blocks(iter([request])) is None:
            self.num_alike += 1
            return self.empty_kv_cache_blocks
        return super().allocate_slots(request, num_new_tokens, *args, **options)


@pytest.mark.parametrize("late", [False, True], ids=["known", "late"])
@pytest.mark.parametrize("kind", [EngineRequest, HashedRequest])
@pytest.mark.parametrize("groups", GROUPS)
def test_tokens_scheduled_in_runs_lead_to_the_same(
    backend: Backend, groups: str, kind: type[EngineRequest], late: bool
) -> None:
    config = Config(40, groups=GROUPS[groups], hash_seed=b"unit")
    options: dict[str, Any] = {"backend": backend, "ends_steps": True, "keep_tokens": False}
    num_runs, num_steps = NUM_RUNS[backend]
    for seed in range(num_runs):
        plain_way, runs = KVCacheManager(config, **options), InRuns(config, **options)
        seen = [
            serve(each, kind, seed, late=late, num_steps=num_steps) for each in (plain_way, runs)
        ]
        assert seen[0] == seen[1]
        suffices = kind is HashedRequest and groups != "window"
        assert (runs.num_alike > 0) is suffices


def test_a_run_stops_at_the_request_that_needs_more(backend: Backend) -> None:
    config = Config(60, SIZE, hash_seed=b"unit")
    manager = KVCacheManager(config, backend=backend, keep_tokens=False, ends_steps=True)
    manager.new_step_starts()
    requests = [HashedRequest(f"{n}", list(range(count))) for n, count in enumerate((5, 6, 7, 5))]
    for request in requests:
        assert manager.allocate_slots(request, request.num_tokens) is not None
        request.num_computed_tokens = request.num_tokens
        request.output.append(9)
    manager.new_step_starts()
    left = iter([*requests, HashedRequest("new", [1])])
    assert manager.append_within_blocks(left) is requests[0], "it begins the step"
    assert manager.append(requests[0]) is manager.empty_kv_cache_blocks
    assert manager.append_within_blocks(left) is requests[2], "its token fills a block"
    assert manager.append(requests[2]) is manager.empty_kv_cache_blocks
    rest = manager.append_within_blocks(left)
    assert (rest.request_id, next(left, None)) == ("new", None), "the manager does not know it"
    assert manager.append_within_blocks(iter(requests[3:])) is requests[3], (
        "it has its token of this step"
    )
    assert manager.append_within_blocks(iter([])) is None
    assert [manager.core.num_computed_tokens(each.request_id) for each in requests] == [6, 7, 8, 6]


def test_a_run_that_schedules_nothing_keeps_the_last_refusal(backend: Backend) -> None:
    config = Config(8, SIZE, hash_seed=b"unit")
    manager = KVCacheManager(config, backend=backend, keep_tokens=False, ends_steps=True)
    manager.new_step_starts()
    requests = [HashedRequest("a", list(range(5))), HashedRequest("b", list(range(6)))]
    for request in requests:
        assert manager.allocate_slots(request, request.num_tokens) is not None
        request.num_computed_tokens = request.num_tokens
        request.output.append(9)
    manager.new_step_starts()
    assert manager.append(requests[0]) is manager.empty_kv_cache_blocks
    large = HashedRequest("large", list(range(99 * SIZE)))
    assert manager.allocate_slots(large, large.num_tokens) is None
    refusal = manager.last_refusal
    assert refusal is not None
    assert manager.append_within_blocks(iter([])) is None
    assert manager.append_within_blocks(iter(requests[:1])) is requests[0]
    assert manager.last_refusal is refusal
    assert manager.append_within_blocks(iter(requests[1:])) is None
    assert manager.last_refusal is None
