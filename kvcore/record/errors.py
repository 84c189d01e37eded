# SPDX-License-Identifier: Apache-2.0
"""Misuse of the recorder, and records that cannot be read."""

from __future__ import annotations

from kvcore.types.base_error import KvcoreError


class AlreadyRecording(KvcoreError):
    """A manager has one recorder at a time, a recorder one manager, a folder one record."""

    message = "{what} has a record already: {reason}"


class InvalidRecorder(KvcoreError):
    """A recorder that cannot work."""

    message = "recorder {name}={value!r}: {reason}"


class NotARecord(KvcoreError):
    """A folder without segments, or a file that is none."""

    message = "{path} is no record: {reason}"


class DamagedRecord(KvcoreError):
    """A segment whose header or first state is damaged, so that nothing of it can be replayed."""

    message = "{file} is damaged at byte {offset}: {reason}"


class NewerRecord(KvcoreError):
    """A record that a newer kvcore made."""

    message = "{file} was made by a newer kvcore: it has {what}"
