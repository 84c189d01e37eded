# SPDX-License-Identifier: Apache-2.0
"""What can be wrong with an endpoint."""

from __future__ import annotations

from types import ModuleType

from kvcore_runtime.errors import KvcoreRuntimeError, PackageMissing


class EndpointUnusable(KvcoreRuntimeError):
    """A socket that cannot be bound or connected."""

    message = "the endpoint {endpoint!r} cannot be used: {reason}"


class PublisherClosed(KvcoreRuntimeError):
    """Events for a publisher that has been closed."""

    message = "the publisher at {endpoint!r} is closed"


def load_zmq() -> ModuleType:
    """The module zmq. Raises PackageMissing."""
    try:
        import zmq
    except ImportError:
        raise PackageMissing(what="events", package="pyzmq", extra="events") from None
    module: ModuleType = zmq
    return module
