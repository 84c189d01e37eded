# SPDX-License-Identifier: Apache-2.0
"""A record is replayed to the byte in both languages, whichever recorded it."""

from __future__ import annotations

import gc
import tempfile
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import settings

from kvcore import Config, KVCacheManager, Request, _twin
from kvcore.record.calls import SHAPES
from kvcore.record.checksum import crc32c_by_table
from kvcore.record.outcomes import ERRORS
from kvcore.record.reader import read_calls, segment_files
from kvcore.record.recorder import Recorder
from kvcore.record.segment import read_segment
from kvcore.replay.records.rerun import rerun
from kvcore.trace.calls import Call, perform_on
from kvcore.transitions import TRANSITIONS
from kvcore.types import errors
from kvcore.types.errors import KvcoreError
from tests.conftest import Backend, need_twin
from tests.helpers.amount import examples
from tests.helpers.machine import Machine
from tests.record.records import (
    CONFIG,
    INSIDE,
    LEVELS,
    MORE,
    RETENTION,
    check_replays,
    contents,
    levels_story,
    record,
    story,
)

RAISED_BY_NO_TRANSITION = {
    *("KvcoreError", "BackendMissing", "ConcurrentCall", "PoolTooLarge"),
    *("WrongArgument", "InvalidConfig", "GroupsDoNotFit", "UnsupportedBuffer", "DamagedState"),
    *("DamagedBatch", "TraceError", "InvalidKey", "DoubleFree", "WrongKey", "NoOwner"),
    *("AlreadyPublished", "InvalidRetention"),
}
"""Errors that no record has: of the arguments' kinds, of other doors, and of the pool alone."""


BITS = {
    "add_tokens": "num_rejected batch",
    "allocate_slots": "hit num_lookahead_tokens num_external_computed_tokens num_encoder_tokens"
    " reserved_blocks num_output_placeholders delay_cache_blocks full_sequence_must_fit",
    "append": "tokens batch",
    "load": "hit reserved_blocks full_sequence_must_fit",
}
"""The options that old records have, by their bits: newer ones come behind them."""


class RecordedRuns(Machine):
    """Any calls in any order, recorded by both languages: equal bytes, equal states again."""

    def teardown(self) -> None:
        super().teardown()
        if not hasattr(self, "run"):
            return
        config, calls = self.run.state.config, self.run.calls
        with tempfile.TemporaryDirectory() as base:
            options = {"segment_bytes": 1 + 97 * (len(calls) % 5), "keep_segments": 100}
            states = record(Path(base, "python"), config, calls, "python", **options)
            check_replays(Path(base, "python"), states, "python")
            if _twin.available():
                record(Path(base, "rust"), config, calls, "rust", **options)
                assert contents(Path(base, "rust")) == contents(Path(base, "python"))
                check_replays(Path(base, "python"), states, "rust")
                assert rerun(Path(base, "rust"), ["rust", "python"]).difference is None


TestRecordedRuns = RecordedRuns.TestCase
TestRecordedRuns.settings = settings(max_examples=examples(20), stateful_step_count=30)


def test_a_story_is_replayed_to_the_byte(tmp_path: Path, backend: Backend) -> None:
    states = record(tmp_path / "record", CONFIG, story(), backend)
    assert check_replays(tmp_path / "record", states, backend) == len(story())


def test_levels_are_replayed_to_the_byte(tmp_path: Path, backend: Backend) -> None:
    states = record(tmp_path / "record", LEVELS, levels_story(), backend)
    assert check_replays(tmp_path / "record", states, backend) == len(levels_story())
    (path,) = segment_files(tmp_path / "record")
    read = [*read_calls(read_segment(path))]
    wished = {call.name: call.arguments for call in read if call.name == "extend_retention"}
    assert read[0].arguments["request"].retention == RETENTION
    assert wished == {"extend_retention": {"request_id": "a", "retention": MORE}}
    assert [str(call.result) for call in read if call.name == "tick"] == ["done", "TimeWentBack"]


