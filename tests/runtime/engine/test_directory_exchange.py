# SPDX-License-Identifier: Apache-2.0
"""A directory exchange between two batches: what was written, was cancelled, or is on its way."""

from pathlib import Path

import pytest
from kvcore_runtime.engine.sequence import Sequence

from kvcore import Group
from kvcore.types.commands import Store
from tests.conftest import Backend
from tests.runtime.engine.desk import PAGE, Desk


@pytest.fixture
def desk(backend: Backend, tmp_path: Path) -> Desk:
    return Desk(backend, tmp_path)


def stored(desk: Desk, sequence: Sequence) -> list[bool]:
    return [key in desk.tier for key in desk.keys(sequence)]


def test_a_block_is_stored_once_for_a_sequence(desk: Desk) -> None:
    first = desk.sequence("a", 9)
    desk.compute(first)
    desk.exchange.prompt_computed(first)
    number = desk.take()
    desk.exchange.finished(first)
    assert len(desk.batches[number]) == 2
    assert len(desk.batches[desk.take()]) == 0
    desk.run(number)
    assert desk.exchange.is_busy
    assert desk.exchange.poll() == []
    assert not desk.exchange.is_busy
    assert (desk.exchange.num_stored, desk.exchange.num_written) == (2, 2)
    assert stored(desk, first) == [True, True]
    desk.end(first)


def test_what_a_cancelled_batch_was_to_store_is_stored_at_the_end(desk: Desk) -> None:
    first = desk.sequence("a", 9)
    desk.compute(first)
    desk.exchange.prompt_computed(first)
    number = desk.take()
    assert desk.cancel(number) == []
    assert not desk.exchange.is_busy
    assert stored(desk, first) == [False, False]
    desk.exchange.finished(first)
    desk.run(desk.take())
    desk.exchange.poll()
    assert stored(desk, first) == [True, True]
    assert desk.exchange.num_stored == 2
    desk.end(first)


def test_a_cancel_leaves_the_stores_of_earlier_batches_alone(desk: Desk) -> None:
    first = desk.sequence("a", 9)
    desk.compute(first)
    desk.exchange.prompt_computed(first)
    earlier, later = desk.take(), desk.take()
    assert desk.cancel(later) == []
    assert desk.exchange.is_busy
    desk.run(earlier)
    desk.exchange.poll()
    assert desk.exchange.num_stored == 2
    desk.end(first)


def test_a_cancel_takes_back_what_the_open_batch_was_to_store(desk: Desk) -> None:
    """The engine cancels the oldest batch in flight; the one that is being planned goes too."""
    first = desk.sequence("a", 9)
    desk.compute(first)
    number = desk.take()
    desk.exchange.prompt_computed(first)
    desk.cancel(number)
    assert not desk.exchange.is_busy
    desk.end(first)


def load_all(desk: Desk, *, num_tokens: int = 9) -> Sequence:
    """A sequence whose blocks are all in the directory, and begin to come in the open batch."""
    sequence = desk.sequence("loads", num_tokens)
    for key in desk.keys(sequence):
        desk.tier.store(key, PAGE)
    assert desk.begin(sequence) == 8
    return sequence


def test_a_load_ends_when_all_its_blocks_have_come(desk: Desk) -> None:
    sequence = load_all(desk)
    desk.run(desk.take(), told=1)
    assert desk.exchange.poll() == []
    assert desk.exchange.is_busy
    desk.tell_rest()
    assert desk.exchange.poll() == [sequence]
    assert desk.exchange.num_loaded == 2
    assert desk.manager.num_computed_tokens("loads") == 8
    assert not desk.exchange.is_busy
    desk.end(sequence)


def test_a_load_that_was_cancelled_before_it_ran_is_begun_anew(desk: Desk) -> None:
    sequence = load_all(desk)
    assert desk.cancel(desk.take()) == [sequence]
    assert not desk.exchange.is_busy
    assert desk.begin(sequence) == 8
    desk.run(desk.take())
    assert desk.exchange.poll() == [sequence]
    assert desk.manager.num_computed_tokens("loads") == 8
    desk.end(sequence)


