# SPDX-License-Identifier: Apache-2.0
"""`kvcore.compat` finds the ends of an engine's steps, and handles their batches.

Nine usable blocks of two tokens unless a test says otherwise.
"""

from __future__ import annotations

import pytest

from kvcore import Allocate, Batch, Command, Group, SetTable
from kvcore.compat import CommandsNotKept, KVCacheManager, UnreadCommands, steps
from kvcore.types.errors import HitInOpenBatch
from tests.compat.stories import admit, finish, make, num_found
from tests.compat.worker import EngineRequest
from tests.conftest import Backend


@pytest.fixture
def manager(backend: Backend) -> KVCacheManager:
    """Make a manager with one group."""
    return make(backend)


def schedule(manager: KVCacheManager, name: str, prompt: list[int]) -> EngineRequest:
    """Schedule a prompt; the engine's count stays until the schedule is made."""
    request = EngineRequest(name, prompt)
    assert manager.allocate_slots(request, len(prompt)) is not None
    return request


@pytest.mark.seed("S000-37")
def test_who_is_preempted_in_mid_step_leaves_nothing_findable(manager: KVCacheManager) -> None:
    request = schedule(manager, "r", [1, 2, 3, 4, 5])
    assert num_found(manager, [1, 2, 3]) == 2
    manager.free(request)
    assert num_found(manager, [1, 2, 3]) == 0
    # What it computed in an earlier step stays.
    assert manager.allocate_slots(request, 3) is not None
    request.num_computed_tokens = 3
    manager.new_step_starts()
    assert manager.allocate_slots(request, 2) is not None
    assert num_found(manager, [1, 2, 3, 4, 5]) == 4
    manager.free(request)
    assert num_found(manager, [1, 2, 3, 4, 5]) == 2


@pytest.mark.parametrize("reported", [False, True])
def test_counts_end_a_batch_unless_the_engine_tells(backend: Backend, reported: bool) -> None:
    manager = make(backend, ends_steps=reported)
    request = schedule(manager, "r", [1, 2, 3, 4, 5])
    request.num_computed_tokens = 5
    assert num_found(manager, [1, 2, 3, 4, 5]) == 4
    request.num_computed_tokens = 0
    manager.free(request)  # of the batch that is open still, if nothing but a call ends it
    assert num_found(manager, [1, 2, 3, 4, 5]) == (0 if reported else 4)


def test_who_was_hit_in_mid_step_is_freed_after_who_hit_it(manager: KVCacheManager) -> None:
    first = schedule(manager, "first", [1, 2, 3])
    second = EngineRequest("second", [1, 2, 4])
    blocks, num_hit = manager.get_computed_blocks(second)
    assert manager.allocate_slots(second, 1, num_hit, blocks) is not None
    before = manager.core.encode()
    with pytest.raises(HitInOpenBatch):
        manager.free(first)
    assert manager.core.encode() == before
    manager.free(second)
    manager.free(first)
    assert manager.usage == 0.0


@pytest.mark.parametrize("sign", ["count", "tokens", "another request", "new step", "commands"])
def test_who_is_freed_after_its_step_stays_findable(backend: Backend, sign: str) -> None:
    manager = make(backend, keep_commands=True)
    witness = schedule(manager, "witness", [7, 8, 9])
    request = schedule(manager, "r", [1, 2, 3])
    match sign:
        case "count":
            request.num_computed_tokens = 3
        case "tokens":
            request.output.append(4)
        case "another request":
            witness.num_computed_tokens = 3
        case "new step":
            manager.new_step_starts()
        case "commands":
            manager.take_commands()
    finish(manager, request)
    assert num_found(manager, [1, 2, 3]) == 2


def test_who_left_a_step_does_not_speak_for_it(manager: KVCacheManager) -> None:
    first = schedule(manager, "first", [7, 8, 9])
    second = schedule(manager, "second", [4, 5, 6])
    request = schedule(manager, "r", [1, 2, 3])
    manager.free(first)
    second.num_computed_tokens = 3
    finish(manager, request)
    assert num_found(manager, [1, 2, 3]) == 2


def test_a_count_of_hits_and_external_tokens_is_no_sign(manager: KVCacheManager) -> None:
    first, _ = admit(manager, "first", [1, 2, 3])
    manager.new_step_starts()
    request = EngineRequest("r", [1, 2, 3, 4, 5, 6, 7])
    blocks, num_hit = manager.get_computed_blocks(request)
    assert manager.allocate_slots(request, 2, num_hit, blocks, 0, 3) is not None
    # vLLM's scheduler sets this while it still schedules others.
    request.num_computed_tokens = num_hit + 3
    assert num_found(manager, [1, 2, 3, 4, 5, 6, 0]) == 6
    manager.free(request)
    assert num_found(manager, [1, 2, 3, 4, 5, 6, 0]) == 2
    finish(manager, first)


def test_a_window_is_trimmed_when_the_step_that_sees_it_is_over(backend: Backend) -> None:
    manager = make(backend, groups=(Group(2, kind="sliding_window", window=3),))
    request = schedule(manager, "r", list(range(8)))
    manager.remove_skipped_blocks("r", 8)
    assert 0 not in manager.get_block_ids("r")[0]
    request.num_computed_tokens = 8
    manager.remove_skipped_blocks("r", 8)
    assert manager.get_block_ids("r")[0][:3] == [0, 0, 0]


def commands_of(batches: list[Batch]) -> list[Command]:
    """Return the commands of batches, in order."""
    return [command for batch in batches for command in batch]


def test_a_runtime_gets_every_batch_once_and_in_order(backend: Backend) -> None:
    manager = make(backend, keep_commands=True)
    request, _ = admit(manager, "r", [1, 2, 3])
    first = manager.take_commands()
    assert [batch.number for batch in first] == [0]
    row = manager.core.get_row("r")
    assert commands_of(first) == [
        *(Allocate(1), Allocate(2), SetTable(row, 0, 0, 1), SetTable(row, 0, 1, 2)),
    ]
    assert manager.take_commands() == []
    request.output += [4, 5]
    assert manager.allocate_slots(request, 2) is not None
    manager.new_step_starts()
    request.num_computed_tokens = 5
    finish(manager, request)
    later = manager.take_commands()
    assert [batch.number for batch in later] == [1, 2]
    assert commands_of(later)[0] == Allocate(3)


def test_batches_that_nobody_reads_are_dropped_or_refused(
    backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(steps, "MAX_UNREAD_BATCHES", 2)
    careless = make(backend)
    for number in range(5):
        finish(careless, admit(careless, f"r{number}", [1, 2, 3])[0])
        careless.new_step_starts()
    with pytest.raises(CommandsNotKept, match="keep_commands=True"):
        careless.take_commands()
    kept = make(backend, keep_commands=True)
    for number in range(3):
        kept.new_step_starts()
        admit(kept, f"r{number}", [number])
    before = kept.core.encode()
    with pytest.raises(UnreadCommands, match="2 batches"):
        kept.new_step_starts()
    assert kept.core.encode() == before
    assert [batch.number for batch in kept.take_commands()] == [0, 1, 2]
    kept.new_step_starts()
