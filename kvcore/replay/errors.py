# SPDX-License-Identifier: Apache-2.0
"""Errors of a replay, each as a type of its own.

What is wrong with a trace names the file and the line, and a
`BadLine` can be skipped.
"""

from __future__ import annotations

from kvcore.types.errors import KvcoreError

_SHOWN = 40
"""A longer value is cut in a message."""


class InvalidReplayOption(KvcoreError):
    """An option of a replay, or of a generator, that cannot work."""

    message = "option {name}={value!r}: {reason}"


class TraceFileError(KvcoreError):
    """A trace of requests that cannot be replayed."""


class UnreadableTrace(TraceFileError):
    """The file cannot be opened or read."""

    message = "{file} cannot be read: {reason}"


class UnreadForm(TraceFileError):
    """A trace of a known form that is not read."""

    message = "{file} is {form}, which is not read: {reason}"


class NeedsRate(TraceFileError):
    """A trace without times, and no rate is given."""

    message = "{file} is {form}, which has no times: say --rate N, requests a second"


class EmptyTrace(TraceFileError):
    """The file has no request."""

    message = "{file} has no request; lines: {num_lines}, of them skipped: {num_skipped}"


class BadLine(TraceFileError):
    """A line that is no request."""

    def shown(self) -> dict[str, object]:
        """The fields as the message shows them; of a long value the first part."""
        text = repr(self.fields.get("value"))
        return {
            **self.fields,
            "value": text if len(text) <= _SHOWN else f"{text[:_SHOWN]}...",
        }


class NotJSON(BadLine):
    """A line that is no JSON."""

    message = "{file}, line {line}: not JSON: {reason}"


class NotAnObject(BadLine):
    """A line that is JSON and no object."""

    message = "{file}, line {line}: a request is a JSON object, not {value}"


class MissingRequestField(BadLine):
    """A request without one of its fields."""

    message = "{file}, line {line}: {field} is missing"


class WrongKind(BadLine):
    """A field of another kind than a request has."""

    message = "{file}, line {line}: {field} must be {expected}, not {value}"


class OutOfRange(BadLine):
    """A number that no request has."""

    message = "{file}, line {line}: {field} is {value}, must be {expected}"


class TimeRunsBackwards(BadLine):
    """A request that arrives before the one above it."""

    message = "{file}, line {line}: timestamp {value} is before {before}, which came before it"


class LengthsDiffer(BadLine):
    """The ids of a prompt do not stand for as many tokens as it has."""

    message = (
        "{file}, line {line}: input_length {input_length} takes {expected} ids of {unit} tokens, "
        "hash_ids has {found}"
    )


class LineTooLong(BadLine):
    """A line that would not be held in memory."""

    message = "{file}, line {line}: longer than {most} bytes"