@pytest.mark.parametrize(
    ("config", "calls"), [(CONFIG, story()), (INSIDE, story()), (LEVELS, levels_story())]
)
def test_both_languages_write_the_same_bytes(
    tmp_path: Path, config: Config, calls: list[Call]
) -> None:
    need_twin()
    record(tmp_path / "rust", config, calls, "rust")
    record(tmp_path / "python", config, calls, "python")
    assert contents(tmp_path / "rust") == contents(tmp_path / "python")


def test_every_transition_is_recorded_and_every_error_has_a_number() -> None:
    assert {*TRANSITIONS, "get_computed_blocks"} == set(SHAPES)
    assert len({shape.opcode for shape in SHAPES.values()}) == len(SHAPES)
    kinds = [each for each in vars(errors).values() if isinstance(each, type)]
    assert {kind.__name__ for kind in kinds if issubclass(kind, KvcoreError)} == {
        *ERRORS,
        *RAISED_BY_NO_TRANSITION,
    }
    assert len({*ERRORS, *RAISED_BY_NO_TRANSITION}) == len(ERRORS) + len(RAISED_BY_NO_TRANSITION)


@pytest.mark.parametrize("name", BITS)
def test_options_keep_the_bits_of_old_records(name: str) -> None:
    old = BITS[name].split()
    assert list(SHAPES[name].options)[: len(old)] == old


def test_the_checksum_is_castagnolis(backend: Backend) -> None:
    made = _twin.crc32c if backend == "rust" else crc32c_by_table
    assert made(b"123456789") == 0xE3069283
    assert made(bytes(32)) == 0x8A9136AA
    assert made(bytearray(range(32))) == 0x46DD794E


def test_the_twins_checksum_is_the_tables_at_any_size_and_place() -> None:
    need_twin()
    data = Random(1).randbytes(1_400)
    for start, sizes in (
        (0, range(1_100)),
        (1, (0, 7, 255, 256, 257, 1_024)),
        (5, range(500, 530)),
    ):
        for part in (data[start : start + size] for size in sizes):
            assert _twin.crc32c(part) == crc32c_by_table(part)


def test_a_long_prompt_is_recorded_whole_wherever_it_begins(tmp_path: Path) -> None:
    need_twin()
    random, manager = Random(2), KVCacheManager(CONFIG, "rust")
    manager.start_recording(Recorder(tmp_path))
    prompts = {
        "a" * (1 + place): [random.randrange(1 << 31) for _ in range(1_000 + 29 * place)]
        for place in range(70)  # so that they begin and end anywhere in a line of the cache
    }
    for name, tokens in prompts.items():
        manager.add_request(Request(name, tokens))
    manager.stop_recording()
    (file,) = segment_files(tmp_path)
    segment, data = read_segment(file), file.read_bytes()
    for start, frame in segment.frames:
        assert crc32c_by_table(frame) == int.from_bytes(data[start - 4 : start], "little")
    requests = [call.arguments["request"] for call in read_calls(segment)]
    assert {each.request_id: list(each.tokens) for each in requests} == prompts


def test_a_manager_that_does_not_record_has_the_methods_it_always_had(
    tmp_path: Path, backend: Backend
) -> None:
    fresh, manager = KVCacheManager(CONFIG, backend), KVCacheManager(CONFIG, backend)
    core = dict(vars(manager._core)) if backend == "python" else {}
    before = dict(vars(manager))
    manager.start_recording(Recorder(tmp_path / "record"))
    manager.add_request(Request("a", [1]))
    manager.stop_recording()
    assert vars(manager) == before
    assert set(vars(manager)) == set(vars(fresh))
    if backend == "python":
        assert set(vars(manager._core)) == set(core)


def test_a_hit_that_is_not_the_last_look_up_is_spelled(tmp_path: Path, backend: Backend) -> None:
    config = Config(16, 2, hash_seed=b"x")
    manager = KVCacheManager(config, backend)
    for name in ("a", "b"):
        manager.add_request(Request(name, [1, 2, 3]))
    manager.allocate_slots("a", 3)
    manager.take_batch()
    hit = manager.get_computed_blocks("b")
    manager.start_recording(Recorder(tmp_path / "record"))
    manager.allocate_slots("b", 1, hit)
    manager.free("b")
    assert manager.get_computed_blocks("b") == hit
    manager.allocate_slots("b", 1, hit)
    manager.stop_recording()
    calls = list(read_calls(read_segment(tmp_path / "record" / "00000000.kvcrec")))
    assert calls[0].arguments["hit"] == hit
    assert calls[3].arguments["hit"].num_tokens == hit.num_tokens
    assert not hasattr(calls[3].arguments["hit"], "blocks")
    assert rerun(tmp_path / "record", [backend]).difference is None


