# SPDX-License-Identifier: Apache-2.0
"""Errors of an adapter, or of the engine that it is attached to; never findings."""

from __future__ import annotations

from kvcore.types.base_error import KvcoreError


class AdapterError(KvcoreError):
    """An observation contradicts those before it. Nothing has changed."""

    message = "the adapter is wrong, not the engine: {observation}: {reason}"


class UnsupportedEngine(KvcoreError):
    """No adapter was tested with this engine or version. Nothing was patched."""

    message = "{engine} {found} is not supported: the adapter was tested with {tested}"


class AlreadyAttached(KvcoreError):
    """The engine already has a sanitizer."""

    message = "{engine} has a sanitizer already"
