# SPDX-License-Identifier: Apache-2.0
"""The calls of a record on managers with other configurations."""

from __future__ import annotations

import itertools
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from xml.etree import ElementTree

import attrs
import pytest
from hypothesis import settings

from kvcore import Config, KVCacheManager, Request
from kvcore.record.reader import first_calls, segment_files
from kvcore.record.recorder import Recorder
from kvcore.replay.command import main
from kvcore.replay.records import follower
from kvcore.replay.records.what_if import Variant, changed, what_if
from kvcore.trace.calls import Call, perform_on
from kvcore.types.errors import InvalidConfig
from tests.conftest import Backend
from tests.helpers.amount import examples
from tests.helpers.machine import Machine
from tests.record.records import CONFIG, record, story

POOL = Config(6, 2, hash_seed=b"what if")


class OtherPools(Machine):
    """Any calls: with nothing changed all outcomes are equal; with another pool nothing is lost."""

    def teardown(self) -> None:
        super().teardown()
        if not hasattr(self, "run"):
            return
        config = self.run.state.config
        variants = {"same": config}
        for name, num_blocks in (("less", config.num_blocks - 1), ("more", config.num_blocks + 40)):
            try:
                variants[name] = attrs.evolve(config, num_blocks=num_blocks)
            except InvalidConfig:
                continue
        with tempfile.TemporaryDirectory() as base:
            record(Path(base, "record"), config, self.run.calls, "python", keep_segments=100)
            same, *others = what_if(Path(base, "record"), variants, "python").variants
        assert (same.parted_at, same.fidelity) == (None, 1.0)
        for each in others:
            assert 0 <= each.fidelity <= 1
            assert each.fidelity == 1 or each.parted_at is not None


TestOtherPools = OtherPools.TestCase
TestOtherPools.settings = settings(max_examples=examples(20), stateful_step_count=30)


def run_variants(
    folder: Path, calls: Sequence[Call], backend: Backend, **pools: Config
) -> list[Variant]:
    """Record calls in a pool of six blocks, the null block among them, and run the variants."""
    manager = KVCacheManager(POOL, backend)
    manager.start_recording(Recorder(folder / "record"))
    for call in calls:
        perform_on(manager, call)
    manager.stop_recording()
    return list(what_if(folder / "record", pools, backend).variants)


def admission(request_id: str, tokens: Sequence[int], hit: int = 0) -> list[Call]:
    """Add a request, look it up and allocate after its hit in one step."""
    return [
        Call("add_request", (Request(request_id, tokens),)),
        Call("allocate_slots", (request_id, len(tokens) - hit)),
        Call("take_batch"),
    ]


def test_with_nothing_changed_all_outcomes_are_equal(tmp_path: Path, backend: Backend) -> None:
    record(tmp_path / "record", CONFIG, story(), backend)
    done = what_if(tmp_path / "record", {"same": CONFIG}, backend)
    (same,) = done.variants
    assert (same.parted_at, same.fidelity) == (None, 1.0)
    assert attrs.evolve(same.tally, in_place=0) == done.recorded
    assert (done.num_calls, done.num_left_out, done.num_cold) == (len(story()), 0, 0)


def test_a_smaller_pool_delays_and_a_larger_one_spares_a_preemption(
    tmp_path: Path, backend: Backend
) -> None:
    start, allocate, take = admission("b", [2] * 4)
    calls = [*admission("a", [1] * 5), Call("append", (["a"], [1])), start, allocate, take]
    calls += [Call("append", (["b"], [2])), Call("free", ("b",))]  # a has 3 of 5 blocks, b 2
    calls += [Call("free", ("a",)), Call("allocate_slots", ("b", 4)), Call("take_batch")]
    calls += [Call("append", (["b"], [2])), Call("take_batch"), Call("free", ("b",))]
    less, more = run_variants(
        *(tmp_path, calls, backend),
        less=attrs.evolve(POOL, num_blocks=5),
        more=attrs.evolve(POOL, num_blocks=20),
    )
    # b waits for a, and catches up once a is gone: 6 + 4 + 1 tokens, none of them twice.
    assert (less.parted_at, less.tally.computed_tokens) == (5, 11)
    assert (less.tally.delayed, less.tally.preempted, less.tally.dropped) == (1, 0, 0)
    # The append that was refused is where the runs part; b keeps its blocks until its end.
    assert (more.parted_at, more.tally.computed_tokens) == (7, 11)
    assert (more.tally.avoided, more.tally.covered, more.tally.delayed) == (1, 1, 0)


