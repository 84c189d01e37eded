# SPDX-License-Identifier: Apache-2.0
"""The forms of traces, known by their first line, and those that are refused by name."""

from __future__ import annotations

import json
import re
from typing import Literal

import attrs

from kvcore.replay.errors import NeedsRate, UnreadForm

TOKEN_BYTES = 4
LIST = re.compile(rb"\[\s*(\{|$)")
"""How a list of objects begins."""
COLUMNS = {
    "Azure's CSV": ("timestamp", "contexttokens", "generatedtokens"),
    "BurstGPT's CSV": ("timestamp", "request tokens", "response tokens"),
}
FIELDS = {
    "conversations": "ShareGPT's JSON",
    "prompt": "the custom data set of vLLM's benchmark",
}
"""The field by which a form of JSON is known."""
UNREAD = {
    "messages": ("a file of chat messages", "write lines of ShareGPT's form"),
    "body": ("an OpenAI batch file", "write a line with prompt and output_tokens for each"),
}


@attrs.frozen
class Form:
    """What a trace is. columns: places of time, prompt and output in a CSV."""

    name: str
    kind: Literal["csv", "conversations", "prompt"]
    columns: tuple[int, ...] = ()

    @property
    def note(self) -> str:
        """What is to be known of it."""
        if self.kind == "csv":
            return "it says nothing of the contents, so no prefix repeats"
        return f"{TOKEN_BYTES} bytes of text count as a token"


def form_of(first: bytes, file: str, rate: float | None) -> Form | None:
    """The form of a trace by its first line; None for Mooncake's, and for what is none of these.

    Raises UnreadForm, and NeedsRate for a form without times if no rate is given.
    """
    line = first.strip()
    if line.startswith(b"PAR1"):
        raise UnreadForm(file=file, form="a Parquet file", reason="write it as JSONL")
    names = [name.strip().strip('"').lower() for name in line.decode(errors="replace").split(",")]
    for form, wanted in COLUMNS.items():
        if set(wanted) <= set(names):
            return Form(form, "csv", tuple(map(names.index, wanted)))
    try:
        value = {"conversations": None} if LIST.match(line) else json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(value, dict) or "hash_ids" in value:
        return None
    for field, (form, reason) in UNREAD.items():
        if field in value:
            raise UnreadForm(file=file, form=form, reason=reason)
    for field, form in FIELDS.items():
        if field in value:
            if rate is None:
                raise NeedsRate(file=file, form=form)
            return Form(form, "prompt" if field == "prompt" else "conversations")
    return None
