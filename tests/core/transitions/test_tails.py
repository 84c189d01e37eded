# SPDX-License-Identifier: Apache-2.0
"""Hits inside blocks on paper: blocks of four tokens with keys at each multiple of two.

The expected values follow from docs/engines.md, "Hits inside blocks". Tokens are numbers from 0.
"""

from __future__ import annotations

from typing import Any

import pytest

from kvcore import BlockStored, Evict, Group, KVCacheManager, Request
from kvcore.codec.decode import decode
from kvcore.codec.encode import encode
from kvcore.types.commands import Allocate, CopyOnWrite, Free, SetTable, Zero
from tests.conftest import Backend
from tests.helpers.stories import add, admit, blocks, drop, keyed, make, owners, serve, step

PROMPT = [0, 1, 2, 3, 4, 5]
"""Block 1 has a tail key at 2, and block 2 one at 6."""


def tailed(backend: Backend, num_blocks: int = 13, **options: Any) -> KVCacheManager:
    """Make a manager of twelve usable blocks of four tokens whose hits end at multiples of two."""
    options.setdefault("groups", (Group(4),))
    options.setdefault("hash_block_size", 2)
    return make(backend, num_blocks, **options)


@pytest.fixture
def manager(backend: Backend) -> KVCacheManager:
    """Let "a" have computed the prompt and one token more, in blocks 1 and 2."""
    made = tailed(backend)
    serve(made, "a", [*PROMPT, 6])
    step(made)
    return made


def tails(manager: KVCacheManager, block: int) -> int:
    """Count the tail keys of a block."""
    held = manager.state().device.tails
    return len(held.keys(block)) if held else 0


def hit(manager: KVCacheManager, tokens: list[int]) -> int:
    """Return how many tokens a new request with these tokens, and one more, would hit."""
    add(manager, "probe", [*tokens, 999])
    found = manager.get_computed_blocks("probe").num_tokens
    manager.remove_request("probe")
    return found


def copies(commands: list[Any]) -> list[Any]:
    """Return the copies among commands."""
    return [each for each in commands if isinstance(each, CopyOnWrite)]


def test_attention_and_state_resume_inside_their_blocks(backend: Backend) -> None:
    core = tailed(backend, groups=(Group(4), Group(4, kind="state")))
    add(core, "r1", range(11))
    assert core.checkpoint_stop("r1", 11) == (10, True)
    core.allocate_slots("r1", 10, checkpoint=True)
    assert core.get_block_ids("r1") == ([1, 2, 3], [0, 0, 4])
    assert Zero(4) in step(core)
    assert [tails(core, block) for block in (1, 2, 3, 4)] == [1, 1, 1, 0]
    core.allocate_slots("r1", 1)
    assert step(core) == [
        *(Allocate(5), CopyOnWrite(4, 5), SetTable(0, 1, 2, 5), Free(4, cached=True)),
    ]

    add(core, "r2", [*range(10), 20, 21, 22])
    found = core.get_computed_blocks("r2")
    assert (found.num_tokens, found.blocks.blocks) == (10, ((1, 2, 3), (0, 0, 4)))
    core.allocate_slots("r2", 2, found)
    assert copies(step(core)) == [CopyOnWrite(3, 6), CopyOnWrite(4, 7)]
    core.allocate_slots("r2", 1)
    assert core.get_block_ids("r2") == ([1, 2, 6, 8], [0, 0, 7, 9])
    assert copies(step(core)) == [CopyOnWrite(7, 9)]
    core.add_tokens("r2", [23])
    core.allocate_slots("r2", 1)
    assert Free(7, cached=True) in step(core)


def test_a_part_is_findable_when_its_batch_is_taken(backend: Backend) -> None:
    manager = tailed(backend)
    serve(manager, "a", [*PROMPT, 6])
    assert (keyed(manager), hit(manager, PROMPT)) == ([1], 4)
    step(manager)
    assert hit(manager, PROMPT) == 6
    assert (tails(manager, 1), tails(manager, 2)) == (1, 1)


def test_a_part_is_findable_when_its_batch_is_completed(backend: Backend) -> None:
    manager = tailed(backend, max_in_flight=1, publish="completed")
    serve(manager, "a", [*PROMPT, 6])
    number = manager.take_batch().number
    assert hit(manager, PROMPT) == 0
    manager.complete(number)
    assert hit(manager, PROMPT) == 6


