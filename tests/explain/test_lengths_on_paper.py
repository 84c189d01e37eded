# SPDX-License-Identifier: Apache-2.0
"""Each cause once, on a pool that a reader can follow: blocks of 4 tokens, letters for contents."""

from __future__ import annotations

from typing import Any

import pytest

from kvcore import Config, Group, KVCacheManager, LoRA, Request
from kvcore.explain.explanation import Explanation
from kvcore.explain.observed import observed
from kvcore.explain.observer import AdmissionObserver
from kvcore.types.values import Refused
from tests.explain.watched import check

A, B, C = ([10 * n + place for place in range(4)] for n in (1, 2, 3))


class Engine:
    """Runs whole prompts, one per step, and keeps what was explained."""

    def __init__(self, num_blocks: int = 9, **options: Any) -> None:
        self.explained: list[Explanation] = []
        options.setdefault("groups", (Group(4),))
        real = KVCacheManager(Config(num_blocks, **options), "python")
        self.manager = observed(real, AdmissionObserver(real, self.explained.append))

    def run(self, name: str, tokens: list[int], *, stays: bool = False, **options: Any) -> None:
        self.manager.add_request(Request(name, tokens, **options))
        self.admit(name, len(tokens))
        if not stays:
            self.manager.free(name)

    def admit(self, name: str, num_tokens: int, **options: Any) -> None:
        hit = self.manager.get_computed_blocks(name)
        new = num_tokens - hit.num_tokens - options.get("num_external_computed_tokens", 0)
        got = self.manager.allocate_slots(name, new, hit, **options)
        assert not isinstance(got, Refused)
        self.manager.take_batch()

    def decode(self, name: str, *tokens: int) -> None:
        for token in tokens:
            self.manager.append([name], [token])
            self.manager.take_batch()

    def causes(self) -> list[tuple[int, int, str]]:
        """Return the spans of the newest admission."""
        check(self.explained[-1])
        return [(span.start, span.end, span.cause) for span in self.explained[-1].spans]


def test_what_nobody_had_is_seen_for_the_first_time() -> None:
    engine = Engine()
    engine.run("a", A + B)
    newest = engine.explained[-1]
    assert (newest.ideal, newest.hits, newest.spans, newest.nearest) == (0, 0, (), None)


def test_a_last_token_and_a_partial_block_are_computed_again() -> None:
    engine = Engine()
    engine.run("a", A + B)
    engine.run("b", A + B)
    assert engine.causes() == [(4, 8, "last_token")]
    engine.run("c", A + B[:2] + C)
    assert engine.causes() == [(4, 6, "partial_block")]


def test_the_request_that_took_a_block_is_named_with_its_call() -> None:
    engine = Engine(4)
    engine.run("a", A + B)
    for _ in range(5):
        engine.manager.take_batch()
    engine.run("taker", C + C)
    engine.run("b", A + B + C)
    assert engine.causes() == [(4, 8, "evicted")]
    gone = engine.explained[-1].spans[0].removal
    assert gone is not None
    assert (gone.request, gone.kind, gone.idle_steps) == ("taker", "prompt", 5)


def test_a_decode_takes_blocks_as_a_decode() -> None:
    engine = Engine(4)
    engine.run("a", A + B)
    engine.run("taker", C, stays=True)
    engine.decode("taker", *A, *A)
    engine.manager.free("taker")
    engine.run("b", A + B + C)
    assert engine.causes() == [(0, 4, "evicted"), (4, 8, "evicted")]
    kinds = [span.removal.kind for span in engine.explained[-1].spans if span.removal]
    assert kinds == ["decode", "decode"]


def test_an_adapter_divides_what_is_equal() -> None:
    engine = Engine()
    engine.run("a", A + B)
    engine.run("b", A + B, lora=LoRA("tuned"))
    assert engine.causes() == [(0, 8, "namespace")]
    engine.run("c", A + C, lora=LoRA("tuned"))
    assert engine.causes() == []
    assert engine.explained[-1].hits == 4


def test_what_waits_before_is_known_and_not_computed() -> None:
    engine = Engine()
    engine.manager.add_request(Request("first", A + B))
    engine.run("second", A + B)
    assert engine.causes() == [(0, 8, "not_computed")]
    engine.admit("first", 8)
    assert engine.causes() == [(4, 8, "last_token")]


def test_keys_that_were_taken_back_are_withdrawn() -> None:
    engine = Engine()
    engine.run("a", A + B)
    assert engine.manager.reset_prefix_cache()
    engine.run("b", A + B + C)
    assert engine.causes() == [(0, 8, "withdrawn")]
    (span,) = engine.explained[-1].spans
    assert span.removal is not None
    assert span.removal.kind == "reset_prefix_cache"


