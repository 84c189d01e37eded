# SPDX-License-Identifier: Apache-2.0
"""Traces of other forms: what is read of each, and what is refused by name."""

from __future__ import annotations

import gzip
import io
import json
from pathlib import Path

import pytest

from kvcore.replay import command, trace_command
from kvcore.replay.errors import (
    BadLine,
    HasTimes,
    LineTooLong,
    MissingRequestField,
    NeedsRate,
    NotAnObject,
    NotJSON,
    OutOfRange,
    TimeRunsBackwards,
    TraceFileError,
    UnreadForm,
    WrongKind,
)
from kvcore.replay.request_trace import TraceReader
from kvcore.replay.workload import TraceRequest

AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens"
BURST = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type"
MOONCAKE = '{"timestamp": 0, "input_length": 5, "output_length": 1, "hash_ids": [7]}'
SYSTEM = "You are a helpful assistant. " * 8


def read(text: str, *, rate: float | None = None, skip_bad: bool = False) -> list[TraceRequest]:
    reader = TraceReader(io.BytesIO(text.encode()), rate=rate, skip_bad=skip_bad, name="t")
    return list(reader)


def shared(one: TraceRequest, other: TraceRequest) -> int:
    """Count the leading ids that are equal."""
    pairs = enumerate(zip(one.hash_ids, other.hash_ids, strict=False))
    return next(
        (place for place, (a, b) in pairs if a != b), min(map(len, (one.hash_ids, other.hash_ids)))
    )


def conversation(*said: str) -> dict[str, object]:
    names = ("human", "gpt")
    parts = [{"from": names[place % 2], "value": each} for place, each in enumerate(said)]
    return {"id": "x", "conversations": parts}


@pytest.mark.parametrize(
    "times",
    [
        ("2023-11-16 18:17:03.9799600", "2023-11-16 18:17:05.4799600"),
        ("2024-05-10 00:00:00.009930+00:00", "2024-05-10 01:00:01.509930+01:00"),
    ],
)
def test_azure_has_lengths_and_times_and_no_prefix_repeats(times: tuple[str, str]) -> None:
    first, second = read(f"{AZURE}\n{times[0]},4808,10\n{times[1]},1024,0\n", rate=None)
    assert (first.line, first.arrival, first.prompt_len, first.output_len) == (2, 0.0, 4808, 10)
    assert second.arrival == pytest.approx(1.5)
    assert second.output_len == 0
    assert (len(first.hash_ids), len(second.hash_ids), first.unit) == (10, 2, 512)
    assert len({*first.hash_ids, *second.hash_ids}) == 12


def test_burstgpt_has_seconds_and_other_columns() -> None:
    rows = f"{BURST}\r\n5,ChatGPT,472,18,490,Conversation log\r\n45.5,GPT-4,9,0,9,API log\r\n"
    first, second = read(rows, rate=None)
    assert (first.arrival, first.prompt_len, first.output_len) == (0.0, 472, 18)
    assert (second.arrival, second.prompt_len, second.output_len) == (40.5, 9, 0)