def test_a_load_that_ran_and_was_cancelled_is_ended_once_and_begun_anew(desk: Desk) -> None:
    sequence = load_all(desk)
    number = desk.take()
    desk.run(number, told=1)
    assert desk.cancel(number) == [sequence]
    assert desk.exchange.is_busy, "one operation has ended, and is to be heard of"
    assert desk.exchange.poll() == [], "the sequence does not wait for it"
    assert not desk.exchange.is_busy
    assert desk.begin(sequence) == 8
    desk.run(desk.take())
    assert desk.exchange.poll() == [sequence]
    desk.end(sequence)


def test_a_cancel_leaves_the_loads_of_earlier_batches_alone(desk: Desk) -> None:
    sequence = load_all(desk)
    earlier, later = desk.take(), desk.take()
    assert desk.cancel(later) == []
    desk.run(earlier)
    assert desk.exchange.poll() == [sequence]
    desk.end(sequence)


def test_a_load_that_failed_is_told_and_not_tried_again(desk: Desk) -> None:
    sequence = load_all(desk)
    number = desk.take()
    second = desk.keys(sequence)[1]
    desk.tier.file(second).unlink()
    desk.run(number)
    assert desk.exchange.poll() == [sequence]
    assert [each.fields["key"] for each in desk.exchange.errors] == [second.hex()]
    assert desk.exchange.num_loaded == 1
    assert desk.manager.num_computed_tokens("loads") == 4
    desk.tier.store(second, PAGE)
    desk.manager.complete(number)
    desk.manager.free("loads")
    assert desk.begin(sequence) == 0
    desk.end(sequence)
    # Another sequence of that name is another one.
    again = desk.sequence("loads", 9)
    assert desk.begin(again) == 4
    desk.run(desk.take())
    assert desk.exchange.poll() == [again]
    desk.end(again)


def test_who_is_forgotten_while_it_loads_is_not_heard_of_again(desk: Desk) -> None:
    sequence = load_all(desk)
    number = desk.take()
    desk.exchange.forget(sequence)
    desk.manager.free("loads")
    desk.manager.remove_request("loads")
    assert desk.exchange.is_busy
    desk.run(number)
    assert desk.exchange.poll() == []
    assert not desk.exchange.is_busy
    desk.end()


def test_a_store_that_failed_is_told_and_not_counted(desk: Desk) -> None:
    first = desk.sequence("a", 9)
    desk.compute(first)
    desk.exchange.prompt_computed(first)
    number = desk.take()
    desk.tier.file(desk.keys(first)[1]).mkdir()
    desk.run(number)
    desk.exchange.poll()
    assert (desk.exchange.num_stored, desk.exchange.num_written) == (1, 1)
    assert len(desk.exchange.errors) == 1
    desk.end(first)


def test_what_is_being_written_has_not_come(backend: Backend, tmp_path: Path) -> None:
    """Whether the executor has written it or not, so that no run depends on time.

    With EAGLE the last block that is cached is computed anew, unless the directory has it.
    """
    desk = Desk(backend, tmp_path, use_eagle=True)
    first = desk.sequence("a", 13)
    desk.compute(first)
    desk.exchange.prompt_computed(first)
    number = desk.take()
    second = desk.sequence("b", 13)
    assert desk.manager.get_computed_blocks("b").num_tokens == 8
    assert desk.begin(second) == 0, "nothing is written yet"
    desk.run(number, told=2)
    assert stored(desk, first) == [True, True, True]
    desk.tier.file(desk.keys(first)[0]).unlink()  # It is hit, so nobody needs the file.
    assert desk.begin(second) == 0, "all is written, and nobody was told"
    desk.exchange.poll()
    assert desk.begin(second) == 0, "the third block is not told of"
    desk.tell_rest()
    desk.exchange.poll()
    assert desk.begin(second) == 4
    desk.run(desk.take())
    assert desk.exchange.poll() == [second]
    assert desk.manager.num_computed_tokens("b") == 12
    desk.end(first, second)


def test_a_block_that_was_being_written_when_its_batch_was_cancelled_may_be_there(
    backend: Backend, tmp_path: Path
) -> None:
    """What ran is in the directory, and what a cancelled batch wrote was computed before it."""
    desk = Desk(backend, tmp_path, use_eagle=True)
    first = desk.sequence("a", 13)
    desk.compute(first)
    desk.exchange.prompt_computed(first)
    number = desk.take()
    desk.run(number)
    assert desk.cancel(number) == []
    assert desk.exchange.is_busy
    second = desk.sequence("b", 13)
    assert desk.begin(second) == 0
    desk.exchange.poll()
    assert desk.exchange.num_stored == 3
    assert desk.begin(second) == 4
    desk.cancel(desk.take())
    desk.end(first, second)


