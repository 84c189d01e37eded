# SPDX-License-Identifier: Apache-2.0
"""Reading traces: both forms, and each thing that can be wrong with a line."""

from __future__ import annotations

import importlib
import io
import json
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any, BinaryIO

import pytest

from kvcore.replay import request_trace
from kvcore.replay.errors import (
    BadLine,
    EmptyTrace,
    LengthsDiffer,
    LineTooLong,
    MissingRequestField,
    NotAnObject,
    NotJSON,
    OutOfRange,
    TimeRunsBackwards,
    UnreadableTrace,
    WrongKind,
)
from kvcore.replay.request_trace import TraceReader
from kvcore.replay.workload import TraceRequest
from kvcore.types.errors import KvcoreError


def line(**changes: Any) -> bytes:
    """Return a good line, but for the changes; a field that is None is left out."""
    row: dict[str, Any] = {"timestamp": 1500, "input_length": 600, "output_length": 7}
    row |= {"hash_ids": [4, 9]} | changes
    return json.dumps({name: each for name, each in row.items() if each is not None}).encode()


def read(*lines: bytes, skip_bad: bool = False) -> list[TraceRequest]:
    reader = TraceReader(io.BytesIO(b"\n".join(lines)), skip_bad=skip_bad, name="t.jsonl")
    return list(reader)


def test_a_mooncake_line_is_a_request_in_seconds() -> None:
    _, request = read(line(timestamp=0), line())
    assert (request.line, request.arrival, request.unit) == (2, 1.5, 512)
    assert (request.prompt_len, request.output_len) == (600, 7)
    assert list(request.hash_ids) == [4, 9]


def test_a_bailian_line_has_seconds_and_sixteen_tokens_an_id() -> None:
    fields = {"chat_id": 3, "parent_chat_id": -1, "type": "text", "turn": 1}
    fields |= {"input_length": 33, "hash_ids": [1, 2, 3]}
    _, request = read(line(timestamp=0, **fields), line(timestamp=61.25, **fields))
    assert (request.arrival, request.unit, request.prompt_len) == (61.25, 16, 33)


def test_times_count_from_the_first_good_line() -> None:
    """A trace may have times since 1970, or be cut from the middle of a longer one."""
    since_1970 = 1_700_000_000_000
    rows = [line(timestamp=since_1970 + after) for after in (0, 250, 250, 1500)]
    requests = read(line(input_length=0), *rows, skip_bad=True)
    assert [each.arrival for each in requests] == [0.0, 0.25, 0.25, 1.5]


def test_the_first_good_line_decides_the_form() -> None:
    bailian = line(timestamp=2, input_length=16, hash_ids=[1], chat_id=1)
    with pytest.raises(LengthsDiffer, match=r"line 2: .*600 takes 38 ids of 16 tokens"):
        read(bailian, line())


def test_blank_lines_and_foreign_fields_mean_nothing() -> None:
    requests = read(b"", line(), b"  ", line(model="x"), b"")
    assert [each.line for each in requests] == [2, 4]