def test_each_answer_of_a_conversation_is_a_request_behind_all_that_was_said() -> None:
    said = (SYSTEM, "a" * 400, "And then?", "b" * 30)
    for text in (
        json.dumps([conversation(*said), conversation("Hello")], indent=2),
        json.dumps([conversation(*said), conversation("Hello")]),
        json.dumps(conversation(*said)) + "\n" + json.dumps(conversation("Hello")),
    ):
        first, second = read(text, rate=2)
        assert (first.arrival, second.arrival) == (0.0, 0.5)
        size = len(SYSTEM) + 1
        assert (first.prompt_len, first.output_len) == (-(-size // 4), 100)
        assert second.prompt_len == -(-(size + 401 + 10) // 4)
        assert second.output_len == 8
        assert (first.unit, len(first.hash_ids)) == (16, -(-size // 64))
        assert shared(first, second) == size // 64


def test_vllm_prompts_share_what_their_texts_share() -> None:
    lines = [
        {"prompt": SYSTEM + "one", "output_tokens": 7},
        {"prompt": SYSTEM + "two"},
        {"prompt": "Other" + SYSTEM, "output_tokens": 0},
    ]
    first, second, third = read("\n".join(map(json.dumps, lines)), rate=4)
    assert [each.arrival for each in (first, second, third)] == [0.0, 0.25, 0.5]
    assert (first.output_len, second.output_len, third.output_len) == (7, 256, 0)
    assert shared(first, second) == len(SYSTEM) // 64
    assert shared(first, third) == 0


@pytest.mark.parametrize(
    ("text", "error", "said"),
    [
        (json.dumps([conversation("a", "b")]), NeedsRate, "t is ShareGPT's JSON.*--rate N"),
        ('{"prompt": "x"}', NeedsRate, "custom data set of vLLM's benchmark.*--rate N"),
        ('{"messages": []}', UnreadForm, "t is a file of chat messages, which is not supported"),
        ('{"custom_id": "1", "body": {}}', UnreadForm, "an OpenAI batch file"),
        ("PAR1\x15\x00", UnreadForm, "a Parquet file.*JSONL"),
    ],
)
def test_what_is_not_read_is_refused_by_name(
    text: str, error: type[TraceFileError], said: str
) -> None:
    with pytest.raises(error, match=said):
        read(text, rate=None)


@pytest.mark.parametrize(
    ("text", "error", "said"),
    [
        (f"{AZURE}\n2023-11-16 18:17:03,12", MissingRequestField, "line 2: column 3 is missing"),
        (f"{AZURE}\nyesterday,12,1", WrongKind, "timestamp must be seconds.*'yesterday'"),
        (f"{AZURE}\nnan,12,1", WrongKind, "timestamp must be a finite number, not 'nan'"),
        (f"{AZURE}\n1,1,1\ninf,12,1", WrongKind, "line 3: timestamp must be a finite number"),
        (f"{AZURE}\n1,-5,1", WrongKind, "prompt must be an integer from 0 .*not '-5'"),
        (f"{AZURE}\n1,5,1.5", WrongKind, "output must be an integer from 0 .*not '1.5'"),
        (f"{AZURE}\n1,2147483648,1", WrongKind, "prompt must be an integer from 0"),
        (f"{AZURE}\n1,{'9' * 5000},1", WrongKind, r"prompt .*not '9+\.\.\."),
        (f"{AZURE}\n1,5,1\r1,5,1", WrongKind, r"the line must be CSV \(new-line"),
        (f"{AZURE}\n1,5,1,{'x' * 200_000}", WrongKind, r"the line must be CSV \(field larger"),
        (f"{AZURE}\n1,0,1", OutOfRange, "prompt is 0, must be at least 1"),
        (f"{AZURE}\n9,5,1\n8,5,1", TimeRunsBackwards, "line 3"),
        ('{"prompt": "x"}\n{"prompt": ""}', WrongKind, "line 2: prompt must be a non-empty text"),
        ('{"prompt": "x"}\n{"text": ""}', MissingRequestField, "prompt is missing"),
        ('{"prompt": "x"}\n[1]', NotAnObject, "line 2"),
        ('{"prompt": "x"}\n{"prompt": ', NotJSON, "line 2: not JSON"),
        (
            '{"prompt": "x"}\n{"prompt": "y"} 3',
            NotJSON,
            "line 2: not JSON: an object is followed by",
        ),
        ('{"prompt": "x", "output_tokens": "9"}', WrongKind, "output_tokens must be an integer"),
        ('{"prompt": "x", "output_tokens": -1}', OutOfRange, "output_tokens is -1"),
        ('[{"id": 1}]', WrongKind, "conversations must be a list, not None"),
        ('[{"conversations": [3]}]', NotAnObject, "3"),
        ('[{"conversations": [{"from": "gpt"}]}]', MissingRequestField, "value is missing"),
        ('[{"conversations": [{"from": 1, "value": "x"}]}]', WrongKind, "from must be a text"),
        ('[\n  {\n "conversations": [', NotJSON, "the file ends inside an object"),
        ('[{"conversations" []}]', NotJSON, "line 1: not JSON"),
        (f'[{{"conversations": {"9" * 5000}}}]', NotJSON, "line 1: not JSON: Exceeds"),
    ],
)
def test_a_bad_line_says_what_is_wrong_with_it(text: str, error: type[BadLine], said: str) -> None:
    with pytest.raises(error, match=said):
        read(text, rate=None if text.startswith(AZURE) else 2)


@pytest.mark.parametrize("text", [f"{AZURE}\n1,5,1", "rubbish\n" + MOONCAKE])
def test_a_rate_for_a_trace_with_times_is_refused(text: str) -> None:
    assert len(read(text, rate=None, skip_bad=True)) == 1
    with pytest.raises(HasTimes, match="t has times of its own: omit --rate"):
        read(text, rate=2, skip_bad=True)


def test_a_line_that_is_not_utf_8_is_refused() -> None:
    with pytest.raises(WrongKind, match=r"line 2: the line must be UTF-8, not b'1,\\xff,1'"):
        list(TraceReader(io.BytesIO(AZURE.encode() + b"\n1,\xff,1"), name="t"))


def test_bad_lines_are_left_out_on_request() -> None:
    text = f"{AZURE}\n1000,0,1\n1,5,1\n2,9,1"  # times count from the first good line
    assert [each.arrival for each in read(text, skip_bad=True)] == [0.0, 1.0]
    text = f"{AZURE}\n1,5,1\nx,5,1\n2,7\n3,9,1"
    assert [each.prompt_len for each in read(text, skip_bad=True)] == [5, 9]
    text = '{"prompt": "abc"}\n{"prompt": 1}\n{"prompt": "abcde"}\n{"pro'
    assert [each.prompt_len for each in read(text, rate=2, skip_bad=True)] == [1, 2]


def test_a_line_that_is_too_long_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvcore.replay.request_trace.LINE_BYTES_MAX", 64)
    with pytest.raises(LineTooLong, match="line 2"):
        read('{"prompt": "x"}\n' + json.dumps({"prompt": "y" * 100}), rate=2)


def test_the_commands_read_them_and_say_what_is_to_be_known(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "prompts.jsonl.gz"
    lines = (json.dumps({"prompt": SYSTEM + str(n), "output_tokens": 3}) for n in range(20))
    trace.write_bytes(gzip.compress("\n".join(lines).encode()))
    assert command.main([str(trace), "--blocks", "64"]) == 2
    assert "which has no times: use --rate N" in capsys.readouterr().err
    words = [str(trace), "--blocks", "64", "--backend", "python", "--rate", "5", "--json"]
    assert command.main(words) == 0
    reported = capsys.readouterr()
    data = json.loads(reported.out)
    assert data["requests"]["finished"] == 20
    assert data["tokens"]["hit"] == data["tokens"]["ideal_hit"] > 0
    assert "4 bytes of text count as a token" in reported.err
    assert trace_command.main(["show", str(trace), "--rate", "5"]) == 0
    assert "20 requests in 3.8 s" in capsys.readouterr().out
