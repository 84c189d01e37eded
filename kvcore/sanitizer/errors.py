# SPDX-License-Identifier: Apache-2.0
"""Errors of an adapter, or of the engine that it is attached to; never a finding."""

from __future__ import annotations

from kvcore.types.base_error import KvcoreError


class AdapterError(KvcoreError):
    """An observation that contradicts those before it. Nothing has changed."""

    message = "the adapter is wrong, not the engine: {observation}: {reason}"


class UnsupportedEngine(KvcoreError):
    """An engine, or a version of it, that no adapter was tested with. Nothing was patched."""

    message = "{engine} {found} is not supported: the adapter was tested with {tested}"


class AlreadyAttached(KvcoreError):
    """An engine that has a sanitizer already."""

    message = "{engine} has a sanitizer already"
