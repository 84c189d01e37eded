# SPDX-License-Identifier: Apache-2.0
"""Reads traces of requests line by line: Mooncake JSONL, Qwen-Bailian's, and the forms in forms/.

One line is held at a time, at most LINE_BYTES_MAX long. A bad line raises its error, or is counted
and skipped (`skip_bad`). Blank lines and a byte order mark at the start are ignored. The first good
line decides the form: Bailian's requests have a `chat_id`, timestamps in seconds and 16 tokens per
id; Mooncake's have milliseconds and 512. Arrivals count from the first request.
"""

from __future__ import annotations

import codecs
import importlib
import io
import lzma
import os
import sys
import zlib
from array import array
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO, cast

import attrs
import msgspec

from kvcore.replay.errors import (
    BadLine,
    EmptyTrace,
    HasTimes,
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
from kvcore.replay.forms.form import form_of
from kvcore.replay.forms.reading import END, OtherTrace, to_request
from kvcore.replay.workload import BAILIAN_UNIT, MOONCAKE_UNIT, TraceRequest

LINE_BYTES_MAX = 2**26
LENGTH_MAX = 2**62
NUM_EXAMPLES = 10
STDIN = "-"
OPENERS = {b"\x1f\x8b": "gzip", b"\xfd7zXZ": "lzma", b"\x28\xb5\x2f\xfd": "zstandard"}
"""The first bytes of compressed files, and the module that opens them; the last needs
kvcore[zstd].
"""
FAULTS: tuple[type[Exception], ...] = (OSError, EOFError, zlib.error, lzma.LZMAError)
"""What reading a file can raise, without zstd's own error."""


@attrs.frozen
class Row:
    """The fields of a line; other fields are ignored."""

    timestamp: float
    input_length: int
    output_length: int
    hash_ids: list[int]
    chat_id: Any = None


Read = Callable[["bytes | None"], Iterator[tuple[TraceRequest, float]]]
_FIELDS = ("timestamp", "input_length", "output_length", "hash_ids")


class TraceReader:
    """Iterates over the requests of a trace, reading on demand.

    source: a path, "-" for standard input, or an open binary file (which can be read once). name:
    for errors. rate: requests per second, for a form without times. num_skipped, examples: number
    of bad lines skipped so far, and the errors of the first ones. note: a remark on the form.
    position, size: bytes read, and total bytes (None if it is not a file). Raises, while it is
    read: UnreadableTrace, UnreadForm, NeedsRate, HasTimes, EmptyTrace, BadLine.
    """

    def __init__(
        self,
        source: str | os.PathLike[str] | BinaryIO,
        *,
        skip_bad: bool = False,
        name: str | None = None,
        rate: float | None = None,
    ) -> None:
        self._source = source
        self._skip_bad, self._rate = skip_bad, rate
        self.name = _name(source) if name is None else name
        self.size = _size(source)
        self._faults = FAULTS
        self.num_skipped = 0
        self.note: str | None = None
        self.num_lines = 0
        self.position = 0
        self.examples: list[BadLine] = []

    def __iter__(self) -> Iterator[TraceRequest]:
        self.num_skipped = self.num_lines = self.position = 0
        self.examples = []
        try:
            if isinstance(self._source, str | os.PathLike):
                if self._source == STDIN:
                    yield from self._requests(sys.stdin.buffer)
                else:
                    with Path(self._source).open("rb") as file:
                        yield from self._requests(file)
            else:
                yield from self._requests(self._source)
        except self._faults as error:
            reason = getattr(error, "strerror", None) or str(error)
            raise UnreadableTrace(file=self.name, reason=reason) from None

    def _requests(self, source: BinaryIO) -> Iterator[TraceRequest]:
        lines = self._lines(self._unpacked(source))
        first = next(lines, b"")
        read, newest, before, found = self._reading(first), -1.0, 0.0, False
        for line in chain([first] if first != b"" else [], lines, [END]):
            try:
                for request, arrived in read(line):
                    if request.arrival < newest:
                        raise self._error(TimeRunsBackwards, value=arrived, before=before)
                    newest, before, found = request.arrival, arrived, True
                    yield request
            except BadLine as error:
                if not self._skip_bad:
                    raise
                self.num_skipped += 1
                if len(self.examples) < NUM_EXAMPLES:
                    self.examples.append(error)
        if not found:
            raise EmptyTrace(file=self.name, num_lines=self.num_lines, num_skipped=self.num_skipped)

    def _reading(self, first: bytes | None) -> Read:
        """Return the reader for a trace that begins with this line: it yields requests, and their
        times as in the file. Raises UnreadForm, NeedsRate, HasTimes.
        """
        form = None if first is None else form_of(first, self.name, self._rate)
        if form is None:
            return self._mooncake()
        if form.kind == "csv" and self._rate is not None:
            raise HasTimes(file=self.name)
        self.note = f"{self.name} is {form.name}: {form.note}"
        other = OtherTrace(form, self._rate, self._error)

        def read(line: bytes | None) -> Iterator[tuple[TraceRequest, float]]:
            if line is None:
                raise self._error(LineTooLong, most=LINE_BYTES_MAX)
            for row in other.rows(line):
                yield to_request(self.num_lines, row), row[0]

        return read

    def _mooncake(self) -> Read:
        decoder = msgspec.json.Decoder(Row)
        is_bailian: bool | None = None
        start: float | None = None

        def read(line: bytes | None) -> Iterator[tuple[TraceRequest, float]]:
            nonlocal is_bailian, start
            if line == END:
                return
            row = self._decode(decoder, line)
            bailian = row.chat_id is not None if is_bailian is None else is_bailian
            if self._rate is not None:
                raise HasTimes(file=self.name)
            first = row.timestamp if start is None else start
            request = self._check(row, bailian, first)
            is_bailian, start = bailian, first
            yield request, row.timestamp

        return read

    def _lines(self, file: BinaryIO) -> Iterator[bytes | None]:
        """Yield the lines that are not blank; None for one that is too long."""
        while line := file.readline(LINE_BYTES_MAX):
            self.num_lines += 1
            self.position += len(line)
            if self.num_lines == 1:
                line = line.removeprefix(codecs.BOM_UTF8)
            if len(line) == LINE_BYTES_MAX and not line.endswith(b"\n"):
                rest = file.readline(LINE_BYTES_MAX)
                too_long = bool(rest.strip())
                while rest and not rest.endswith(b"\n"):
                    self.position += len(rest)
                    rest = file.readline(LINE_BYTES_MAX)
                self.position += len(rest)
                if too_long:
                    yield None
                    continue
            if not line.isspace():
                yield line

    def _unpacked(self, file: BinaryIO) -> BinaryIO:
        """Return the file, or the content of a compressed one. Raises UnreadableTrace."""
        head = file.peek(8) if hasattr(file, "peek") else b""
        module = next((name for start, name in OPENERS.items() if head.startswith(start)), None)
        if module is None:
            return file
        try:
            opener: Any = importlib.import_module(module)
        except ImportError:
            reason = "it is compressed with zstd: install kvcore[zstd]"
            raise UnreadableTrace(file=self.name, reason=reason) from None
        self.size = None
        self._faults = (*FAULTS, getattr(opener, "ZstdError", OSError))
        return cast(BinaryIO, io.BufferedReader(opener.open(file, "rb")))

    def _decode(self, decoder: msgspec.json.Decoder[Row], line: bytes | None) -> Row:
        if line is None:
            raise self._error(LineTooLong, most=LINE_BYTES_MAX)
        try:
            try:
                return decoder.decode(line)
            except msgspec.ValidationError as error:
                said, values = str(error), msgspec.json.decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise self._error(NotJSON, reason=str(error)) from None
        raise self._explain(values, said)

    def _explain(self, values: Any, said: str) -> BadLine:
        """Return the error of JSON that is not a request. said: the decoder's message."""
        if not isinstance(values, dict):
            return self._error(NotAnObject, value=values)
        for field in _FIELDS:
            if field not in values:
                return self._error(MissingRequestField, field=field)
        kinds: tuple[tuple[str, tuple[type, ...], str], ...] = (
            ("timestamp", (int, float), "a number"),
            ("input_length", (int,), "an integer"),
            ("output_length", (int,), "an integer"),
        )
        for field, kind, expected in kinds:
            if type(values[field]) not in kind:
                value = values[field]
                return self._error(WrongKind, field=field, expected=expected, value=value)
        expected, value = f"a list of integers ({said})", values["hash_ids"]
        return self._error(WrongKind, field="hash_ids", expected=expected, value=value)

    def _check(self, row: Row, bailian: bool, start: float) -> TraceRequest:
        unit = BAILIAN_UNIT if bailian else MOONCAKE_UNIT
        limits = (
            ("timestamp", row.timestamp, 0),
            ("input_length", row.input_length, 1),
            ("output_length", row.output_length, 0),
        )
        for field, value, least in limits:
            if not least <= value <= LENGTH_MAX:
                expected = f"at least {least}" if value < least else f"at most {LENGTH_MAX}"
                raise self._error(OutOfRange, field=field, value=value, expected=expected)
        expected_ids = -(-row.input_length // unit)
        if len(row.hash_ids) != expected_ids:
            raise self._error(
                LengthsDiffer,
                input_length=row.input_length,
                expected=expected_ids,
                unit=unit,
                found=len(row.hash_ids),
            )
        try:
            ids = array("Q", row.hash_ids)
        except OverflowError:
            bad = next(each for each in row.hash_ids if not 0 <= each < 2**64)
            raise self._error(
                OutOfRange, field="an id", value=bad, expected="from 0 to 2**64 - 1"
            ) from None
        arrival = (row.timestamp - start) / (1 if bailian else 1000)
        return TraceRequest(self.num_lines, arrival, row.input_length, row.output_length, ids, unit)

    def _error(self, kind: type[BadLine], **fields: object) -> BadLine:
        return kind(file=self.name, line=self.num_lines, **fields)


def _name(source: str | os.PathLike[str] | BinaryIO) -> str:
    if source == STDIN:
        return "standard input"
    if isinstance(source, str | os.PathLike):  # a name need not be UTF-8, which a report is
        return os.fspath(source).encode(errors="backslashreplace").decode()
    return str(getattr(source, "name", "the trace"))


def _size(source: str | os.PathLike[str] | BinaryIO) -> int | None:
    if source == STDIN or not isinstance(source, str | os.PathLike):
        return None
    path = Path(source)
    return path.stat().st_size if path.is_file() else None
