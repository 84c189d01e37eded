# SPDX-License-Identifier: Apache-2.0
"""Reads Azure's traces, BurstGPT's, ShareGPT's, and the custom data set of vLLM's benchmark.

Azure's and BurstGPT's have lengths and times but no contents, so no prefix repeats. ShareGPT's and
vLLM's have texts but no times: a request arrives every 1/rate seconds, and TOKEN_BYTES of UTF-8
count as a token. Each answer of a conversation is a request, whose prompt is everything before it.
"""

from __future__ import annotations

import csv
import json
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import UTC, datetime
from hashlib import blake2b
from itertools import count
from math import isfinite
from typing import Any

from kvcore.replay.errors import (
    BadLine,
    MissingRequestField,
    NotAnObject,
    NotJSON,
    OutOfRange,
    WrongKind,
)
from kvcore.replay.forms.form import TOKEN_BYTES, Form
from kvcore.replay.workload import BAILIAN_UNIT, MOONCAKE_UNIT, TraceRequest

END = b""
"""Passed instead of a line at the end of the file."""
TOKENS_MAX = 2**31 - 1
"""Most tokens of a prompt or an output whose length alone is given."""
VLLM_OUTPUT_LEN = 256
"""Tokens that vLLM's benchmark generates if a line does not give a number."""
BETWEEN = tuple(" \t\r\n[,]")
ANSWERS = {"gpt", "chatgpt", "assistant", "bing", "bard", "model"}
MakeError = Callable[..., BadLine]
Row = tuple[float, int, int, Sequence[int], int]
"""Arrival, lengths of prompt and output, ids, tokens per id."""


