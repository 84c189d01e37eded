# SPDX-License-Identifier: Apache-2.0
"""Every text trace gives its outcomes on every backend. `pytest --rewrite` writes them anew."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvcore.trace import trace_file
from kvcore.trace.text import read_tokens, write_tokens
from kvcore.transitions import TRANSITIONS
from kvcore.types.errors import TraceError
from tests.conftest import Backend

TRACES = sorted(Path(__file__).parent.rglob("*.trace"))
STORY = """\
config num_blocks=4 block_size=2
# A reason.
add_request a 1-3
  = row 0
queue
  = 1 2 3
"""


@pytest.mark.parametrize("path", TRACES, ids=lambda path: path.stem)
def test_trace_gives_its_outcomes(
    path: Path, backend: Backend, request: pytest.FixtureRequest
) -> None:
    if request.config.getoption("--rewrite"):
        text = path.read_text(encoding="utf-8")
        path.write_text(
            trace_file.rewrite(text, source=path.name, backend=backend), encoding="utf-8"
        )
    trace_file.replay(trace_file.read_trace(path), backend)


def test_every_trace_explains_itself_before_its_first_call() -> None:
    for path in TRACES:
        assert path.read_text(encoding="utf-8").startswith("# "), path.name


def test_every_trace_has_a_name_of_its_own() -> None:
    """A seeded bug names its trace without the folder."""
    assert len({path.stem for path in TRACES}) == len(TRACES)


def test_every_transition_has_a_story() -> None:
    reported = {call.verb for path in TRACES for call in trace_file.read_trace(path).calls}
    assert reported >= set(TRANSITIONS)


@pytest.mark.parametrize(
    ("text", "line", "reason"),
    [
        ("", 1, "there is no config"),
        ("add_request a 1\n", 1, "a call before the config"),
        ("  = 3\n", 1, "an outcome without a call"),
        ("config num_blocks=4\nconfig num_blocks=4\n", 2, "a second config"),
        ("config num_blocks\n", 1, "'num_blocks' is not name=value"),
        ("config num_bloks=4\n", 1, "num_bloks"),
        ("config num_blocks=4 publish=late publish=completed\n", 1, "takes no 'publish=late'"),
        ("config num_blocks=0\n", 1, "num_blocks=0"),
        ("config num_blocks=4\n\nfly a\n", 3, "there is no call 'fly'"),
        ("config num_blocks=4\nfree\n", 2, "free cannot take nothing"),
        ("config num_blocks=4\nadd_request a x\n", 2, "add_request cannot take a x"),
    ],
)
def test_unreadable_trace_names_source_line_and_reason(text: str, line: int, reason: str) -> None:
    with pytest.raises(TraceError) as caught:
        trace_file.replay(trace_file.parse_trace(text, source="story.trace"), "python")
    assert caught.value.fields["source"] == "story.trace"
    assert caught.value.fields["line"] == line
    assert reason in str(caught.value)


@pytest.mark.parametrize(
    ("old", "new"),
    [("= 1 2 3", "= 1 3 2"), ("  = 1 2 3\n", ""), ("= 1 2 3", "= 1 2 3\n  ! Allocate 1")],
)
def test_wrong_missing_or_extra_outcome_is_told_with_its_line(old: str, new: str) -> None:
    changed = trace_file.parse_trace(STORY.replace(old, new), source="story.trace")
    with pytest.raises(TraceError) as caught:
        trace_file.replay(changed, "python")
    assert caught.value.fields["line"] == 5
    assert "= 1 2 3" in str(caught.value)


def test_rewrite_puts_real_outcomes_and_keeps_calls_and_comments() -> None:
    wrong = STORY.replace("= row 0", "= row 7").replace("  = 1 2 3\n", "")
    assert trace_file.rewrite(wrong, source="story.trace", backend="python") == STORY


@pytest.mark.parametrize(
    ("tokens", "text"),
    [([7], "7"), ([0, 1, 2, 3], "0-3"), ([0, 1, 9, 3, 4], "0-1,9,3-4"), ([5, 5, 4], "5,5,4")],
)
def test_tokens_are_written_as_they_are_read(tokens: list[int], text: str) -> None:
    assert write_tokens(tokens) == text
    assert read_tokens(text) == tokens


@pytest.mark.parametrize(
    "call",
    [
        "add_request b 0-4294967295",  # would be 2**32 tokens
        "add_request b 4294967296",
        "add_request b 1_0",
        "add_request b \u0661",  # a digit, and none of ours
        "add_request b 1 media=x@0+0",
        "add_request b 1 media=x@-1+1",
        "add_request b 1 lora=",
        "add_request b 1 skip=yes",
        "allocate_slots a 9223372036854775808",
        "allocate_slots a 1 hit",
        "allocate_slots a 1 delay=1",
        "complete_operation 0 maybe",
        "queue 1",
        "free",
        "fly",
    ],
)
def test_a_call_that_cannot_be_read_is_named_with_its_line(backend: Backend, call: str) -> None:
    with pytest.raises(TraceError) as caught:
        trace_file.outcomes(
            trace_file.parse_trace(f"{STORY}{call}\n", source="story.trace"), backend
        )
    assert caught.value.fields["line"] == 7


@pytest.mark.parametrize(
    "word",
    [
        *("num_blocks=65537", "num_host_blocks=2147483647", "num_blocks=-1", "num_blocks=yes"),
        *("hash_seed=a", "null_block=1", "eviction=fifo", "groups=full_attention", "block_size=0"),
        *("groups=full_attention:2:3:4", "groups=full_attention:2+fast", "null_block"),
    ],
)
def test_a_config_that_cannot_be_read_is_named_with_its_line(word: str) -> None:
    with pytest.raises(TraceError) as caught:
        trace_file.parse_trace(f"config num_blocks=4 block_size=2 {word}", source="story.trace")
    assert caught.value.fields["line"] == 1


def test_the_later_of_two_words_holds_whatever_they_are() -> None:
    words = "groups=full_attention:4 block_size=2"
    found = trace_file.parse_trace(f"config num_blocks=4 {words}", source="story.trace")
    assert found.config.block_size == 2


def test_lines_end_with_a_line_feed_and_words_with_a_space() -> None:
    text = STORY.replace("\n", "\r\n").replace("add_request a", "add_request\ta\u2028b")
    words = trace_file.parse_trace(text, source="story.trace").calls[0].words
    assert words == ("a\u2028b", "1-3")


def test_a_byte_order_mark_is_skipped(tmp_path: Path) -> None:
    path = tmp_path / "marked.trace"
    path.write_text(STORY, encoding="utf-8-sig")
    marked = trace_file.read_trace(path)
    assert marked.calls == trace_file.parse_trace(STORY, source="story.trace").calls


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    path = tmp_path / "latin.trace"
    with pytest.raises(TraceError, match=r"latin\.trace, line 0: .*No such file"):
        trace_file.read_trace(path)
    path.write_bytes(b"config \xff")
    with pytest.raises(TraceError, match=r"latin\.trace, line 0: .*utf-8"):
        trace_file.read_trace(path)


def test_a_request_that_is_not_known_is_misuse(backend: Backend) -> None:
    text = f"{STORY}host_table b\n  = error UnknownRequest request=b\n"
    trace_file.replay(trace_file.parse_trace(text, source="story.trace"), backend)
