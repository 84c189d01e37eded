# SPDX-License-Identifier: Apache-2.0
"""A record by keys is explained in whole blocks, as the same run recorded with tokens is."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st

from kvcore import Config, KVCacheManager, Request
from kvcore.explain.explanation import Explanation
from kvcore.record.recorder import Recorder
from kvcore.replay.explain.by_keys import WHOLE
from kvcore.replay.explain.command import main
from kvcore.replay.explain.explained import Explained
from kvcore.replay.explain.records import explain_record
from kvcore.trace.calls import Call
from kvcore.types.keys import ONE_WAY
from tests.conftest import Backend
from tests.explain.watched import check
from tests.helpers.amount import examples
from tests.helpers.machine import Machine
from tests.record.records import record


def in_whole_blocks(each: Explanation) -> tuple[object, ...]:
    """Return what a record by keys tells of an admission, without names."""
    whole = each.lengths[WHOLE]
    causes = [
        (token, span.cause, span.removal and (span.removal.call, span.removal.kind))
        for span in each.spans
        for token in range(span.start, min(span.end, whole))
    ]
    return each.call, each.step, each.again, each.num_tokens, each.lengths[WHOLE:], causes


class ExplainedByKeys(Machine):
    """Any calls in any order, and ids that are never used again, as in a record by keys."""

    least = 6
    most = 14
    longest = 12
    twin = False

    def new_name(self, _: st.DataObject) -> str:
        return f"number {len(self.run.calls)}"

    def teardown(self) -> None:
        super().teardown()
        if not hasattr(self, "run"):
            return
        config, calls = self.run.state.config, self.run.calls
        if config.hashing not in ONE_WAY or not config.enable_caching:
            return
        told = []
        for tokens in ("text", "keys"):
            explained = Explained(lambda _: True)
            with tempfile.TemporaryDirectory() as base:
                record(Path(base), config, calls, "python", tokens=tokens, keep_segments=100)
                explain_record(base, explained, "python")
            told.append(explained.kept)
        for each in told[1]:
            check(each)
            assert each.ideal == each.lengths[WHOLE]
        assert [*map(in_whole_blocks, told[1])] == [*map(in_whole_blocks, told[0])]


def conversation(folder: Path, config: Config, backend: Backend) -> None:
    """Record by keys: another user takes two of the three blocks of a user who comes back."""
    manager = KVCacheManager(config, backend)
    manager.start_recording(Recorder(folder, tokens="keys"))
    for name, prompt in (("a", [1, 2, 3, 4, 5, 6]), ("b", [7] * 8), ("c", [1, 2, 3, 4, 5, 6, 8])):
        manager.add_request(Request(name, prompt))
        hit = manager.get_computed_blocks(name)
        manager.allocate_slots(name, len(prompt) - hit.num_tokens, hit)
        manager.take_batch()
        manager.free(name)
    manager.stop_recording()


def test_the_command_names_requests_by_their_calls(
    tmp_path: Path, backend: Backend, capsys: pytest.CaptureFixture[str]
) -> None:
    conversation(tmp_path / "record", Config(6, 2), backend)  # five blocks besides the null block
    words = [str(tmp_path / "record"), "--backend", backend, "--request", "10"]
    assert main(words) == 0
    shown = capsys.readouterr().out
    assert "request 10, step 2: 7 tokens, ideal 6, hits 2" in shown
    assert "differs from request '0' at token 6\n" in shown
    assert "2 to 6: evicted by request '5', by a prompt's allocation, in step 1" in shown


def test_accepted_drafts_are_known(tmp_path: Path, backend: Backend) -> None:
    config = Config(9, 2)
    calls = [
        Call("add_request", (Request("a", [1, 2, 3]),)),
        Call("allocate_slots", ("a", 3)),
        Call("take_batch"),
        Call("add_drafts", ("a", [4, 9])),
        Call("allocate_slots", ("a", 2)),
        Call("take_batch"),
        Call("accept", ("a", 1)),
        Call("free", ("a",)),
        Call("add_request", (Request("b", [1, 2, 3, 4, 5]),)),
        Call("allocate_slots", ("b", 5)),
    ]
    record(tmp_path / "record", config, calls, backend, tokens="keys")
    explained = Explained(lambda _: True)
    explain_record(tmp_path / "record", explained, backend)
    assert [each.ideal for each in explained.kept] == [0, 4]


def test_a_record_without_hashes_is_not_explained(
    tmp_path: Path, backend: Backend, capsys: pytest.CaptureFixture[str]
) -> None:
    conversation(tmp_path / "record", Config(6, 2, enable_caching=False), backend)
    assert main([str(tmp_path / "record"), "--backend", backend]) == 2
    assert "an explanation without prefix caching needs tokens" in capsys.readouterr().err


TestExplainedByKeys = ExplainedByKeys.TestCase
TestExplainedByKeys.settings = settings(max_examples=examples(25), stateful_step_count=40)
