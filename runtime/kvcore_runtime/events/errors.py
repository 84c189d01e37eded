# SPDX-License-Identifier: Apache-2.0
"""What can be wrong with an endpoint."""

from __future__ import annotations

from types import ModuleType

from kvcore_runtime.errors import KvcoreRuntimeError


class PackageMissing(KvcoreRuntimeError):
    """Events on the wire need a package that is an extra."""

    message = "events need the Python package {package!r}: pip install 'kvcore-runtime[events]'"


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
        raise PackageMissing(package="pyzmq") from None
    module: ModuleType = zmq
    return module
