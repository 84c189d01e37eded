# SPDX-License-Identifier: Apache-2.0
"""Reads the fields of a config.json, with errors that name field and file.

A byte order mark at the start is skipped. A field that is null counts as missing. A model with
several parts has its language model in `text_config`; fields missing there are looked up outside
it, and shapes given twice must agree.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs

from kvcore.sizing.errors import (
    ContradictoryFields,
    InvalidField,
    MissingField,
    UnreadableModel,
    UnsupportedModel,
)

NESTED = "text_config"
MAX_VALUE = 2**31 - 1
_MUST_AGREE = (
    "attention_chunk_size",
    "head_dim",
    "hidden_size",
    "kv_lora_rank",
    "layer_types",
    "num_attention_heads",
    "num_hidden_layers",
    "num_key_value_heads",
    "qk_rope_head_dim",
    "sliding_window",
)


@attrs.frozen
class Fields:
    """The fields of one file that describe its language model."""

    file: str
    values: Mapping[str, Any]

    def has(self, name: str) -> bool:
        """Return whether the field exists and is not null."""
        return self.values.get(name) is not None

    def find_count(self, name: str, *, least: int = 1, most: int = MAX_VALUE) -> int | None:
        """Return an integer within bounds, None if it is missing. Raises InvalidField."""
        value = self.values.get(name)
        if value is None:
            return None
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
            raise self.invalid(name, f"an integer from {least} to {most}")
        return value

    def count(self, name: str, reason: str, *, least: int = 1, most: int = MAX_VALUE) -> int:
        """Return an integer within bounds. Raises MissingField, InvalidField."""
        value = self.find_count(name, least=least, most=most)
        if value is None:
            raise MissingField(file=self.file, field=name, reason=reason)
        return value

    def find_flag(self, name: str) -> bool | None:
        """Return True or False, None if it is missing. Raises InvalidField."""
        value = self.values.get(name)
        if value is not None and not isinstance(value, bool):
            raise self.invalid(name, "true or false")
        return value

    def find_text(self, name: str) -> str | None:
        """Return text, None if it is missing. Raises InvalidField."""
        value = self.values.get(name)
        if value is not None and not isinstance(value, str):
            raise self.invalid(name, "text")
        return value

    def find_list(self, name: str) -> list[Any] | None:
        """Return a list, None if it is missing or empty. Raises InvalidField."""
        value = self.values.get(name)
        if value is not None and not isinstance(value, list):
            raise self.invalid(name, "a list with one item per layer")
        return value or None

    def invalid(self, name: str, expected: str) -> InvalidField:
        """Make the error for a field with a wrong type or value."""
        return InvalidField(file=self.file, field=name, value=self.values[name], expected=expected)

    def unsupported(self, name: str, value: object, reason: str) -> UnsupportedModel:
        """Make the error for a field that says that the model is not sized."""
        model_type = self.values.get("model_type")
        return UnsupportedModel(
            file=self.file, field=name, value=value, model_type=model_type, reason=reason
        )

    def contradiction(self, first: str, second: str, reason: str) -> ContradictoryFields:
        """Make the error for two fields that contradict each other."""
        return ContradictoryFields(
            file=self.file,
            first=first,
            first_value=self.values.get(first),
            second=second,
            second_value=self.values.get(second),
            reason=reason,
        )


def read_fields(path: str | Path) -> Fields:
    """Read the fields of a JSON file.

    Raises UnreadableModel, InvalidField, ContradictoryFields.
    """
    file = str(path)
    try:
        outer = json.loads(Path(path).read_text(encoding="utf-8-sig"))
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise UnreadableModel(file=file, reason=f"cannot be read: {reason}") from error
    except (ValueError, RecursionError) as error:
        raise UnreadableModel(file=file, reason=f"is not JSON: {error}") from error
    if not isinstance(outer, dict):
        raise UnreadableModel(file=file, reason="is not a JSON object with a model's fields")
    inner = outer.get(NESTED)
    if inner is None:
        return Fields(file, outer)
    if not isinstance(inner, dict):
        raise Fields(file, outer).invalid(NESTED, "an object")
    merged = Fields(file, {**outer, **{name: inner[name] for name in inner if _said(inner, name)}})
    for name in _MUST_AGREE:
        if _said(inner, name) and _said(outer, name) and outer[name] != inner[name]:
            both = Fields(file, {name: outer[name], f"{NESTED}.{name}": inner[name]})
            reason = f"{json.dumps(outer[name])} and {json.dumps(inner[name])}"
            raise both.contradiction(name, f"{NESTED}.{name}", reason)
    return merged


def _said(values: Mapping[str, Any], name: str) -> bool:
    return values.get(name) is not None
