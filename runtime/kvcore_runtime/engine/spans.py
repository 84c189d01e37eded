# SPDX-License-Identifier: Apache-2.0
"""Spans of an engine for a tracer: when a step or a transfer of a far tier began and ended.

A span carries numbers, a status, or the name of an error; never tokens, keys or salts. Whatever the
callback raises is logged, at most once a second, and stops nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from kvcore_runtime.events.endpoints import Warnings

if TYPE_CHECKING:
    from kvcore_runtime.engine.metrics import Metrics

Attributes = dict[str, int | bool | str]
OnSpan = Callable[[str, int, int, Attributes], None]
"""Called as `on_span(name, start_ns, end_ns, attributes)` when a span has ended, on the engine's
thread. Times are nanoseconds since the Unix epoch, as OpenTelemetry takes them."""


class Spans:
    """Calls an `OnSpan`; without one it does nothing."""

    def __init__(self, on_span: OnSpan | None) -> None:
        self._on_span = on_span
        self._warnings = Warnings()

    def end(self, name: str, seconds: float, attributes: Attributes) -> None:
        """Report a span that took these seconds and ends now."""
        if self._on_span is None:
            return
        end_ns = time.time_ns()
        try:
            self._on_span(name, end_ns - round(seconds * 1e9), end_ns, attributes)
        except Exception as error:  # of a tracer
            self._warnings.warn("on_span raised %s", type(error).__name__)

    @contextmanager
    def step(self, metrics: Metrics) -> Iterator[None]:
        """Add the seconds of a step to the metrics, and report the step."""
        started, num_tokens = time.perf_counter(), metrics.num_computed_tokens
        num_commands = 0 if self._on_span is None else metrics.commands.total()
        attributes: Attributes = {}
        try:
            yield
        except BaseException as error:
            attributes["error"] = type(error).__name__
            raise
        finally:
            seconds = time.perf_counter() - started
            metrics.seconds += seconds
            if self._on_span is not None:
                attributes["num_tokens"] = metrics.num_computed_tokens - num_tokens
                attributes["num_commands"] = metrics.commands.total() - num_commands
                self.end("kvcore.step", seconds, attributes)
