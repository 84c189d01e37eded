# SPDX-License-Identifier: Apache-2.0
"""A record by keys has nothing of the content of requests, and is replayed with equal values."""

from __future__ import annotations

import random
import struct
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from kvcore import Config, Group, KVCacheManager, LoRA, MediaItem, PromptEmbeds, Request, _twin
from kvcore.record.errors import InvalidRecorder, RecordNeedsText
from kvcore.record.reader import read_calls, segment_files
from kvcore.record.recorder import Recorder, record_if_requested
from kvcore.record.segment import KEYS, read_segment
from kvcore.replay.explain.command import main as explain
from kvcore.replay.records.attempt import read_items
from kvcore.replay.records.command import main as replay
from kvcore.replay.records.rerun import rerun
from kvcore.trace.calls import Call, perform_on
from kvcore.types.config import Publish
from kvcore.types.keys import ONE_WAY, Hashing
from kvcore.view.command import main as view
from tests.conftest import Backend, need_twin
from tests.helpers.amount import examples
from tests.helpers.machine import Machine
from tests.record.records import CONFIG, INSIDE, LEVELS, contents, levels_story, record, story

BY_KEYS: dict[str, Any] = {"tokens": "keys", "segment_bytes": 1, "keep_segments": 100}
"""A record by keys with a file per step, whose state must be that of the replay."""
NAMES = (
    *("request-of-alice", "child-of-alice", "salt-of-alice", "adapter-of-alice", "of/a/path"),
    *("picture-of-alice", "pin-of-alice", "salt-of-bob", "seed-of-alice"),
)
TENANTS = Config(
    12,
    groups=(Group(2),),
    hash_seed=b"seed-of-alice",
    enable_events=True,
    num_host_blocks=4,
    max_model_len=12,
    floors={"salt-of-bob": 1, "salt-of-alice": 2},
    max_pinned_blocks=2,
)


class RunsByKeys(Machine):
    """Any calls in any order, recorded by both languages: equal bytes, equal states again."""

    def teardown(self) -> None:
        super().teardown()
        if not hasattr(self, "run") or self.run.state.config.hashing not in ONE_WAY:
            return
        config, calls = self.run.state.config, self.run.calls
        start = len(calls) // 2 if len(calls) % 3 == 0 else 0
        with tempfile.TemporaryDirectory() as base:
            record(Path(base, "python"), config, calls, "python", start, **BY_KEYS)
            assert rerun(Path(base, "python"), ["python"]).difference is None
            if _twin.available():
                record(Path(base, "rust"), config, calls, "rust", start, **BY_KEYS)
                assert contents(Path(base, "rust")) == contents(Path(base, "python"))
                assert rerun(Path(base, "rust"), ["rust"]).difference is None


TestRunsByKeys = RunsByKeys.TestCase
TestRunsByKeys.settings = settings(max_examples=examples(20), stateful_step_count=30)


def secret_story(prompt: list[int]) -> list[Call]:
    """Return calls of a tenant with an adapter, media, drafts, a fork, a swap and a pin."""
    alice = Request(
        "request-of-alice",
        prompt,
        lora=LoRA("adapter-of-alice", "of/a/path"),
        media=[MediaItem("picture-of-alice", 1, 2)],
        cache_salt="salt-of-alice",
    )
    return [
        Call("add_request", (alice,)),
        Call("allocate_slots", ("request-of-alice", len(prompt))),
        Call("take_batch"),
        Call("add_drafts", ("request-of-alice", prompt[:2])),
        Call("allocate_slots", ("request-of-alice", 2)),
        Call("take_batch"),
        Call("accept", ("request-of-alice", 2)),
        Call("pin_prefix", ("pin-of-alice", "request-of-alice", 2)),
        Call("pin_prefix", ("pin-of-alice", "request-of-alice", 2)),
        Call("fork", ("request-of-alice", "child-of-alice")),
        Call("append", (["child-of-alice", "request-of-alice"], prompt[:2])),
        Call("take_batch"),
        Call("truncate", ("request-of-alice", len(prompt) - 1)),
        Call("allocate_slots", ("request-of-alice", 0, None), {"num_lookahead_tokens": 1}),
        Call("append", (["request-of-alice"], prompt[-1:])),
        Call("swap_out", (["child-of-alice"],)),
        Call("take_batch"),
        Call("unpin_prefix", ("pin-of-alice",)),
        Call("free", ("request-of-alice",)),
        Call("remove_request", ("request-of-alice",)),
        Call("take_batch"),
        Call("add_request", (Request("request-of-alice", prompt, block_hashes=[b"h" * 32]),)),
        Call("add_request", (Request("salt-of-bob", prompt[:3], cache_salt="salt-of-bob"),)),
        Call("take_batch"),
    ]


