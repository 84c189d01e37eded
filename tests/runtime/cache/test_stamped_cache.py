# SPDX-License-Identifier: Apache-2.0
"""The small cache beside a simulated engine finds what is wrong, and nothing if all is right."""

from __future__ import annotations

import pytest
import torch
from kvcore_runtime.cache.errors import (
    GroupsDoNotHoldModel,
    NotSkipped,
    StaleRead,
    TablesDiffer,
    WrongContent,
)
from kvcore_runtime.cache.stamped_cache import MemoryTier, StampedCache

from kvcore import Config, Group, KVCacheManager, Refused, Request
from kvcore.oracle.content_oracle import Pass
from kvcore.replay.applied import Prefix
from kvcore.types.commands import close
from tests.conftest import Backend

TOKENS = [7, 7, 7, 7, 1, 2]


def stamps_of(tokens: list[int]) -> list[int]:
    return list(Prefix().nodes(tokens, len(tokens)))


def make(
    backend: Backend, groups: tuple[Group, ...] = (Group(2),), num_blocks: int = 12
) -> tuple[KVCacheManager, StampedCache]:
    config = Config(num_blocks, groups=groups, num_host_blocks=8, hash_seed=b"stamped")
    manager = KVCacheManager(config, backend=backend)
    return manager, StampedCache(config, max_rows=4, max_len=16, max_tokens=32)


def admit(manager: KVCacheManager, name: str, tokens: list[int]) -> Pass:
    """Schedule a whole prompt after its hit."""
    row = manager.add_request(Request(name, tokens))
    hit = manager.get_computed_blocks(name)
    assert manager.allocate_slots(name, len(tokens) - hit.num_tokens, hit)
    return Pass(
        request_id=name,
        row=row,
        start=hit.num_tokens,
        end=len(tokens),
        nodes=stamps_of(tokens),
    )


@pytest.mark.parametrize(
    "groups",
    [
        pytest.param((Group(2),), id="one group"),
        pytest.param((Group(4), Group(2, kind="sliding_window", window=3)), id="window"),
    ],
)
def test_hits_copies_and_swaps_are_read_as_written(
    backend: Backend, groups: tuple[Group, ...]
) -> None:
    manager, stamped = make(backend, groups, num_blocks=30)
    first = admit(manager, "a", TOKENS)
    stamped.run(manager.take_batch(), [first])
    second = admit(manager, "b", [*TOKENS[:4], 3])
    assert second.start == 4
    child = manager.fork("a", "c")
    manager.append(["a", "c"], [8, 9])
    steps = [second]
    for row, name, token in ((first.row, "a", 8), (child, "c", 9)):
        stamps = stamps_of([*TOKENS, token])
        steps.append(Pass(request_id=name, row=row, start=6, end=7, nodes=stamps))
    stamped.run(manager.take_batch(), steps)
    assert manager.swap_out(["a"])
    stamped.run(manager.take_batch(), [])
    assert manager.swap_in(["a"])
    manager.append(["a"], [4])
    stamps = stamps_of([*TOKENS, 8, 4])
    again = Pass(request_id="a", row=first.row, start=7, end=8, nodes=stamps)
    stamped.run(manager.take_batch(), [again])
    names = {first.row: "a", second.row: "b", child: "c"}
    stamped.check_tables({row: manager.get_block_ids(name) for row, name in names.items()})
    with pytest.raises(TablesDiffer, match="row 0, group 0: the table is"):
        stamped.check_tables({3: ([1],) * len(groups)})


def test_another_content_than_the_tokens_say_is_named(backend: Backend) -> None:
    manager, stamped = make(backend)
    first = admit(manager, "a", TOKENS)
    stamped.run(manager.take_batch(), [first])
    stamped.runtime.cache.blocks.data[2] = stamped.runtime.cache.blocks.data[1]
    manager.append(["a"], [8])
    step = Pass(request_id="a", row=first.row, start=6, end=7, nodes=stamps_of([*TOKENS, 8]))
    message = "step 1, request a: group 0, block 2 does not hold position 2"
    with pytest.raises(WrongContent, match=message):
        stamped.run(manager.take_batch(), [step])


def test_a_slot_that_nothing_wrote_is_named(backend: Backend) -> None:
    manager, stamped = make(backend)
    first = admit(manager, "a", TOKENS)
    stamped.run(manager.take_batch(), [])
    manager.append(["a"], [8])
    step = Pass(request_id="a", row=first.row, start=6, end=7, nodes=stamps_of([*TOKENS, 8]))
    with pytest.raises(StaleRead, match="position 0 of row 0 holds NaN"):
        stamped.run(manager.take_batch(), [step])


def test_blocks_go_to_a_tier_and_come_back_or_fail(backend: Backend) -> None:
    tier = MemoryTier()
    config = Config(12, groups=(Group(2),), hash_seed=b"stamped")
    manager = KVCacheManager(config, backend=backend)
    stamped = StampedCache(config, max_rows=4, max_len=16, max_tokens=32, tier=tier)
    first = admit(manager, "a", TOKENS)
    stamped.run(manager.take_batch(), [first])
    operations = manager.store(manager.get_block_ids("a")[0][:2])
    finished = stamped.run(manager.take_batch(), [])
    assert all(each.done for each in finished)
    assert [each.operation for each in finished] == list(operations)
    keys = manager.get_block_keys("a")[0]
    assert torch.equal(tier.pages[keys[1]], stamped.page(0, stamps_of(TOKENS)[2:4]))
    for operation in operations:
        manager.complete_operation(operation, True)
    manager.free("a")
    manager.remove_request("a")
    assert manager.reset_prefix_cache()
    for failing in (False, True):
        row = manager.add_request(Request("b", TOKENS))
        loads = manager.load("b", 4)
        assert not isinstance(loads, Refused)
        if failing:
            tier.failing.add(keys[1])
        for each in stamped.run(manager.take_batch(), []):
            manager.complete_operation(each.operation, each.done)
        start = manager.num_computed_tokens("b")
        assert (len(loads), start) == (2, 2 if failing else 4)
        assert manager.allocate_slots("b", 6 - start)
        stamps = stamps_of(TOKENS)
        step = Pass(request_id="b", row=row, start=start, end=6, nodes=stamps)
        stamped.run(manager.take_batch(), [step])
        manager.free("b")
        manager.remove_request("b")
        assert manager.reset_prefix_cache()


def test_batches_are_skipped_only_forward() -> None:
    config = Config(4)
    stamped = StampedCache(config, max_rows=1, max_len=16, max_tokens=16)
    stamped.skip(3)
    stamped.apply(close(3, ()))
    with pytest.raises(NotSkipped, match="batch 2 cannot be the next one, 4 is"):
        stamped.skip(2)


def test_stamps_tell_histories_apart() -> None:
    assert stamps_of([1, 2, 3])[:2] == stamps_of([1, 2])
    assert stamps_of([1, 2])[1] != stamps_of([2, 2])[1]
    growing = Prefix()
    assert growing.nodes([1, 2, 3], 2)[0] == growing.nodes([1, 2, 3], 3)[0]
    assert list(growing.nodes([1, 2, 3], 3)) == stamps_of([1, 2, 3])


def test_states_hold_no_stamps() -> None:
    config = Config(12, groups=(Group(2), Group(2, kind="state")))
    with pytest.raises(GroupsDoNotHoldModel, match="which states do not hold"):
        StampedCache(config, max_rows=4, max_len=16, max_tokens=32)