BAD: list[tuple[bytes, type[BadLine], str]] = [
    (line()[:30], NotJSON, "line 2: not JSON: "),
    (b"\xff\xfe", NotJSON, "line 2: not JSON: "),
    (b'{"timestamp": "\xff"}', NotJSON, "line 2: not JSON: "),
    (b"[" * 100_000, NotJSON, "line 2: not JSON: "),
    (b"[1, 2]", NotAnObject, "line 2: a request is a JSON object, not [1, 2]"),
    (b"7", NotAnObject, "line 2: a request is a JSON object, not 7"),
    (line(timestamp=None), MissingRequestField, "line 2: timestamp is missing"),
    (line(input_length=None), MissingRequestField, "line 2: input_length is missing"),
    (line(output_length=None), MissingRequestField, "line 2: output_length is missing"),
    (line(hash_ids=None), MissingRequestField, "line 2: hash_ids is missing"),
    (line(timestamp="5"), WrongKind, "line 2: timestamp must be a number, not '5'"),
    (line(input_length="5"), WrongKind, "line 2: input_length must be an integer, not '5'"),
    (line(output_length=True), WrongKind, "line 2: output_length must be an integer, not True"),
    (line(input_length=600.5), WrongKind, "line 2: input_length must be an integer, not 600.5"),
    (line(hash_ids="4, 9"), WrongKind, "line 2: hash_ids must be a list of integers"),
    (line(hash_ids=[4, "9"]), WrongKind, "line 2: hash_ids must be a list of integers"),
    (line(timestamp=-1), OutOfRange, "line 2: timestamp is -1.0, must be at least 0"),
    (line(input_length=-600), OutOfRange, "line 2: input_length is -600, must be at least 1"),
    (
        line(input_length=0, hash_ids=[]),
        OutOfRange,
        "line 2: input_length is 0, must be at least 1",
    ),
    (line(output_length=-1), OutOfRange, "line 2: output_length is -1, must be at least 0"),
    (line(output_length=2**63), OutOfRange, f"must be at most {2**62}"),
    (line(hash_ids=[4, -9]), OutOfRange, "line 2: an id is -9, must be from 0 to 2**64 - 1"),
    (line(hash_ids=[4, 2**64]), OutOfRange, "line 2: an id is 18446744073709551616"),
    (
        line(hash_ids=[4]),
        LengthsDiffer,
        "line 2: input_length 600 takes 2 ids of 512 tokens, hash_ids has 1",
    ),
    (line(input_length=513, hash_ids=[1, 2, 3]), LengthsDiffer, "hash_ids has 3"),
    (
        line(timestamp=1499),
        TimeRunsBackwards,
        "line 2: timestamp 1499.0 is before the previous one, 1500.0",
    ),
]


@pytest.mark.parametrize(("bad", "kind", "says"), BAD)
def test_a_bad_line_is_named_with_what_is_wrong(bad: bytes, kind: type[BadLine], says: str) -> None:
    with pytest.raises(kind) as raised:
        read(line(), bad, line())
    assert str(raised.value).startswith("t.jsonl, line 2: ")
    assert says in str(raised.value)
    assert raised.value.fields["line"] == 2
    assert isinstance(raised.value, KvcoreError)


def test_bad_lines_can_be_skipped_and_are_counted() -> None:
    lines = [line(), *(bad for bad, _, _ in BAD), line(timestamp=1600)]
    reader = TraceReader(io.BytesIO(b"\n".join(lines)), skip_bad=True, name="t.jsonl")
    assert [each.arrival for each in reader] == [0.0, 0.1]
    assert reader.num_skipped == len(BAD)
    assert [type(each) for each in reader.examples] == [kind for _, kind, _ in BAD[:10]]
    assert reader.examples[0].fields["line"] == 2


def test_a_long_value_is_cut_in_the_message_alone() -> None:
    with pytest.raises(NotAnObject, match=r"not \[0, 0, .*\.\.\.$") as raised:
        read(b"[" + b"0, " * 99 + b"0]")
    assert raised.value.fields["value"] == [0] * 100


def test_a_skipped_time_does_not_count_as_the_newest() -> None:
    far = line(timestamp=9000, hash_ids=[])
    assert [each.line for each in read(far, line(), skip_bad=True)] == [2]


@pytest.mark.parametrize("content", [b"", b"\n \n"])
def test_an_empty_file_is_refused(content: bytes) -> None:
    with pytest.raises(EmptyTrace, match=r"t\.jsonl has no request"):
        read(content)


def test_a_file_of_bad_lines_alone_is_empty() -> None:
    with pytest.raises(EmptyTrace, match="lines: 2, skipped: 2"):
        read(b"x", b"y", skip_bad=True)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    path = tmp_path / "none.jsonl"
    with pytest.raises(UnreadableTrace, match=r"none\.jsonl cannot be read: No such file"):
        list(TraceReader(path))
    with pytest.raises(UnreadableTrace, match="cannot be read"):
        list(TraceReader(tmp_path))


