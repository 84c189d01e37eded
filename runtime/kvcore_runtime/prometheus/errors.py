# SPDX-License-Identifier: Apache-2.0
"""What can be wrong with an exporter of metrics."""

from __future__ import annotations

from typing import Any

from kvcore_runtime.errors import KvcoreRuntimeError, load_extra


class InvalidLabel(KvcoreRuntimeError):
    """A label that Prometheus refuses, or that a metric has of its own."""

    message = "the label {name!r} cannot be used: {reason}"


class InvalidNames(KvcoreRuntimeError):
    """Metrics in the names of an engine that is not known."""

    message = "names are {names!r}, expected some of {known}"


class NamesTaken(KvcoreRuntimeError):
    """A second exporter in one registry."""

    message = "the registry has these metrics already, give each engine its own: {reason}"


def load_client() -> Any:
    """Import prometheus_client with its `core`. Raises PackageMissing."""
    names = {"what": "metrics", "package": "prometheus-client", "extra": "prometheus"}
    load_extra("prometheus_client.core", **names)
    return load_extra("prometheus_client", **names)
