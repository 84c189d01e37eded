# SPDX-License-Identifier: Apache-2.0
"""A page's events of a record agree with the manager's states, step by step."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
from hypothesis import settings

from kvcore import Config, KVCacheManager, Request, _twin
from kvcore.codec.decode import decode
from kvcore.record.errors import InvalidRecorder
from kvcore.record.reader import segment_files
from kvcore.record.recorder import Recorder
from kvcore.trace.calls import Call, perform_on
from kvcore.view import columns
from kvcore.view.recording import watch
from tests.conftest import Backend
from tests.helpers.amount import examples
from tests.helpers.machine import Machine
from tests.record.records import CONFIG, record, story
from tests.view.pools import Pool, check_steps, of_state, read


class ViewedRuns(Machine):
    """Any calls in any order, the host tier and batches in flight too."""

    def teardown(self) -> None:
        super().teardown()
        if not hasattr(self, "run"):
            return
        backend: Backend = "rust" if _twin.available() else "python"
        with tempfile.TemporaryDirectory() as folder:
            options = {"segment_bytes": 1 + 97 * (len(self.run.calls) % 5), "keep_segments": 100}
            record(
                Path(folder, "record"), self.run.state.config, self.run.calls, backend, **options
            )
            check_steps(Path(folder, "record"), backend)


TestViewedRuns = ViewedRuns.TestCase
TestViewedRuns.settings = settings(max_examples=examples(15), stateful_step_count=30)


def test_a_story_is_followed_step_by_step(tmp_path: Path, backend: Backend) -> None:
    record(tmp_path / "record", CONFIG, story(), backend)
    num_batches = sum(call.name == "take_batch" for call in story())
    assert check_steps(tmp_path / "record", backend) == num_batches + 1


def test_a_block_whose_free_was_cancelled_is_free(tmp_path: Path, backend: Backend) -> None:
    config = Config(3, 1, null_block=False, hash_seed=b"tests", max_in_flight=1)
    calls = [
        *(Call("add_request", (Request(name, [0]),)) for name in "ab"),
        *(Call("allocate_slots", (name, 1)) for name in "ab"),
        Call("take_batch"),
        Call("free", ("a",)),
        Call("cancel", (0,)),
        Call("take_batch"),
    ]
    record(tmp_path / "record", config, calls, backend)
    assert check_steps(tmp_path / "record", backend) == 3


@pytest.mark.parametrize(
    ("pinned", "opened"),
    [
        ([], [Call("load", ("a", 1))]),
        ([], [Call("pin", ([0],)), Call("free", ("a",))]),
        ([Call("pin", ([0],))], [Call("free", ("a",)), Call("unpin", ([0],))]),
        ([Call("pin", ([0],)), Call("free", ("a",))], [Call("unpin", ([0],))]),
    ],
    ids=["load", "pin", "free and unpin", "unpin"],
)
def test_blocks_that_cancelled_commands_held_or_freed_are_shown_so(
    pinned: list[Call], opened: list[Call], tmp_path: Path, backend: Backend
) -> None:
    config = Config(3, 1, null_block=False, hash_seed=b"tests", max_in_flight=2)
    calls = [
        *(Call("add_request", (Request("a", [0, 1, 2]),)), Call("allocate_slots", ("a", 1))),
        *(*pinned, Call("take_batch"), Call("take_batch")),
        *(*opened, Call("cancel", (1,)), Call("take_batch")),
    ]
    record(tmp_path / "record", config, calls, backend)
    assert check_steps(tmp_path / "record", backend) == 4


def test_what_a_take_merges_is_in_the_next_step(tmp_path: Path, backend: Backend) -> None:
    config = Config(4, 1, null_block=False, hash_seed=b"tests", duplicates="merge")
    calls = [
        *(Call("add_request", (Request(name, [0]),)) for name in "ab"),
        *(Call("allocate_slots", (name, 1)) for name in "ab"),
        Call("take_batch"),
        Call("take_batch"),
    ]
    record(tmp_path / "record", config, calls, backend)
    assert check_steps(tmp_path / "record", backend) == 3
    steps = watch(tmp_path / "record", backend, None, None).history.events.sections()
    assert [free for kind, _, _, free in read(steps) if kind == columns.BATCH] == [4, 2, 3]


def test_who_wrote_hit_and_evicted_is_told(tmp_path: Path, backend: Backend) -> None:
    manager = KVCacheManager(CONFIG, backend)
    manager.start_recording(Recorder(tmp_path))
    for name, prompt in (("a", [1, 2, 3]), ("b", [1, 2, 4]), ("c", list(range(10, 24)))):
        manager.add_request(Request(name, prompt))
        hit = manager.get_computed_blocks(name)
        manager.allocate_slots(name, len(prompt) - hit.num_tokens, hit)
        manager.take_batch()
        manager.free(name)
        manager.take_batch()
    manager.stop_recording()
    history = watch(tmp_path, backend, None, None).history
    names = [
        (columns.KINDS[kind], history.names[y], z)
        for kind, _, y, z in read(history.events.sections())
        if columns.TAKE <= kind <= columns.FREED_CACHED
    ]
    assert names[:2] == [("take", "a", 0), ("take", "a", 1)]
    assert names[2:4] == [("freed", "a", 1), ("freed_cached", "a", 0)]
    assert names[4:6] == [("hit", "b", 0), ("take", "b", 1)]
    taken = [kind for kind, name, _ in names if name == "c" and kind.startswith("take")]
    assert sorted(taken) == ["take"] * 6 + ["take_evicting"]


def test_a_record_whose_start_is_gone_begins_with_its_state(
    tmp_path: Path, backend: Backend
) -> None:
    record(tmp_path, CONFIG, story(), backend, segment_bytes=40, keep_segments=3)
    assert segment_files(tmp_path)[0].name != "00000000.kvcrec"
    with pytest.raises(InvalidRecorder, match="last call=0: the record begins after it"):
        watch(tmp_path, backend, None, 0)
    viewed = watch(tmp_path, backend, None, None)
    assert viewed.done.difference is None
    manager = KVCacheManager(CONFIG, backend)
    for call in story():
        perform_on(manager, call)
    pool = Pool()
    for event in read(viewed.history.events.sections()):
        pool.follow(event)
    assert pool.shown(viewed.history.names) == of_state(manager.state())


def test_calls_can_be_chosen_and_the_open_batch_is_shown(tmp_path: Path, backend: Backend) -> None:
    record(tmp_path, CONFIG, story(), backend)
    history = watch(tmp_path, backend, 5, 7).history
    events = list(read(history.events.sections()))
    assert [kind for kind, *_ in events].count(columns.BATCH) == 2
    assert events[-1][2] == 0, "no call took the last batch"
    assert history.names == ["a", "b"]
    behind = watch(tmp_path, backend, 10_000, None).history
    assert behind.num_steps == 1, "the state behind the last call"
    assert history.outcomes == ["done", "TooManyTokens"]


def test_behind_a_gap_the_page_goes_on_from_the_next_state(
    tmp_path: Path, backend: Backend
) -> None:
    states = record(tmp_path, CONFIG, story(), backend, segment_bytes=1)
    segment_files(tmp_path)[2].unlink()
    viewed = watch(tmp_path, backend, None, None)
    assert viewed.done.missing_calls > 0
    events = list(read(viewed.history.events.sections()))
    assert [kind for kind, *_ in events].count(columns.RESET) == 2
    pool = Pool()
    for event in events:
        pool.follow(event)
    assert pool.shown(viewed.history.names) == of_state(decode(states[-1]))
