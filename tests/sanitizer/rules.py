# SPDX-License-Identifier: Apache-2.0
"""The sanitizer's findings in small queues that a reader can follow on paper.

Each rule gets a factory of sanitizers, so that both backends, both ways of reading, and seeded bugs
run the same queues. Pages are of 4 tokens unless a rule says otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from kvcore.sanitizer import CacheGroup, Chunk, Finding, Sanitizer, SlotChunk

Make = Callable[..., Sanitizer]
PAGE = CacheGroup(block_size=4)


def names(found: Sequence[Finding]) -> list[str]:
    """Return the names of findings."""
    return [finding.name for finding in found]


class Engine:
    """A sanitizer and the number of its next step."""

    def __init__(self, make: Make, *groups: CacheGroup) -> None:
        self.sanitizer = make(groups or [PAGE], 16)
        self.number = 0

    def begin(self, name: str, tokens: list[int], *tables: list[int], **options: Any) -> list[int]:
        """Return a request with its blocks in each group; its tokens."""
        self.sanitizer.begin(name, tokens, **options)
        for group_id, blocks in enumerate(tables):
            self.sanitizer.extend(name, group_id, blocks)
        return tokens

    def issue(self, *chunks: Chunk | SlotChunk) -> int:
        """Issue a step; its number."""
        self.number += 1
        self.sanitizer.issue(self.number, chunks)
        return self.number

    def run(self, *chunks: Chunk | SlotChunk) -> list[str]:
        """Issue a step and complete it; the names of what was found."""
        return names(self.sanitizer.complete(self.issue(*chunks)))


def a_hit_on_live_content_is_clean(make: Make) -> None:
    engine = Engine(make)
    engine.begin("r0", [7, 3, 0, 0, 2], [5, 2])
    assert engine.run(Chunk("r0", 0, 5)) == []
    engine.begin("r1", [7, 3, 0, 0, 9], [5, 6])
    assert engine.run(Chunk("r1", 4, 1)) == []


def what_waits_keeps_the_lists_of_its_issue(make: Make) -> None:
    engine = Engine(make)
    table, starts = [5], [0]
    engine.begin("r0", [7, 3, 0, 0])
    engine.begin("r1", [7, 3, 0, 0, 9], [8, 9])
    first = engine.issue(Chunk("r1", 0, 4))
    engine.sanitizer.extend("r0", 0, table)
    table[0] = 6
    engine.number += 1
    engine.sanitizer.step(engine.number, ["r0"], starts, [4])
    starts[0] = 3
    assert names(engine.sanitizer.complete(first)) == []
    engine.begin("r2", [7, 3, 0, 0, 9], [5, 7])
    assert engine.run(Chunk("r2", 4, 1)) == []


def content_of_a_freed_block_is_right_until_it_is_written(make: Make) -> None:
    engine = Engine(make)
    engine.begin("r0", [7, 3, 0, 0], [5])
    engine.run(Chunk("r0", 0, 4))
    engine.sanitizer.end("r0")
    engine.begin("r1", [7, 3, 0, 0, 9], [5, 6])
    assert engine.run(Chunk("r1", 4, 1)) == []
    assert engine.sanitizer.suspicions == []


def a_block_that_was_taken_holds_another_prefix(make: Make) -> None:
    engine = Engine(make)
    engine.begin("r0", [7, 3, 0, 0, 2], [5, 2])
    engine.run(Chunk("r0", 0, 5))
    engine.sanitizer.drop("r0")
    engine.begin("r2", [7, 3, 0, 1], [5])
    engine.run(Chunk("r2", 0, 4))
    engine.begin("r1", [7, 3, 0, 0, 9], [5, 6])
    [found] = engine.sanitizer.step(9, ["r1"], [4], [1])
    assert (found.name, found.position, found.block, found.slot) == ("wrong-kv", 3, 5, 3)
    assert (found.writer, found.written, found.certain) == ("r2", 2, True)
    assert found.line == (
        "wrong-kv: r1 (group 0, queries from 4) reads token 3 in block 5 slot 3; "
        "holds token 3 of r2, epoch 0, wanted token 3 of r1, epoch its own; "
        "last written by r2 in step 2; last given up by r0 in step 1"
    )


def a_disturbed_block_is_read_again(make: Make) -> None:
    engine = Engine(make)
    mine = engine.begin("r0", [7, 3, 0, 0], [5, 6])
    engine.run(Chunk("r0", 0, 4))
    engine.begin("r1", [8], [5])
    engine.run(Chunk("r1", 0, 1))
    mine.append(1)
    assert engine.run(Chunk("r0", 4, 1)) == ["wrong-kv"]


def a_chunk_is_read_again_that_another_chunk_overwrites(make: Make) -> None:
    engine = Engine(make)
    engine.begin("r0", [7, 3], [5])
    engine.begin("r1", [8], [5])
    assert engine.run(Chunk("r0", 0, 2), Chunk("r1", 0, 1)) == ["wrong-kv"]


def a_dropped_table_is_nobodys(make: Make) -> None:
    engine = Engine(make)
    engine.begin("r0", [7, 3], [5])
    engine.run(Chunk("r0", 0, 2))
    engine.sanitizer.drop("r0")
    engine.begin("r1", [8, 8], [5])
    assert engine.run(Chunk("r1", 0, 2)) == []
    assert engine.sanitizer.suspicions == []


def two_live_tables_that_write_one_block_are_suspect(make: Make) -> None:
    engine = Engine(make)
    engine.begin("r0", [7, 3], [5])
    engine.run(Chunk("r0", 0, 2))
    engine.begin("r1", [8, 8], [5])
    engine.run(Chunk("r1", 0, 2))
    assert names(engine.sanitizer.suspicions) == ["alias"]
    assert engine.sanitizer.findings == []


def a_steps_writes_come_before_its_reads(make: Make) -> None:
    engine = Engine(make)
    engine.begin("r1", [7, 3, 0, 0, 9], [5, 6])
    engine.begin("r0", [7, 3, 0, 0], [5])
    assert engine.run(Chunk("r1", 4, 1), Chunk("r0", 0, 4)) == []


def a_ring_is_read_before_it_is_written(make: Make) -> None:
    engine = Engine(make, CacheGroup(block_size=1, window=3, ring=True))
    engine.begin("r0", [1, 2, 3, 4, 5], [0, 1])
    assert engine.run(Chunk("r0", 0, 2)) == []
    assert engine.run(Chunk("r0", 2, 1)) == []
    assert engine.run(Chunk("r0", 3, 2)) == []


def a_rejected_draft_is_written_anew(make: Make) -> None:
    engine = Engine(make)
    tokens = engine.begin("r0", [1, 2], [5])
    engine.run(Chunk("r0", 0, 4, drafts=[9, 9]))
    tokens += [3, 4]
    assert engine.run(Chunk("r0", 3, 1)) == ["wrong-kv"]


def an_accepted_draft_is_right(make: Make) -> None:
    engine = Engine(make)
    tokens = engine.begin("r0", [1, 2], [5])
    engine.run(Chunk("r0", 0, 4, drafts=[3, 9]))
    tokens += [3, 4]
    assert engine.run(Chunk("r0", 3, 1)) == []


def a_fork_is_of_its_parents_weights(make: Make) -> None:
    engine = Engine(make)
    engine.begin("r0", [1, 2, 3], [5])
    engine.run(Chunk("r0", 0, 2))
    engine.sanitizer.epoch()
    engine.begin("r1", [1, 2, 4], [5], parent="r0")
    engine.sanitizer.extend("r1", 0, [6], 0)
    engine.sanitizer.copy([(5, 6)])
    assert engine.run(Chunk("r1", 2, 1)) == []


def new_requests_do_not_read_what_old_weights_wrote(make: Make) -> None:
    engine = Engine(make)
    engine.begin("r0", [1, 2, 3, 4], [5])
    engine.run(Chunk("r0", 0, 4))
    engine.sanitizer.epoch()
    engine.begin("r1", [1, 2, 3, 4, 5], [5, 6])
    assert engine.run(Chunk("r1", 4, 1)) == ["stale-weights"]


def old_weights_taint_what_is_computed_from_them(make: Make) -> None:
    engine = Engine(make)
    tokens = engine.begin("r0", [1, 2, 3, 4], [5, 6])
    engine.run(Chunk("r0", 0, 4))
    engine.sanitizer.epoch()
    tokens += [5, 6, 7, 8]
    assert engine.run(Chunk("r0", 4, 4)) == []
    engine.begin("r1", [1, 2, 3, 4, 5, 6, 7, 8, 9], [7, 6, 8])
    assert engine.run(Chunk("r1", 0, 4)) == []
    assert engine.run(Chunk("r1", 8, 1)) == ["stale-weights"]


def recomputed_by_new_weights_is_new(make: Make) -> None:
    engine = Engine(make)
    engine.begin("r0", [1, 2, 3, 4], [5])
    engine.run(Chunk("r0", 0, 4))
    engine.sanitizer.epoch()
    engine.sanitizer.drop("r0")
    engine.sanitizer.extend("r0", 0, [5])
    engine.run(Chunk("r0", 0, 4))
    engine.begin("r1", [1, 2, 3, 4, 5], [5, 6])
    assert engine.run(Chunk("r1", 4, 1)) == []


def a_copy_follows_the_writes_that_were_issued_before(make: Make) -> None:
    engine = Engine(make)
    engine.begin("r0", [1, 2, 3, 4], [5])
    step = engine.issue(Chunk("r0", 0, 4))
    engine.sanitizer.copy([(5, 7)])
    engine.begin("r1", [1, 2, 3, 4, 5], [7, 6])
    second = engine.issue(Chunk("r1", 4, 1))
    assert engine.sanitizer.complete(step) == []
    assert engine.sanitizer.complete(second) == []


def a_copy_brings_what_was_there_when_it_was_issued(make: Make) -> None:
    engine = Engine(make)
    engine.begin("r0", [1, 2, 3, 4], [5])
    engine.sanitizer.copy([(5, 7)])
    engine.run(Chunk("r0", 0, 4))
    engine.begin("r1", [1, 2, 3, 4, 5], [7, 6])
    assert engine.run(Chunk("r1", 4, 1)) == ["unwritten-read"]


def steps_take_effect_in_the_order_of_issue(make: Make) -> None:
    engine = Engine(make)
    engine.begin("r0", [1, 2, 3, 4], [5])
    engine.begin("r1", [9, 9])
    first = engine.issue(Chunk("r0", 0, 4))
    engine.sanitizer.drop("r0")
    engine.sanitizer.extend("r1", 0, [5])
    second = engine.issue(Chunk("r1", 0, 2))
    assert engine.sanitizer.complete(second) == []
    assert engine.sanitizer.complete(first) == []


def an_unknown_token_is_like_no_other(make: Make) -> None:
    engine = Engine(make)
    engine.begin("r0", [1], [5])
    engine.begin("r1", [1], [5])
    assert engine.run(Chunk("r0", 0, 2), Chunk("r1", 0, 2)) == ["wrong-kv"]


def an_unknown_token_is_nobodys_prefix(make: Make) -> None:
    engine = Engine(make)
    engine.begin("r0", [1, 2, 3], [5])
    assert engine.run(Chunk("r0", 0, 4)) == []
    engine.begin("r1", [1, 2, 3, 4, 5], [5, 6])
    assert engine.run(Chunk("r1", 4, 1)) == ["wrong-kv"]


def a_query_sees_its_window_and_no_more(make: Make) -> None:
    for window, expected in ((2, []), (3, ["wrong-kv"])):
        engine = Engine(make, CacheGroup(block_size=1, window=window))
        tokens = engine.begin("r0", [1, 2, 3], [1, 2, 3, 4])
        engine.run(Chunk("r0", 0, 3))
        engine.begin("r1", [9], [2])
        engine.run(Chunk("r1", 0, 1))
        tokens.append(4)
        assert engine.run(Chunk("r0", 3, 1)) == expected


def equal_tokens_elsewhere_are_another_prefix(make: Make) -> None:
    engine = Engine(make, CacheGroup(block_size=1))
    engine.begin("r0", [1, 2, 9], [1, 2, 3])
    engine.run(Chunk("r0", 0, 3))
    engine.begin("r1", [2, 1, 9, 5], [4, 5, 3, 6])
    engine.run(Chunk("r1", 0, 2))
    assert engine.run(Chunk("r1", 3, 1)) == ["wrong-kv"]


def another_namespace_is_another_tenant(make: Make) -> None:
    engine = Engine(make)
    engine.begin("r0", [1, 2, 3, 4], [5], namespace=(None, "one"))
    engine.run(Chunk("r0", 0, 4))
    engine.begin("r1", [1, 2, 3, 4, 5], [5, 6], namespace=(None, "two"))
    assert engine.run(Chunk("r1", 4, 1)) == ["cross-tenant"]
    assert engine.sanitizer.findings[0].differs == ["salt"]


def a_cancelled_step_wrote_nothing(make: Make) -> None:
    engine = Engine(make)
    engine.begin("r0", [1, 2, 3, 4], [5])
    engine.sanitizer.cancel(engine.issue(Chunk("r0", 0, 4)))
    engine.begin("r1", [1, 2, 3, 4, 5], [5, 6])
    assert engine.run(Chunk("r1", 4, 1)) == ["unwritten-read"]


def null_blocks_are_neither_read_nor_written(make: Make) -> None:
    group = CacheGroup(block_size=1, window=2, num_null=1)
    engine = Engine(make, group)
    engine.begin("r0", [1, 2, 3], [0, 2, 3])
    assert engine.run(Chunk("r0", 0, 1)) == ["null-write"]
    tokens = engine.begin("r1", [1, 2], [4, 5, 6])
    engine.run(Chunk("r1", 0, 2))
    engine.sanitizer.extend("r1", 0, [0], 0)
    tokens.append(3)
    assert engine.run(Chunk("r1", 2, 1)) == []
    engine.sanitizer.extend("r1", 0, [7])
    engine.sanitizer.extend("r1", 0, [0], 2)
    tokens.append(4)
    assert engine.run(Chunk("r1", 3, 1)) == ["null-read"]


def a_position_behind_the_table_has_no_slot(make: Make) -> None:
    engine = Engine(make)
    engine.begin("r0", [1, 2, 3, 4, 5], [5])
    assert engine.run(Chunk("r0", 0, 5)) == ["no-slot"]


def a_load_behind_the_table_is_told_by_the_next_step(make: Make) -> None:
    engine = Engine(make)
    engine.begin("r0", [1, 2, 3, 4, 5], [5])
    engine.sanitizer.load("r0", 0, 5)
    assert engine.run() == ["no-slot"]
    assert engine.run() == []


def a_step_without_tokens_fails_a_model(make: Make) -> None:
    engine = Engine(make)
    engine.begin("r0", [1, 2, 3, 4], [5])
    assert engine.run() == []
    assert engine.run(Chunk("r0", 0, 0)) == ["empty-step"]


def zeros_are_read_where_the_group_says_so(make: Make) -> None:
    for readable, expected in ((True, []), (False, ["unwritten-read"])):
        engine = Engine(make, CacheGroup(block_size=4, zeros_readable=readable))
        engine.begin("r0", [1, 2, 3, 4, 5], [5, 6])
        engine.sanitizer.zero([5])
        assert engine.run(Chunk("r0", 4, 1)) == expected


def blocks_go_to_another_tier_and_come_back(make: Make) -> None:
    engine = Engine(make)
    engine.begin("r0", [1, 2, 3, 4], [5])
    engine.run(Chunk("r0", 0, 4))
    engine.sanitizer.end("r0")
    engine.sanitizer.move([(5, 40)], target="host")
    engine.sanitizer.copy([(40, 7)], source="host")
    engine.begin("r1", [1, 2, 3, 4, 5], [7, 6])
    assert engine.run(Chunk("r1", 4, 1)) == []
    engine.begin("r2", [1, 2, 3, 4, 5], [5, 8])
    assert engine.run(Chunk("r2", 4, 1)) == ["unwritten-read"]


def explicit_slots_are_the_very_slots(make: Make) -> None:
    engine = Engine(make)
    engine.begin("r0", [1, 2, 3])
    assert engine.run(SlotChunk("r0", 0, 0, 2, [20, 21], [20, 21])) == []
    assert engine.run(SlotChunk("r0", 0, 2, 1, [22], [21, 20, 22])) == ["wrong-kv"]


RULES: list[Callable[[Make], None]] = [
    a_hit_on_live_content_is_clean,
    what_waits_keeps_the_lists_of_its_issue,
    content_of_a_freed_block_is_right_until_it_is_written,
    a_block_that_was_taken_holds_another_prefix,
    a_disturbed_block_is_read_again,
    a_chunk_is_read_again_that_another_chunk_overwrites,
    a_dropped_table_is_nobodys,
    two_live_tables_that_write_one_block_are_suspect,
    a_steps_writes_come_before_its_reads,
    a_ring_is_read_before_it_is_written,
    a_rejected_draft_is_written_anew,
    an_accepted_draft_is_right,
    a_fork_is_of_its_parents_weights,
    new_requests_do_not_read_what_old_weights_wrote,
    old_weights_taint_what_is_computed_from_them,
    recomputed_by_new_weights_is_new,
    a_copy_follows_the_writes_that_were_issued_before,
    a_copy_brings_what_was_there_when_it_was_issued,
    steps_take_effect_in_the_order_of_issue,
    an_unknown_token_is_like_no_other,
    an_unknown_token_is_nobodys_prefix,
    a_query_sees_its_window_and_no_more,
    equal_tokens_elsewhere_are_another_prefix,
    another_namespace_is_another_tenant,
    a_cancelled_step_wrote_nothing,
    null_blocks_are_neither_read_nor_written,
    a_position_behind_the_table_has_no_slot,
    a_load_behind_the_table_is_told_by_the_next_step,
    a_step_without_tokens_fails_a_model,
    zeros_are_read_where_the_group_says_so,
    blocks_go_to_another_tier_and_come_back,
    explicit_slots_are_the_very_slots,
]
