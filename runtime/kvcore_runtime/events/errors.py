# SPDX-License-Identifier: Apache-2.0
"""Errors of endpoints."""

from __future__ import annotations

from types import ModuleType

from kvcore_runtime.errors import KvcoreRuntimeError, load_extra


class EndpointUnusable(KvcoreRuntimeError):
    """A socket cannot be bound or connected."""

    message = "the endpoint {endpoint!r} cannot be used: {reason}"


class PublisherClosed(KvcoreRuntimeError):
    """The publisher has been closed."""

    message = "the publisher at {endpoint!r} is closed"


def load_zmq() -> ModuleType:
    """Import zmq. Raises PackageMissing."""
    return load_extra("zmq", what="events", package="pyzmq", extra="events")
