# SPDX-License-Identifier: Apache-2.0
"""Errors of a replay, each as a type of its own.

Errors of a trace name the file and the line; a `BadLine` can be skipped.
"""

from __future__ import annotations

from kvcore.types.errors import KvcoreError

_SHOWN = 40
"""Longer values are cut in a message."""


class InvalidReplayOption(KvcoreError):
    """An option of a replay, or of a generator, is invalid."""

    message = "option {name}={value!r}: {reason}"


class TraceFileError(KvcoreError):
    """A trace of requests cannot be replayed."""


class UnreadableTrace(TraceFileError):
    """The file cannot be opened or read."""

    message = "{file} cannot be read: {reason}"


class UnreadForm(TraceFileError):
    """The trace has a known form that cannot be read."""

    message = "{file} is {form}, which is not supported: {reason}"


class NeedsRate(TraceFileError):
    """The trace has no times, and no rate is given."""

    message = "{file} is {form}, which has no times: use --rate N, requests per second"


class HasTimes(TraceFileError):
    """The trace has times, and a rate is given."""

    message = "{file} has times of its own: omit --rate"


class EmptyTrace(TraceFileError):
    """The file has no request."""

    message = "{file} has no request; lines: {num_lines}, skipped: {num_skipped}"


class BadLine(TraceFileError):
    """A line is not a request."""

    def shown(self) -> dict[str, object]:
        """Return the fields in the form that the message shows; of a long value, the first part."""
        text = repr(self.fields.get("value"))
        return {
            **self.fields,
            "value": text if len(text) <= _SHOWN else f"{text[:_SHOWN]}...",
        }


class NotJSON(BadLine):
    """A line is not JSON."""

    message = "{file}, line {line}: not JSON: {reason}"


class NotAnObject(BadLine):
    """A line is JSON, but not an object."""

    message = "{file}, line {line}: a request is a JSON object, not {value}"


class MissingRequestField(BadLine):
    """A request lacks a field."""

    message = "{file}, line {line}: {field} is missing"


class WrongKind(BadLine):
    """A field has the wrong type."""

    message = "{file}, line {line}: {field} must be {expected}, not {value}"


class OutOfRange(BadLine):
    """A number is out of range."""

    message = "{file}, line {line}: {field} is {value}, must be {expected}"


class TimeRunsBackwards(BadLine):
    """A request arrives before the previous one."""

    message = "{file}, line {line}: timestamp {value} is before the previous one, {before}"


class LengthsDiffer(BadLine):
    """The number of a prompt's ids does not match its tokens."""

    message = (
        "{file}, line {line}: input_length {input_length} takes {expected} ids of {unit} tokens, "
        "hash_ids has {found}"
    )


class LineTooLong(BadLine):
    """A line is too long to be held in memory."""

    message = "{file}, line {line}: longer than {most} bytes"
