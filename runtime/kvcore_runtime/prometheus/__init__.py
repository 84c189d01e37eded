# SPDX-License-Identifier: Apache-2.0
"""Metrics of one manager for Prometheus, under kvcore's names and those of vLLM and SGLang."""

from kvcore_runtime.prometheus.exporter import Exporter

__all__ = ["Exporter"]
