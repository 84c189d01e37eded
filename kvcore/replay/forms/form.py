# SPDX-License-Identifier: Apache-2.0
"""The forms of traces, recognised by their first line, and those refused by name."""

from __future__ import annotations

import json
import re
from typing import Literal

import attrs

from kvcore.replay.errors import NeedsRate, UnreadForm

TOKEN_BYTES = 4
LIST = re.compile(rb"\[\s*(\{|$)")
"""The first characters of a list of objects."""
COLUMNS = {
    "Azure's CSV": ("timestamp", "contexttokens", "generatedtokens"),
    "BurstGPT's CSV": ("timestamp", "request tokens", "response tokens"),
}
FIELDS = {
    "conversations": "ShareGPT's JSON",
    "prompt": "the custom data set of vLLM's benchmark",
}
"""The field that identifies each form of JSON."""
UNREAD = {
    "messages": ("a file of chat messages", "convert it to lines of ShareGPT's form"),
    "body": ("an OpenAI batch file", "convert it to lines with prompt and output_tokens"),
}


@attrs.frozen
class Form:
    """The form of a trace. columns: indices of time, prompt and output in a CSV."""

    name: str
    kind: Literal["csv", "conversations", "prompt"]
    columns: tuple[int, ...] = ()

    @property
    def note(self) -> str:
        """Return a note for the user."""
        if self.kind == "csv":
            return "it does not contain the contents, so no prefix repeats"
        return f"{TOKEN_BYTES} bytes of text count as a token"


def form_of(first: bytes, file: str, rate: float | None) -> Form | None:
    """Return the form of a trace by its first line; None for Mooncake's, and for unknown ones.

    Raises UnreadForm, and NeedsRate for a form without times if no rate is given.
    """
    line = first.strip()
    if line.startswith(b"PAR1"):
        raise UnreadForm(file=file, form="a Parquet file", reason="convert it to JSONL")
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