def test_a_part_whose_last_token_comes_later_is_findable_once_it_is_known(
    backend: Backend,
) -> None:
    manager = tailed(backend, max_in_flight=1)
    serve(manager, "a", PROMPT[:5])
    first = manager.take_batch().number
    manager.append(["a"])
    manager.complete(first)
    second = manager.take_batch().number
    assert hit(manager, PROMPT) == 4
    manager.add_tokens("a", [5], batch=first)
    assert hit(manager, PROMPT) == 6
    manager.complete(second)


def test_delayed_parts_wait_for_the_engine(backend: Backend) -> None:
    manager = tailed(backend)
    add(manager, "a", [*PROMPT, 6])
    manager.allocate_slots("a", 7, delay_cache_blocks=True)
    step(manager)
    assert hit(manager, PROMPT) == 0
    manager.cache_blocks("a", 3)
    assert hit(manager, PROMPT) == 2
    manager.cache_blocks("a", 6)
    assert hit(manager, PROMPT) == 6


def test_the_part_that_another_request_holds_is_copied(manager: KVCacheManager) -> None:
    add(manager, "b", [*PROMPT, 90])
    found = manager.get_computed_blocks("b")
    assert (found.num_tokens, found.blocks.blocks) == (6, ((1, 2),))
    manager.allocate_slots("b", 1, found)
    assert (blocks(manager, "a"), blocks(manager, "b")) == ([1, 2], [1, 3])
    assert copies(step(manager)) == [CopyOnWrite(2, 3)]
    assert (owners(manager, 1), owners(manager, 2), owners(manager, 3)) == (2, 1, 1)


def test_a_part_that_nobody_holds_is_written_in_place_behind_its_keys(
    manager: KVCacheManager,
) -> None:
    drop(manager, "a")
    assert serve(manager, "b", [*PROMPT, 90]) == [1, 2]
    assert copies(step(manager)) == []
    assert (hit(manager, PROMPT), tails(manager, 2)) == (6, 1)


def full_and_free(backend: Backend, num_blocks: int) -> KVCacheManager:
    """Leave eight tokens in blocks 1 and 2, which nobody holds and which have four keys."""
    manager = tailed(backend, num_blocks)
    serve(manager, "a", range(8))
    step(manager)
    drop(manager, "a")
    return manager


def test_a_block_is_copied_for_the_keys_behind_the_hit(backend: Backend) -> None:
    manager = full_and_free(backend, 4)
    assert serve(manager, "b", [*PROMPT, 90]) == [1, 3]
    assert copies(step(manager)) == [CopyOnWrite(2, 3)]
    assert hit(manager, list(range(8))) == 8


def test_a_copy_that_does_not_fit_is_given_up_with_the_keys_behind_the_hit(
    backend: Backend,
) -> None:
    manager = full_and_free(backend, 3)
    add(manager, "b", [*PROMPT, 90])
    found = manager.get_computed_blocks("b")
    assert manager.can_allocate("b", 1, found).name == "OK"
    assert admit(manager, "b") == [1, 2]
    commands = step(manager)
    assert copies(commands) == []
    assert [each.block for each in commands if isinstance(each, Evict)] == [2]
    assert (keyed(manager), tails(manager, 2)) == ([1], 1)
    assert hit(manager, list(range(8))) == 6


def test_a_fork_copies_the_part_and_the_first_block_keeps_its_keys(
    manager: KVCacheManager,
) -> None:
    manager.fork("a", "child")
    manager.append(["child"], [90])
    assert copies(step(manager)) == [CopyOnWrite(2, 3)]
    assert (blocks(manager, "a"), blocks(manager, "child")) == ([1, 2], [1, 3])
    assert hit(manager, [*PROMPT, 6, 90]) == 8
    manager.append(["a"], [7])
    assert copies(step(manager)) == []
    assert hit(manager, list(range(8))) == 8


def test_what_was_swapped_has_tail_keys_only_where_its_blocks_stayed_cached(
    backend: Backend,
) -> None:
    manager = tailed(backend, num_host_blocks=4)
    serve(manager, "a", [*PROMPT, 6])
    step(manager)
    manager.swap_out(["a"])
    step(manager)
    assert hit(manager, PROMPT) == 6
    manager.evict_blocks([1, 2])
    assert hit(manager, PROMPT) == 0
    manager.swap_in(["a"])
    step(manager)
    manager.check()
    assert hit(manager, PROMPT) == 0
    manager.append(["a"], [7])
    step(manager)
    assert hit(manager, list(range(8))) == 8