def prompts() -> list[list[int]]:
    """Return random prompts, and some that look like other parts of a record."""
    dice = random.Random(7)
    made = [[dice.randrange(1 << 24, 1 << 32) for _ in range(size)] for size in (3, 4, 5, 7)]
    text = struct.unpack("<5I", b"request-of-alicesalt")
    return [*made, [0xDEADBEEF] * 6, [*text], [*range(1 << 31, (1 << 31) + 6)]]


@pytest.mark.parametrize("prompt", prompts())
@pytest.mark.parametrize("start", [0, 13])
def test_no_content_is_found_in_a_record_by_keys(
    tmp_path: Path, backend: Backend, prompt: list[int], start: int
) -> None:
    calls = secret_story(prompt)
    tokens = [struct.pack("<I", token) for token in prompt]
    secrets = [*(name.encode() for name in NAMES), *tokens]
    for form in ("text", "keys"):
        record(tmp_path / form, TENANTS, calls, backend, start, **BY_KEYS | {"tokens": form})
        found = [
            each for each in secrets if any(each in data for data in contents(tmp_path / form))
        ]
        assert found == (secrets if form == "text" else [])
        assert rerun(tmp_path / form, [backend]).difference is None


@pytest.mark.parametrize(
    ("config", "calls"),
    [
        (CONFIG, story()),
        (INSIDE, story()),
        (LEVELS, levels_story()),
        (TENANTS, secret_story([1, 2, 3, 4])),
    ],
)
def test_both_languages_record_and_replay_the_same_keys(
    tmp_path: Path, config: Config, calls: list[Call]
) -> None:
    need_twin()
    for name in ("python", "rust"):
        record(tmp_path / name, config, calls, name, **BY_KEYS)
    assert contents(tmp_path / "python") == contents(tmp_path / "rust")
    assert replay([str(tmp_path / "rust"), "--backend", "both"]) == 0


@pytest.mark.parametrize("publish", ["scheduled", "completed"])
@pytest.mark.parametrize("start", [0, 2, 4])
def test_a_record_by_keys_has_no_events_of_checkpoints(
    tmp_path: Path, backend: Backend, publish: Publish, start: int
) -> None:
    groups = (Group(2), Group(2, kind="state"))
    flight: dict[str, Any] = {"max_in_flight": 2, "publish": publish, "hash_block_size": 1}
    config = Config(12, groups=groups, enable_events=True, **flight)
    tokens = [0xDEADBEEF] * 5
    calls = [
        Call("add_request", (Request("a", tokens),)),
        Call("allocate_slots", ("a", 4)),  # an event names this state
        Call("take_batch"),
        Call("allocate_slots", ("a", 1), {"checkpoint": True}),  # none names this one
        Call("take_batch"),
        Call("complete", (0,)),
        Call("take_batch"),
        Call("complete", (1,)),
        Call("take_batch"),
    ]
    record(tmp_path / "record", config, calls, backend, start, **BY_KEYS)
    assert rerun(tmp_path / "record", [backend]).difference is None
    token = struct.pack("<I", tokens[0])
    assert not any(token in data for data in contents(tmp_path / "record"))


def test_a_refilled_block_keeps_its_key_as_its_hash_comes_with_the_call(
    tmp_path: Path, backend: Backend
) -> None:
    calls = [
        Call("add_request", (Request("a", [1, 2, 3, 4]),)),
        Call("allocate_slots", ("a", 4)),
        Call("take_batch"),
        Call("truncate", ("a", 3)),
        Call("append", (["a"], [4])),
        Call("take_batch"),
    ]
    record(tmp_path / "record", CONFIG, calls, backend, **BY_KEYS)
    assert rerun(tmp_path / "record", [backend]).difference is None
    made = [
        each
        for file in segment_files(tmp_path / "record")
        for each in read_calls(read_segment(file))
    ]
    assert [len(each.hashes["0"]) for each in made if each.hashes] == [1]


