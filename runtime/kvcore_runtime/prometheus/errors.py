# SPDX-License-Identifier: Apache-2.0
"""Errors of an exporter of metrics."""

from __future__ import annotations

from typing import Any

from kvcore_runtime.errors import KvcoreRuntimeError, load_extra


class InvalidLabel(KvcoreRuntimeError):
    """A label that Prometheus refuses, or whose name a metric already uses."""

    message = "the label {name!r} cannot be used: {reason}"


class InvalidNames(KvcoreRuntimeError):
    """Metrics were requested under the names of an unknown engine."""

    message = "names are {names!r}, expected some of {known}"


class NamesTaken(KvcoreRuntimeError):
    """The registry already has an exporter."""

    message = "the registry has these metrics already, give each engine its own: {reason}"


def load_client() -> Any:
    """Import prometheus_client with its `core`. Raises PackageMissing."""
    names = {"what": "metrics", "package": "prometheus-client", "extra": "prometheus"}
    load_extra("prometheus_client.core", **names)
    return load_extra("prometheus_client", **names)