def test_the_same_tokens_behind_a_cut_keep_the_keys(manager: KVCacheManager) -> None:
    manager.truncate("a", 5)
    assert hit(manager, PROMPT) == 6
    manager.append(["a"], [5])
    assert copies(step(manager)) == []
    assert (blocks(manager, "a"), hit(manager, PROMPT)) == ([1, 2], 6)


def test_other_tokens_behind_a_cut_are_written_into_a_copy(manager: KVCacheManager) -> None:
    manager.truncate("a", 5)
    manager.append(["a"], [90])
    assert copies(step(manager)) == [CopyOnWrite(2, 3)]
    assert (blocks(manager, "a"), owners(manager, 2)) == ([1, 3], 0)
    assert (hit(manager, PROMPT), hit(manager, [*PROMPT[:5], 90])) == (6, 6)


def test_other_tokens_behind_a_cut_end_the_keys_if_the_pool_is_full(backend: Backend) -> None:
    manager = tailed(backend, 3)
    serve(manager, "a", [*PROMPT, 6])
    step(manager)
    manager.truncate("a", 5)
    manager.append(["a"], [90])
    assert copies(step(manager)) == []
    assert (hit(manager, PROMPT), hit(manager, [*PROMPT[:5], 90])) == (4, 6)


def test_a_rewind_withdraws_the_keys_behind_the_count(backend: Backend) -> None:
    manager = tailed(backend, groups=(Group(8),))
    serve(manager, "a", range(8))
    step(manager)
    assert (keyed(manager), tails(manager, 1)) == ([1], 3)
    manager.rewind(["a"], 5)
    assert (keyed(manager), tails(manager, 1)) == ([], 2)
    assert hit(manager, list(range(8))) == 4
    manager.allocate_slots("a", 3)
    step(manager)
    assert hit(manager, list(range(8))) == 8


def test_a_cancel_withdraws_what_its_batches_gave_and_no_more(backend: Backend) -> None:
    manager = tailed(backend, max_in_flight=2)
    add(manager, "a", range(8))
    manager.allocate_slots("a", 2)
    first = manager.take_batch().number
    manager.allocate_slots("a", 4)
    second = manager.take_batch().number
    assert hit(manager, PROMPT) == 6
    manager.cancel(second)
    assert hit(manager, PROMPT) == 2
    manager.complete(first)
    manager.check()


def test_a_request_that_leaves_the_open_batch_leaves_no_tail_keys(backend: Backend) -> None:
    manager = tailed(backend)
    add(manager, "a", range(8))
    manager.allocate_slots("a", 2)
    step(manager)
    manager.allocate_slots("a", 4)
    manager.free("a")
    step(manager)
    assert hit(manager, PROMPT) == 2


def test_a_window_needs_only_the_part_and_the_blocks_that_the_next_query_sees(
    backend: Backend,
) -> None:
    window = Group(4, kind="sliding_window", window=3)
    manager = tailed(backend, groups=(Group(4), window))
    add(manager, "a", range(11))
    manager.allocate_slots("a", 10)
    step(manager)
    assert manager.get_block_ids("a") == ([1, 2, 3], [4, 5, 6])
    manager.evict_blocks([4, 5])
    add(manager, "b", [*range(10), 90, 91])
    # The query at 10 sees 8, 9 and itself: block 6 alone.
    found = manager.get_computed_blocks("b")
    assert (found.num_tokens, found.blocks.blocks) == (10, ((1, 2, 3), (0, 0, 6)))
    manager.allocate_slots("b", 2, found)
    assert copies(step(manager)) == [CopyOnWrite(3, 7), CopyOnWrite(6, 8)]
    manager.evict_blocks([6])
    assert hit(manager, list(range(10))) == 10  # its copy has the same key
    manager.evict_blocks([8])
    assert hit(manager, list(range(10))) == 0


def test_a_drafter_drops_two_tokens_and_not_a_block(backend: Backend) -> None:
    manager = tailed(backend, use_eagle=True)
    serve(manager, "a", [*PROMPT, 6])
    step(manager)
    # The parts at 4 and 6 are found, so a hit ends at 4; nothing is found at 8.
    assert hit(manager, list(range(8))) == 4
    assert hit(manager, PROMPT[:4]) == 2