@pytest.mark.parametrize(("num_ahead", "avoided"), [(1, 0), (2, 1)])
def test_a_preemption_is_known_by_the_calls_that_are_read_ahead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_ahead: int, avoided: int
) -> None:
    monkeypatch.setattr("kvcore.replay.records.what_if.AHEAD_MAX", num_ahead)
    calls = [*admission("a", [1] * 5), *admission("b", [2] * 4)]
    calls += [Call("append", (["b"], [2])), Call("free", ("b",))]  # refused: makes room for itself
    calls += [Call("free", ("a",)), Call("allocate_slots", ("b", 4)), Call("take_batch")]
    (more,) = run_variants(tmp_path, calls, "python", more=attrs.evolve(POOL, num_blocks=20))
    assert (more.parted_at, more.tally.avoided) == (6, avoided)


def test_a_preemption_that_frees_no_block_is_followed_by_others(
    tmp_path: Path, backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = [*admission("a", [1] * 4), *admission("c", [3] * 2)]  # two blocks and one
    calls += [Call("add_request", (Request("b", [1, 1, 1, 1, 9]),))]
    manager = KVCacheManager(POOL, backend)
    manager.start_recording(Recorder(tmp_path / "record"))
    for call in calls:
        perform_on(manager, call)
    manager.allocate_slots("b", 0, manager.get_computed_blocks("b"))  # both blocks of a
    manager.append(["a"], [1])
    manager.take_batch()
    manager.free("a")
    manager.append(["c"], [3])
    manager.allocate_slots("b", 1)
    manager.take_batch()
    manager.stop_recording()

    take, num_taken = follower.Follower._take_batch, itertools.count()

    def take_batch(self: follower.Follower) -> bool:
        assert next(num_taken) < 50, "the variant does not end"
        return take(self)

    monkeypatch.setattr(follower.Follower, "_take_batch", take_batch)
    less = {"less": attrs.evolve(POOL, num_blocks=4)}
    (done,) = what_if(tmp_path / "record", less, backend).variants
    # All three need a block. To preempt b frees none, since a holds them too, so c goes as well and
    # a ends. Then c and b need a block again, and b goes: it ends after c.
    assert (done.tally.delayed, done.tally.preempted, done.tally.dropped) == (3, 3, 0)


def test_drafts_of_a_delayed_request_are_accepted_once_they_are_computed(
    tmp_path: Path, backend: Backend
) -> None:
    calls = [*admission("a", [1] * 4), *admission("b", [2] * 2)]  # three blocks
    calls += [Call("add_tokens", ("b", [3])), Call("add_drafts", ("b", [4, 5]))]
    calls += [Call("allocate_slots", ("b", 3)), Call("take_batch")]  # two more: too many here
    calls += [Call("accept", ("b", 1)), Call("add_tokens", ("b", [6])), Call("free", ("a",))]
    calls += [Call("allocate_slots", ("b", 1)), Call("take_batch")]
    (less,) = run_variants(tmp_path, calls, backend, less=attrs.evolve(POOL, num_blocks=5))
    # Once a is gone, b computes its drafts, accepts one after their batch, and goes on.
    assert (less.tally.delayed, less.tally.dropped) == (1, 0)
    assert less.tally.computed_tokens == 4 + 2 + 3 + 1


def test_a_call_that_comes_while_its_step_is_open_waits_for_the_batch(
    tmp_path: Path, backend: Backend
) -> None:
    calls = [*admission("a", [1] * 4), *admission("b", [2] * 2)]
    calls += [Call("add_tokens", ("b", [3])), Call("add_drafts", ("b", [4, 5]))]
    calls += [Call("allocate_slots", ("b", 3)), Call("take_batch"), Call("free", ("a",))]
    calls += [Call("accept", ("b", 1)), Call("add_tokens", ("b", [6]))]  # b is scheduled just now
    calls += [Call("allocate_slots", ("b", 1)), Call("take_batch")]
    (less,) = run_variants(tmp_path, calls, backend, less=attrs.evolve(POOL, num_blocks=5))
    assert (less.tally.delayed, less.tally.dropped) == (2, 0)
    assert less.tally.computed_tokens == 4 + 2 + 3 + 1


def test_what_no_empty_pool_holds_is_dropped(tmp_path: Path, backend: Backend) -> None:
    calls = [*admission("a", [1] * 9), Call("free", ("a",)), Call("remove_request", ("a",))]
    calls += admission("b", [1, 2])
    (less,) = run_variants(tmp_path, calls, backend, less=attrs.evolve(POOL, num_blocks=4))
    assert (less.tally.dropped, less.tally.computed_tokens) == (3, 2)


def test_a_longer_hit_covers_a_chunk(tmp_path: Path, backend: Backend) -> None:
    prompt = list(range(6))
    calls = [*admission("a", prompt), Call("free", ("a",))]  # 3 blocks of 5
    calls += [*admission("b", [7] * 8), Call("free", ("b",))]  # 4 blocks: two of them a's
    calls += [Call("add_request", (Request("c", [*prompt, 9]),))]
    calls += [Call("get_computed_blocks", ("c",))]
    manager = KVCacheManager(POOL, backend)
    manager.start_recording(Recorder(tmp_path / "record"))
    for call in calls:
        perform_on(manager, call)
    hit = manager.get_computed_blocks("c")
    assert hit.num_tokens == 2
    manager.allocate_slots("c", 1, hit)
    manager.take_batch()
    manager.allocate_slots("c", 2)
    manager.take_batch()
    manager.allocate_slots("c", 2)
    manager.take_batch()
    manager.stop_recording()
    done = what_if(tmp_path / "record", {"more": attrs.evolve(POOL, num_blocks=30)}, backend)
    (more,) = done.variants
    assert done.recorded.hit_tokens == 2
    assert (more.tally.hit_tokens, more.tally.covered) == (6, 1)
    assert more.tally.computed_tokens == done.recorded.computed_tokens - 4


def test_a_variant_of_a_record_that_begins_later_begins_empty(
    tmp_path: Path, backend: Backend
) -> None:
    manager = KVCacheManager(POOL, backend)
    for call in admission("a", [1] * 5):
        perform_on(manager, call)
    manager.start_recording(Recorder(tmp_path / "record"))
    for call in [Call("append", (["a"], [2])), Call("take_batch"), *admission("b", [3])]:
        perform_on(manager, call)
    manager.stop_recording()
    done = what_if(tmp_path / "record", {"more": attrs.evolve(POOL, num_blocks=9)}, backend)
    assert (done.num_left_out, done.num_cold) == (1, 2)
    assert done.variants[0].tally.computed_tokens == 1


def test_requests_get_their_own_tokens_if_their_rows_are_others_in_a_variant(
    tmp_path: Path, backend: Backend
) -> None:
    """In the record "a" has row 0 and "b" row 1; in the variant it is the other way round."""
    manager = KVCacheManager(POOL, backend)
    for call in admission("a", [1]):
        perform_on(manager, call)
    manager.start_recording(Recorder(tmp_path / "record"))
    ends_a = [Call("free", ("a",)), Call("remove_request", ("a",)), Call("take_batch")]
    calls = [*admission("b", [3, 3, 3]), *ends_a, *admission("a", [4])]
    calls += [Call("append", (["b"], [5])), Call("take_batch"), Call("free", ("b",))]
    for call in [*calls, Call("add_request", (Request("again", [3, 3, 3, 5, 7]),))]:
        perform_on(manager, call)
    hit = manager.get_computed_blocks("again")
    assert hit.num_tokens == 4
    manager.allocate_slots("again", 1, hit)
    manager.stop_recording()
    done = what_if(tmp_path / "record", {"more": attrs.evolve(POOL, num_blocks=9)}, backend)
    assert done.variants[0].tally.hit_tokens == 4


def test_batches_are_numbered_from_where_a_record_begins(tmp_path: Path, backend: Backend) -> None:
    config = attrs.evolve(POOL, max_in_flight=2)
    calls = [*admission("a", [1] * 3), Call("free", ("a",)), Call("remove_request", ("a",))]
    calls += [Call("complete", (0,)), Call("take_batch"), *admission("b", [1] * 3)]
    calls += [Call("complete", (1,)), Call("append", (["b"], [2]), {"batch": 2})]
    calls += [Call("take_batch"), Call("complete", (2,)), Call("complete", (3,))]
    record(tmp_path / "record", config, calls, backend, start=7)
    done = what_if(tmp_path / "record", {"more": attrs.evolve(config, num_blocks=9)}, backend)
    (more,) = done.variants
    assert (more.tally.computed_tokens, more.tally.dropped) == (4, 1)  # batch 1 is not there


def test_a_variant_without_the_cancelled_batch_goes_on(tmp_path: Path, backend: Backend) -> None:
    config = attrs.evolve(POOL, max_in_flight=1)
    calls = [*admission("a", [1] * 3), Call("cancel", (0,)), *admission("b", [1] * 3)]
    calls += [Call("complete", (2,)), Call("append", (["b"], [2]))]
    calls += [Call("take_batch"), Call("complete", (3,))]
    record(tmp_path / "record", config, calls, backend, start=3)
    done = what_if(tmp_path / "record", {"more": attrs.evolve(config, num_blocks=9)}, backend)
    (more,) = done.variants
    assert (more.tally.computed_tokens, more.tally.dropped) == (4, 1)  # batch 0 is not there


def test_the_command_prints_a_table_or_json(
    tmp_path: Path, backend: Backend, capsys: pytest.CaptureFixture[str]
) -> None:
    record(tmp_path / "record", CONFIG, story(), backend)
    words = [str(tmp_path / "record"), "--backend", backend, "--what-if", "num_blocks=90"]
    assert main([*words, "--what-if", "num_blocks=70,eviction=uncached_first"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith(f"{len(story())} calls\n")
    assert "\nnum_blocks=70,eviction=uncached_first " in shown
    assert main([*words, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["variants"][0]["name"] == "num_blocks=90"
    page = tmp_path / "page.html"
    assert main([*words, "--what-if", "num_blocks=70", "--html", str(page)]) == 0
    rows = ElementTree.fromstring(page.read_text().split("\n", 1)[1]).iter("tr")
    names = [row[0].text for row in rows]
    assert names == [None, "recorded", "num_blocks=90", "num_blocks=70"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("num_block=9", "num_block='9'"),
        ("num_blocks=many", "must be an integer of at least 0, true, false or none"),
        ("num_blocks=0", "num_blocks"),
        ("eviction=newest", "eviction='newest'"),
    ],
)
def test_a_variant_that_is_none_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: str, message: str
) -> None:
    record(tmp_path / "record", CONFIG, story(), "python")
    assert main([str(tmp_path / "record"), "--what-if", words]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    [
        ["--json"],
        ["--html", "page.html"],
        ["--what-if", "num_blocks=9", "--to", "3"],
        ["--what-if", "num_blocks=9", "--from", "3"],
        ["--what-if", "num_blocks=9", "--backend", "both"],
    ],
)
def test_options_that_would_be_ignored_are_refused(tmp_path: Path, words: list[str]) -> None:
    record(tmp_path / "record", CONFIG, story(), "python")
    with pytest.raises(SystemExit, match="2"):
        main([str(tmp_path / "record"), *words])


def test_variants_end_where_a_file_is_missing(tmp_path: Path, backend: Backend) -> None:
    record(tmp_path / "record", CONFIG, story(), backend, segment_bytes=1, keep_segments=100)
    files = segment_files(tmp_path / "record")
    missing = first_calls(files)[2]
    assert 0 < missing < len(story())
    files[2].unlink()
    assert what_if(tmp_path / "record", {"same": CONFIG}, backend).num_calls == missing


def test_words_change_what_they_name() -> None:
    config = changed(POOL, "block_size=4, num_blocks=64,enable_caching=false,max_model_len=none")
    assert (config.block_size, config.num_blocks) == (4, 64)
    assert (config.enable_caching, config.max_model_len) == (False, None)
    assert config.hash_seed == POOL.hash_seed