def test_what_other_weights_computed_is_of_an_old_epoch() -> None:
    engine = Engine()
    engine.run("a", A + B)
    engine.run("stale", C + A, stays=True)
    engine.manager.advance_epoch()
    engine.run("b", A + C)
    assert engine.causes() == [(0, 4, "old_epoch")]
    engine.decode("stale", *B)  # goes on with what the old weights computed
    engine.manager.free("stale")
    engine.run("c", A + B + C)
    assert engine.explained[-1].hits == 4
    assert engine.causes() == [(4, 8, "old_epoch")]
    engine.run("d", C + A + B)
    assert engine.causes() == [(0, 12, "old_epoch")]


def test_an_epoch_begins_with_nothing_that_was_ever_findable() -> None:
    engine = Engine()
    engine.run("a", A + B)
    assert engine.manager.reset_prefix_cache()
    engine.manager.advance_epoch()
    engine.manager.add_request(Request("late", A + B))
    engine.admit("late", 8, delay_cache_blocks=True)
    engine.run("b", A + B + C)
    assert engine.causes() == [(0, 8, "not_published")]


def test_delayed_blocks_were_never_findable() -> None:
    engine = Engine()
    engine.manager.add_request(Request("a", A + B))
    engine.admit("a", 8, delay_cache_blocks=True)
    engine.run("b", A + B + C)
    assert engine.causes() == [(0, 8, "not_published")]
    engine.manager.cache_blocks("a", 8)
    engine.run("c", A + B + A)
    assert engine.explained[-1].hits == 8


def test_a_drafter_drops_the_last_block_of_a_hit() -> None:
    engine = Engine(use_eagle=True)
    engine.run("a", A + B + C)
    engine.run("b", A + B + A)
    assert engine.causes() == [(4, 8, "draft_drop")]


def test_groups_that_do_not_meet_share_no_hit() -> None:
    """One group finds 4 tokens, the other only 8, so they share no length."""
    engine = Engine(20, groups=(Group(4), Group(4, kind="sliding_window", window=4)))
    engine.run("a", A + B, stays=True)
    full, window = engine.manager.get_block_ids("a")
    engine.manager.evict_blocks([full[1], window[0]])
    engine.run("b", A + B + C)
    assert engine.causes() == [(0, 4, "groups_disagree"), (4, 8, "withdrawn")]


def test_a_prompt_that_parts_where_no_state_was_kept_has_no_checkpoint() -> None:
    engine = Engine(20, groups=(Group(4), Group(4, kind="state")))
    engine.run("a", A + B + C)
    engine.run("b", A + B + A)
    assert engine.causes() == [(0, 8, "no_checkpoint")]
    engine.run("c", A + B + C + A)
    assert engine.causes() == []
    assert engine.explained[-1].hits == 12


def test_a_hit_that_is_not_taken_is_unused() -> None:
    engine = Engine()
    engine.run("a", A + B)
    engine.run("b", A + B + C, skip_reading_prefix_cache=True)
    assert engine.causes() == [(0, 8, "unused")]


def test_what_a_connector_brings_is_external_whatever_else_it_is() -> None:
    engine = Engine()
    engine.run("a", A + B)
    assert engine.manager.reset_prefix_cache()
    engine.manager.add_request(Request("b", A + B + C))
    engine.admit("b", 12, num_external_computed_tokens=4)
    assert engine.causes() == [(0, 4, "external"), (4, 8, "withdrawn")]


def test_an_admission_after_a_preemption_says_so() -> None:
    engine = Engine()
    engine.run("a", A + B)
    engine.admit("a", 8)
    assert [each.again for each in engine.explained] == [False, True]
    assert engine.explained[-1].hits == 4


@pytest.mark.parametrize(("theirs", "token"), [(C, C[0]), ([], None)])
def test_the_nearest_request_is_the_newest_with_the_longest_prefix(
    theirs: list[int], token: int | None
) -> None:
    engine = Engine(30)
    engine.run("far", A)
    engine.run("older", A + B[:3] + A)
    engine.run("near", A + B[:3] + theirs)
    engine.run("b", A + B)
    near = engine.explained[-1].nearest
    assert near is not None
    assert (near.request, near.differs_at, near.token) == ("near", 7, B[3])
    assert near.its_token == token


def test_an_output_is_known_and_computed() -> None:
    engine = Engine()
    engine.run("a", A, stays=True)
    engine.decode("a", *B[:2])
    engine.run("b", A + B)
    assert engine.causes() == [(4, 6, "partial_block")]


def test_a_token_after_a_cut_is_not_computed_if_its_batch_did_not_run() -> None:
    engine = Engine()
    engine.run("a", A, stays=True)
    engine.decode("a", B[0])
    engine.manager.append(["a"], [B[1]])
    engine.manager.truncate("a", 4)
    engine.manager.append(["a"], [C[0]])
    engine.manager.free("a")  # before the batch with C[0] was taken
    engine.run("b", A + C)
    assert engine.causes() == [(4, 5, "not_computed")]