@pytest.mark.parametrize("name", ["0", "1", "start-0", "?"])
def test_ids_may_be_the_names_that_records_use(tmp_path: Path, backend: Backend, name: str) -> None:
    calls = [Call("add_request", (Request(each, [1, 2, 3]),)) for each in ("b", name, name)]
    calls += [Call("free", (each,)) for each in (name, "b", "nobody", "")]
    for start in (0, 2):
        folder = tmp_path / str(start)
        record(folder, CONFIG, calls, backend, start, **BY_KEYS)
        assert rerun(folder, [backend]).difference is None


def test_misuse_by_content_is_not_made_again(tmp_path: Path, backend: Backend) -> None:
    media = [MediaItem("x", 2, 1), MediaItem("y", 0, 1)]
    calls = [
        Call("add_request", (Request("a", [1, -2]),)),
        Call("add_request", (Request("a", [1, 2, 3], media=media),)),
        Call("add_request", (Request("a", [1], prompt_embeds=PromptEmbeds(b"abc", 2)),)),
        Call("add_request", (Request("a", [1, 2], cache_salt=""),)),
        Call("add_request", (Request("a", [1, 2], block_hashes=[b""]),)),
        Call("add_request", (Request("a", [1, 2]),)),
        Call("add_block_hashes", ("a", [bytes(32)])),
        Call("append", (["a"], [-1])),
    ]
    record(tmp_path / "record", CONFIG, calls, backend, **BY_KEYS)
    (file,) = segment_files(tmp_path / "record")
    assert [str(each.result) for each in read_calls(read_segment(file))] == [
        *("InvalidToken", "UnsortedMedia", "CountMismatch", "InvalidExtraKey"),
        *("WrongBlockHashes", "done 0", "WrongBlockHashes", "InvalidToken"),
    ]
    assert rerun(tmp_path / "record", [backend]).difference is None


@pytest.mark.parametrize("hashing", ["xxh3", "siphash"])
def test_hashes_that_are_not_one_way_are_refused(
    tmp_path: Path, backend: Backend, hashing: Hashing
) -> None:
    weak = KVCacheManager(Config(8, 2, hashing=hashing), backend)
    weak.add_request(Request("a", [1, 2, 3]))
    before = weak.encode()
    with pytest.raises(InvalidRecorder, match="hashes of siphash and xxh3"):
        weak.start_recording(Recorder(tmp_path / "refused", tokens="keys"))
    assert weak.encode() == before
    assert list((tmp_path / "refused").iterdir()) == []
    recorder = Recorder(tmp_path / "ended", tokens="keys")
    manager = KVCacheManager(CONFIG, backend)
    manager.start_recording(recorder)
    with pytest.warns(RuntimeWarning, match="siphash and xxh3"):
        manager.restore(before)
    manager.add_request(Request("b", [1]))
    assert isinstance(recorder.error, InvalidRecorder)
    assert len(contents(tmp_path / "ended")) == 1
    with pytest.raises(InvalidRecorder, match='must be "text" or "keys"'):
        Recorder(tmp_path / "wrong", tokens="none")  # type: ignore[arg-type] # a wrong word


def test_a_record_by_keys_is_viewed_and_explained_but_not_shrunk(
    tmp_path: Path, backend: Backend, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, page = tmp_path / "record", tmp_path / "page.html"
    record(folder, TENANTS, secret_story([1 << 30] * 5), backend, **BY_KEYS)
    assert view([str(folder), "--html", str(page), "--backend", backend]) == 0
    assert not any(name in page.read_text() for name in NAMES)
    assert explain([str(folder), "--backend", backend]) == 0
    assert not any(name in capsys.readouterr().out for name in NAMES)
    with pytest.raises(RecordNeedsText, match="a shorter run needs tokens"):
        read_items(folder, backend)


def test_an_engine_is_asked_for_keys(
    tmp_path: Path, backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVCORE_RECORD", str(tmp_path))
    for tokens, flags in (("keys", KEYS), ("text", 0), ("", 0)):
        monkeypatch.setenv("KVCORE_RECORD_TOKENS", tokens)
        manager = KVCacheManager(CONFIG, backend)
        record_if_requested(manager)
        perform_on(manager, story()[0])
        manager.stop_recording()
        *_, folder = sorted(tmp_path.iterdir())
        (file,) = segment_files(folder)
        assert read_segment(file).header.flags == flags
    monkeypatch.setenv("KVCORE_RECORD_TOKENS", "none")
    with pytest.raises(InvalidRecorder, match='must be "text" or "keys"'):
        record_if_requested(KVCacheManager(CONFIG, backend))