def test_rows_far_apart_and_taken_again_are_told_apart(tmp_path: Path) -> None:
    need_twin()
    names = [str(row) for row in range(200)]  # a row's difference from the last: one or two bytes
    calls = [Call("add_request", (Request(name, [1]),)) for name in names]
    calls += [Call("allocate_slots", (name, 1)) for name in names]
    for some in (names[:64], names[::-1], ["0", "63", "127", "1", "64"], ["199", "0"], ["5", "?"]):
        calls += [Call("take_batch"), Call("append", (some, [2] * len(some)))]
    calls += [Call("free", ("7",)), Call("remove_request", ("7",)), Call("free", ("7",))]
    calls += [Call("add_request", (Request("row 7", [1]),)), Call("free", ("7",))]
    calls += [Call("free", ("row 7",)), Call("get_computed_blocks", ("7",))]
    config = Config(600, 4, hash_seed=b"x")
    states = record(tmp_path / "rust", config, calls, "rust")
    record(tmp_path / "python", config, calls, "python")
    assert contents(tmp_path / "rust") == contents(tmp_path / "python")
    assert check_replays(tmp_path / "rust", states, "python") == len(calls)


@pytest.mark.parametrize("form", [list, tuple, bytes, iter])
def test_tokens_of_any_form_are_recorded_as_what_they_are(
    tmp_path: Path, backend: Backend, form: Callable[[list[int]], Any]
) -> None:
    manager = KVCacheManager(CONFIG, backend)
    manager.start_recording(Recorder(tmp_path / "record"))
    manager.add_request(Request("a", form([1, 2, 3])))
    manager.add_tokens("a", form([4, 5, 6]))
    manager.stop_recording()
    added, more = read_calls(read_segment(tmp_path / "record" / "00000000.kvcrec"))
    assert added.arguments["request"].tokens.tolist() == [1, 2, 3]
    assert more.arguments["tokens"].tolist() == [4, 5, 6]
    assert manager.num_tokens("a") == 6


class Died(BaseException):
    """Ends a recording in the middle of a store."""


def test_a_frame_is_begun_before_its_first_byte_is_written(tmp_path: Path) -> None:
    manager = KVCacheManager(CONFIG, "python")
    manager.start_recording(Recorder(tmp_path, segment_bytes=1 << 12))
    manager.take_batch()
    core: Any = manager._core
    tape, words = core._tape, []

    def die(at: int, value: int) -> None:
        words.append(value)
        if len(words) == 2:
            raise Died
        type(tape)._set_word(tape, at, value)

    tape._set_word = die
    with pytest.raises(Died):
        manager.take_batch()
    assert words[0] == 1 << 31
    found = read_segment(segment_files(tmp_path)[0])
    assert (len(found.frames), found.has_tail, found.dropped_bytes) == (1, False, 0)


@pytest.mark.parametrize("in_cycle", [False, True])
def test_a_record_ends_with_its_manager(tmp_path: Path, backend: Backend, in_cycle: bool) -> None:
    calls = story()
    states = record(tmp_path / "stopped", CONFIG, calls, backend)
    recorder = Recorder(tmp_path / "dropped")
    manager = KVCacheManager(CONFIG, backend)
    manager.start_recording(recorder)
    for call in calls:
        perform_on(manager, call)
    if in_cycle:
        vars(manager)["itself"] = manager
    del manager
    gc.collect()
    (stopped,), (dropped,) = (segment_files(tmp_path / name) for name in ("stopped", "dropped"))
    assert dropped.read_bytes() == stopped.read_bytes()
    assert check_replays(tmp_path / "dropped", states, backend) == len(calls)
    recorder.rotate()
    assert (len(segment_files(recorder.folder)), recorder.error) == (1, None)