def test_what_is_not_published_yet_is_stored_later(backend: Backend, tmp_path: Path) -> None:
    desk = Desk(backend, tmp_path, publish="completed")
    first = desk.sequence("a", 9)
    assert desk.manager.allocate_slots("a", 9)
    number = desk.take()
    desk.exchange.prompt_computed(first)
    assert not desk.exchange.is_busy
    desk.manager.complete(number)
    desk.exchange.finished(first)
    desk.run(desk.take())
    desk.exchange.poll()
    assert stored(desk, first) == [True, True]
    desk.end(first)


def test_a_later_sequence_of_the_same_name_stores_its_own_blocks(desk: Desk) -> None:
    for tokens in (9, 13):
        sequence = desk.sequence("a", tokens)
        hit = desk.manager.get_computed_blocks("a")
        assert desk.manager.allocate_slots("a", tokens - hit.num_tokens, hit)
        desk.manager.complete(desk.take())
        desk.exchange.prompt_computed(sequence)
        number = desk.take()
        assert (
            len([each for each in desk.batches[number] if isinstance(each, Store)]) == tokens // 4
        )
        desk.run(number)
        desk.exchange.poll()
        desk.end(sequence)


def test_a_token_is_left_to_compute(desk: Desk) -> None:
    sequence = desk.sequence("a", 8)
    for key in desk.keys(sequence):
        desk.tier.store(key, PAGE)
    assert desk.begin(sequence) == 4
    desk.run(desk.take())
    assert desk.exchange.poll() == [sequence]
    desk.end(sequence)


def test_a_load_ends_where_blocks_of_all_groups_end(backend: Backend, tmp_path: Path) -> None:
    """Blocks of four and of eight tokens: without the fourth small one, half of a large one is of
    no use."""
    desk = Desk(backend, tmp_path, groups=(Group(4), Group(8)))
    sequence = desk.sequence("a", 17)
    small, large = desk.manager.get_block_keys("a")
    for key in (*small[:3], *large):
        desk.tier.store(key, PAGE)
    assert desk.begin(sequence) == 8
    desk.run(desk.take())
    assert desk.exchange.poll() == [sequence]
    desk.end(sequence)


@pytest.mark.parametrize(("held", "expected"), [((3,), 16), ((2,), 12), ((0, 1), 8), ((), 0)])
def test_behind_a_window_no_block_is_needed(
    backend: Backend, tmp_path: Path, held: tuple[int, ...], expected: int
) -> None:
    """A query at token 16 sees tokens 13 and later: the fourth block, whatever else is there."""
    groups = (Group(4), Group(4, kind="sliding_window", window=4))
    desk = Desk(backend, tmp_path, groups=groups)
    sequence = desk.sequence("a", 17)
    full, windowed = desk.manager.get_block_keys("a")
    for key in (*full, *(windowed[position] for position in held)):
        desk.tier.store(key, PAGE)
    assert desk.begin(sequence) == expected
    if expected:
        desk.run(desk.take())
        assert desk.exchange.poll() == [sequence]
        assert desk.manager.num_computed_tokens("a") == expected
    desk.end(sequence)


def test_what_lies_behind_a_window_is_not_stored(backend: Backend, tmp_path: Path) -> None:
    groups = (Group(4), Group(4, kind="sliding_window", window=4))
    desk = Desk(backend, tmp_path, groups=groups)
    sequence = desk.sequence("a", 17)
    for num_tokens in (12, 5):
        assert desk.manager.allocate_slots("a", num_tokens)
        desk.manager.complete(desk.take())
    tables = desk.manager.get_block_ids("a")
    num_behind = tables[1].count(0)
    assert num_behind > 0
    desk.exchange.prompt_computed(sequence)
    number = desk.take()
    num_stored = len([each for each in desk.batches[number] if isinstance(each, Store)])
    assert num_stored == 4 + 4 - num_behind
    desk.run(number)
    desk.exchange.poll()
    desk.end(sequence)