@pytest.mark.parametrize("module", ["gzip", "lzma"])
def test_a_compressed_file_is_read_as_what_it_holds(module: str, tmp_path: Path) -> None:
    packed = importlib.import_module(module).compress(line() + b"\n" + line() + b"\n")
    path = tmp_path / "packed"
    path.write_bytes(packed)
    reader = TraceReader(path)
    assert list(reader) == list(reader) == list(read(line(), line()))
    assert reader.size is None
    for end in (len(packed) // 2, len(packed) - 4):
        path.write_bytes(packed[:end])
        with pytest.raises(UnreadableTrace):
            list(TraceReader(path))


def test_zstd_is_read_by_an_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "packed"
    path.write_bytes(b"\x28\xb5\x2f\xfd and more")
    monkeypatch.setitem(sys.modules, "zstandard", None)
    with pytest.raises(UnreadableTrace, match=r"kvcore\[zstd\]"):
        list(TraceReader(path))


def test_damaged_zstd_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Zstandard(ModuleType):
        ZstdError = type("ZstdError", (Exception,), {})

        def open(self, file: BinaryIO, mode: str) -> io.RawIOBase:  # noqa: ARG002
            error = self.ZstdError

            class Damaged(io.RawIOBase):
                def readable(self) -> bool:
                    return True

                def readinto(self, _: object) -> int:
                    raise error("unknown frame descriptor")

            return Damaged()

    path = tmp_path / "packed"
    path.write_bytes(b"\x28\xb5\x2f\xfd and more")
    monkeypatch.setitem(sys.modules, "zstandard", Zstandard("zstandard"))
    with pytest.raises(UnreadableTrace, match="cannot be read: unknown frame descriptor"):
        list(TraceReader(path))


def test_a_file_can_be_read_twice_and_tells_how_far_it_was_read(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_bytes(line() + b"\nrubbish\n" + line() + b"\n")
    reader = TraceReader(str(path), skip_bad=True)
    assert list(reader) == list(reader)
    assert reader.name == str(path)
    assert reader.position == reader.size == path.stat().st_size
    assert (reader.num_lines, reader.num_skipped) == (3, 1)


def test_a_name_that_is_not_utf_8_can_be_printed(tmp_path: Path) -> None:
    path = os.fsdecode(os.fsencode(tmp_path) + b"/\xff.jsonl")
    Path(path).write_bytes(line())
    reader = TraceReader(path)
    assert len(list(reader)) == 1
    assert reader.name.encode() == os.fsencode(tmp_path) + rb"/\udcff.jsonl"


def test_standard_input_is_read_by_its_sign(monkeypatch: pytest.MonkeyPatch) -> None:
    class Stdin:
        buffer = io.BytesIO(line())

    monkeypatch.setattr("sys.stdin", Stdin)
    reader = TraceReader("-")
    assert len(list(reader)) == 1
    assert (reader.name, reader.size) == ("standard input", None)


def test_a_line_without_end_is_not_held(monkeypatch: pytest.MonkeyPatch) -> None:
    most = 200
    monkeypatch.setattr(request_trace, "LINE_BYTES_MAX", most)
    content = line() + b"\n" + b"[" * 5 * most + b"\n" + line() + b"\n"
    with pytest.raises(LineTooLong, match="line 2: longer than 200 bytes"):
        list(TraceReader(io.BytesIO(content)))
    reader = TraceReader(io.BytesIO(content), skip_bad=True)
    assert [each.line for each in reader] == [1, 3]
    assert (reader.position, reader.num_skipped) == (len(content), 1)


@pytest.mark.parametrize("end", [b"\n", b""])
def test_a_line_of_just_the_greatest_length_is_read(
    monkeypatch: pytest.MonkeyPatch, end: bytes
) -> None:
    monkeypatch.setattr(request_trace, "LINE_BYTES_MAX", len(line()))
    content = line() + b"\n" + line() + end
    assert [each.line for each in TraceReader(io.BytesIO(content))] == [1, 2]


def test_a_trace_is_read_while_it_is_asked_for() -> None:
    class Endless(io.RawIOBase):
        num_lines = 0

        def readline(self, _size: int | None = -1, /) -> bytes:
            self.num_lines += 1
            return line() + b"\n"

    source = Endless()
    requests = iter(TraceReader(source))  # type: ignore[arg-type]  # reads no more than lines
    assert [next(requests).line for _ in range(3)] == [1, 2, 3]
    assert source.num_lines == 3