class OtherTrace:
    """Reads the lines of one form. rate: requests per second, for a form without times."""

    def __init__(self, form: Form, rate: float | None, error: MakeError) -> None:
        self._form, self._rate, self._error = form, rate or 1.0, error
        self._numbers, self._new_ids = count(), count()
        self._start: float | None = None
        self._is_head = form.kind == "csv"
        self._text = ""

    def rows(self, line: bytes) -> Iterable[Row]:
        """Return the requests that end with a line, or with END. Raises BadLine."""
        if line == END:
            if self._text:
                raise self._error(NotJSON, reason="the file ends inside an object")
            return ()
        try:
            text = line.decode()
        except UnicodeDecodeError:
            raise self._wrong("the line", "UTF-8", line) from None
        if self._form.kind == "csv":
            return self._of_csv(text)
        return self._of_json(text)

    def _of_csv(self, text: str) -> Iterator[Row]:
        if self._is_head:
            self._is_head = False
            return
        try:
            cells = next(csv.reader([text]))
        except csv.Error as error:
            raise self._wrong("the line", f"CSV ({error})", text) from None
        if len(cells) <= max(self._form.columns):
            raise self._error(MissingRequestField, field=f"column {len(cells) + 1}")
        when, *lengths = (cells[place].strip() for place in self._form.columns)
        numbers = [self._number(*each) for each in zip(("prompt", "output"), lengths, strict=True)]
        if not numbers[0]:
            raise self._error(OutOfRange, field="prompt", value=0, expected="at least 1")
        time = self._time(when)
        if self._start is None:
            self._start = time
        ids = array("Q", [next(self._new_ids) for _ in range(-(-numbers[0] // MOONCAKE_UNIT))])
        yield time - self._start, numbers[0], numbers[1], ids, MOONCAKE_UNIT

    def _time(self, text: str) -> float:
        """Read a number of seconds, or a date and time; UTC if it has no zone."""
        try:
            seconds = float(text)
        except ValueError:
            pass
        else:
            if not isfinite(seconds):
                raise self._wrong("timestamp", "a finite number", text)
            return seconds
        try:
            when = datetime.fromisoformat(text)
        except ValueError:
            raise self._wrong("timestamp", "seconds, or a date and time", text) from None
        return (when if when.tzinfo else when.replace(tzinfo=UTC)).timestamp()

    def _number(self, field: str, text: str) -> int:
        is_short = text.isascii() and text.isdigit() and len(text) <= len(str(TOKENS_MAX))
        if not is_short or int(text) > TOKENS_MAX:
            raise self._wrong(field, f"an integer from 0 to {TOKENS_MAX}", text)
        return int(text)

    def _wrong(self, field: str, expected: str, value: object) -> BadLine:
        return self._error(WrongKind, field=field, expected=expected, value=value)

    def _of_json(self, text: str) -> Iterator[Row]:
        for value in self._objects(text):
            if not isinstance(value, dict):
                raise self._error(NotAnObject, value=value)
            if self._form.kind == "prompt":
                yield self._of(value)
            else:
                yield from self._of_conversation(value)

    def _objects(self, text: str) -> Iterator[Any]:
        """Yield the objects that end with a line, from lines of objects or from a list of them."""
        is_list, text, at = self._form.kind != "prompt", self._text + text, 0
        if is_list and not text.rstrip(" \t\r\n,]").endswith("}"):
            self._text = text.lstrip(" \t\r\n[,]")
            return
        self._text = ""
        while True:
            while is_list and text[at : at + 1] in BETWEEN:
                at += 1
            if at == len(text):
                return
            try:
                value, at = json.JSONDecoder().raw_decode(text, at)
            except (ValueError, RecursionError) as error:  # ValueError: an integer is too long
                if is_list and getattr(error, "pos", 0) >= len(text.rstrip()):
                    self._text = text[at:]  # it continues on the next line
                    return
                raise self._error(NotJSON, reason=str(error)) from None
            rest = text[at : at + 20].strip()
            if rest and (not is_list or rest[0] not in ",]"):
                raise self._error(NotJSON, reason=f"an object is followed by {rest!r}")
            at = len(text) if not is_list else at
            yield value

    def _of(self, value: dict[str, Any]) -> Row:
        """Read a line with a prompt, and possibly the length of the output."""
        prompt = self._text_of(value, "prompt")
        length = value.get("output_tokens", VLLM_OUTPUT_LEN)
        if type(length) is not int:
            raise self._error(WrongKind, field="output_tokens", expected="an integer", value=length)
        if length < 0:
            raise self._error(OutOfRange, field="output_tokens", value=length, expected="0 or more")
        return self._row(prompt, length)

    def _of_conversation(self, value: dict[str, Any]) -> Iterator[Row]:
        """Yield a request for each answer."""
        parts = value.get("conversations")
        if not isinstance(parts, list):
            raise self._error(WrongKind, field="conversations", expected="a list", value=parts)
        before = b""
        for part in parts:
            if not isinstance(part, dict):
                raise self._error(NotAnObject, value=part)
            said = self._text_of(part, "value")
            if self._text_of(part, "from") in ANSWERS and before:
                yield self._row(before, -(-len(said) // TOKEN_BYTES))
            before += said + b"\n"

    def _text_of(self, value: dict[str, Any], field: str) -> Any:
        """Return a text as UTF-8, but the name of a speaker unchanged."""
        if field not in value:
            raise self._error(MissingRequestField, field=field)
        text = value[field]
        if not isinstance(text, str) or (field == "prompt" and not text):
            expected = "a non-empty text" if field == "prompt" else "a text"
            raise self._error(WrongKind, field=field, expected=expected, value=text)
        return text if field == "from" else text.encode(errors="replace")

    def _row(self, prompt: bytes, output_len: int) -> Row:
        size = TOKEN_BYTES * BAILIAN_UNIT
        parts = (prompt[start : start + size] for start in range(0, len(prompt), size))
        ids = array("Q", b"".join(blake2b(part, digest_size=8).digest() for part in parts))
        num_tokens = -(-len(prompt) // TOKEN_BYTES)
        return next(self._numbers) / self._rate, num_tokens, output_len, ids, BAILIAN_UNIT


def to_request(line: int, row: Row) -> TraceRequest:
    """Make the request that ends at a line."""
    arrival, prompt_len, output_len, ids, unit = row
    return TraceRequest(line, arrival, prompt_len, output_len, ids, unit)