def test_groups_of_different_blocks_agree_on_a_multiple_of_the_hashed_tokens(
    backend: Backend,
) -> None:
    manager = tailed(backend, groups=(Group(4), Group(8)))
    serve(manager, "a", [*range(10), 10])
    step(manager)
    assert manager.get_block_ids("a") == ([1, 2, 3], [4, 5])
    assert [tails(manager, block) for block in (1, 2, 3, 4, 5)] == [1, 1, 1, 3, 1]
    add(manager, "b", [*range(6), 90])
    found = manager.get_computed_blocks("b")
    assert (found.num_tokens, found.blocks.blocks) == (6, ((1, 2), (4,)))
    manager.evict_blocks([2])
    # Group 0 has block 1 to its end, and block 4 has a tail key there.
    assert manager.get_computed_blocks("b").num_tokens == 4


def test_merged_blocks_keep_the_keys_of_the_older_one(backend: Backend) -> None:
    manager = tailed(backend, duplicates="merge")
    for name in ("a", "b"):
        add(manager, name, range(6))
        manager.allocate_slots(name, 6)
    step(manager)
    step(manager)
    assert blocks(manager, "a")[0] == blocks(manager, "b")[0] == 1
    assert (tails(manager, 1), hit(manager, PROMPT)) == (1, 6)
    # A part is not merged, and the second block with it gets no second key.
    assert [tails(manager, blocks(manager, name)[1]) for name in ("a", "b")] == [1, 0]


def test_new_weights_leave_no_part_findable(manager: KVCacheManager) -> None:
    manager.advance_epoch()
    assert hit(manager, PROMPT) == 0
    manager.append(["a"], [7])
    step(manager)
    assert hit(manager, list(range(8))) == 0
    manager.free("a")
    admit(manager, "a")
    step(manager)
    assert hit(manager, PROMPT) == 6


def test_a_pin_of_a_prefix_may_end_inside_a_block(backend: Backend) -> None:
    manager = tailed(backend, 9, max_model_len=16, max_pinned_blocks=4)
    serve(manager, "a", [*PROMPT, 6])
    step(manager)
    assert manager.pin_prefix("system", "a", 7) == 6
    drop(manager, "a")
    assert (owners(manager, 1), owners(manager, 2)) == (1, 1)
    serve(manager, "other", range(50, 66))  # four blocks
    step(manager)
    assert hit(manager, PROMPT) == 6
    manager.unpin_prefix("system")
    assert (owners(manager, 1), owners(manager, 2)) == (0, 0)


def test_canonical_bytes_hold_the_tail_keys(manager: KVCacheManager) -> None:
    serve(manager, "b", [*PROMPT, 90])
    add(manager, "c", range(70, 75))
    manager.allocate_slots("c", 5, delay_cache_blocks=True)
    copy = decode(manager.encode())
    assert encode(copy) == manager.encode()
    assert (copy.config, copy.device.tails) == (manager.config, manager.state().device.tails)
    assert copy.batch.delayed == {"c"}


def test_the_default_given_as_a_number_adds_no_byte(backend: Backend) -> None:
    pair = [make(backend, groups=(Group(4),), hash_block_size=unit) for unit in (None, 4)]
    for manager in pair:
        serve(manager, "a", [*PROMPT, 6])
        step(manager)
    assert pair[0].encode() == pair[1].encode()
    assert pair[0].config == pair[1].config
    assert pair[1].config != tailed(backend, 10).config


def test_events_name_whole_blocks_only(backend: Backend) -> None:
    manager = tailed(backend, enable_events=True)
    serve(manager, "a", [*PROMPT, 6])
    step(manager)
    (event,) = manager.take_events()
    assert isinstance(event, BlockStored)
    assert event.tokens == (0, 1, 2, 3)
    manager.evict_blocks([2])
    assert list(manager.take_events()) == []


def test_external_tokens_behind_a_part_are_written_into_its_copy(manager: KVCacheManager) -> None:
    manager.add_request(Request("b", [*PROMPT, *range(90, 96)]))
    found = manager.get_computed_blocks("b")
    manager.allocate_slots("b", 1, found, num_external_computed_tokens=4)
    assert blocks(manager, "b") == [1, 3, 4]
    assert copies(step(manager)) == [CopyOnWrite(2, 3)]
    assert manager.num_computed_tokens("b") == 11
