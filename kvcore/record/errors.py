# SPDX-License-Identifier: Apache-2.0
"""Misuse of the recorder, and records that cannot be read."""

from __future__ import annotations

from kvcore.types.base_error import KvcoreError


class AlreadyRecording(KvcoreError):
    """The manager is recorded already, or the recorder or the folder is in use."""

    message = "{what} has a record already: {reason}"


class InvalidRecorder(KvcoreError):
    """A parameter of a recorder is invalid."""

    message = "recorder {name}={value!r}: {reason}"


class NotARecord(KvcoreError):
    """The folder has no segments, or the file is not a segment."""

    message = "{path} is not a record: {reason}"


class RecordNeedsText(KvcoreError):
    """The command needs tokens, of which the record has only hashes."""

    message = '{what} needs tokens, but {path} was recorded with tokens="keys"'


class DamagedRecord(KvcoreError):
    """The header or the first state of a segment is damaged, so it cannot be replayed at all."""

    message = "{file} is damaged at byte {offset}: {reason}"


class NewerRecord(KvcoreError):
    """A newer kvcore wrote the record."""

    message = "{file} was made by a newer kvcore: it has {what}"