def test_a_request_that_is_admitted_twice_in_a_batch_computed_nothing() -> None:
    engine = Engine()
    engine.run("a", A + B, stays=True)
    engine.manager.advance_epoch()
    engine.manager.append(["a"], [C[0]])
    engine.manager.free("a")
    engine.manager.allocate_slots("a", 9)  # in the new epoch, but never taken as a batch
    engine.manager.free("a")
    engine.run("b", A + B + A)
    assert engine.causes() == [(0, 8, "old_epoch")]


def test_each_request_of_a_decode_call_is_named_for_the_block_that_it_took() -> None:
    """Blocks: 1 and 2 have A and B, free, B first to go; 3 belongs to x, 4 to y."""
    engine = Engine(5)
    engine.run("a", A + B)
    engine.run("x", C, stays=True)
    engine.run("y", C[::-1], stays=True)
    engine.manager.append(["x", "y"], [1, 2])
    engine.manager.free("x")
    engine.manager.free("y")
    engine.run("b", A + B + C)
    assert engine.causes() == [(0, 4, "evicted"), (4, 8, "evicted")]
    takers = [span.removal.request for span in engine.explained[-1].spans if span.removal]
    assert takers == ["y", "x"]


def test_a_copy_that_was_merged_away_does_not_keep_its_content() -> None:
    """Block 1 has A; block 2 had it, too, until y got block 1 instead. Then z takes block 2."""
    engine = Engine(3, duplicates="merge")
    manager = engine.manager
    for name in ("x", "y"):
        manager.add_request(Request(name, A))
        manager.allocate_slots(name, 4)
    manager.take_batch()
    engine.run("z", C)
    assert [manager.get_block_ids(name) for name in ("x", "y")] == [([1],), ([1],)]
    manager.evict_blocks([1])
    for name in ("x", "y"):
        manager.free(name)
    engine.run("b", A + B)
    assert engine.causes() == [(0, 4, "withdrawn")]


@pytest.mark.parametrize("by_refusal", [False, True])
def test_a_block_is_idle_from_the_call_that_trims_its_window(*, by_refusal: bool) -> None:
    """Blocks 1 to 3 belong to a, whose next query sees block 3 only; block 4 is free."""
    engine = Engine(5, groups=(Group(4, kind="sliding_window", window=4),))
    engine.run("a", A + B + C, stays=True)
    for _ in range(3):
        engine.manager.take_batch()
    if by_refusal:
        engine.manager.add_tokens("a", 5 * A)
        assert isinstance(engine.manager.allocate_slots("a", 20), Refused)
    else:
        engine.manager.remove_skipped_blocks("a", 12)
    for _ in range(2):
        engine.manager.take_batch()
    engine.run("taker", C + B + A)  # takes blocks 4, 2, and 1
    engine.run("b", A + C)
    assert engine.causes() == [(0, 4, "evicted")]
    (span,) = engine.explained[-1].spans
    assert span.removal is not None
    assert (span.removal.request, span.removal.idle_steps) == ("taker", 2)


def test_who_takes_a_block_that_its_own_window_gave_up_is_named() -> None:
    """After a swap, r has blocks 1 to 3. Its fourth token sees block 3 only, and takes block 2."""
    engine = Engine(4, groups=(Group(1, kind="sliding_window", window=2),), num_host_blocks=4)
    manager = engine.manager
    engine.run("r", [10, 11, 12], stays=True)
    manager.swap_out(["r"])
    manager.take_batch()
    manager.swap_in(["r"])
    manager.take_batch()
    manager.add_tokens("r", [13])
    manager.allocate_slots("r", 1)
    assert manager.get_block_ids("r") == ([0, 0, 3, 2],)
    manager.free("r")
    engine.run("b", [10, 11, 99])
    assert engine.causes() == [(1, 2, "evicted")]
    (span,) = engine.explained[-1].spans
    assert span.removal is not None
    assert (span.removal.request, span.removal.kind) == ("r", "decode")


def test_a_block_is_idle_from_the_end_of_the_child_that_shared_it() -> None:
    """Request a ends two steps before its fork, which is the last owner of A's block."""
    engine = Engine(3)
    engine.run("a", A, stays=True)
    engine.manager.fork("a", "child")
    engine.manager.free("a")
    for _ in range(2):
        engine.manager.take_batch()
    engine.manager.free("child")
    for _ in range(3):
        engine.manager.take_batch()
    engine.run("taker", C + C)
    engine.run("b", A + C)
    (span,) = engine.explained[-1].spans
    assert span.removal is not None
    assert (span.removal.request, span.removal.idle_steps) == ("taker", 3)
