# SPDX-License-Identifier: Apache-2.0
"""Streams and events of an accelerator, imitated on the CPU: work put on one runs at once.

With them transformers' asynchronous batching runs without an accelerator: each step is planned, and
its tensors are filled, before the tokens of the step before are read.
"""

from __future__ import annotations

from typing import Any

import pytest
from transformers.generation.continuous_batching import input_outputs


class ActedStream:
    """A stream that runs its work at once."""

    def record_event(self, event: Any) -> None:
        """Nothing is outstanding."""

    def wait_event(self, event: Any) -> None:
        """Nothing is outstanding."""

    def synchronize(self) -> None:
        """Nothing is outstanding."""


def act_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make transformers treat the CPU as a device with streams."""
    monkeypatch.setattr(input_outputs, "create_device_stream", lambda _: ActedStream())
    monkeypatch.setattr(
        input_outputs.ContinuousBatchingAsyncIOs, "_supported_device_types", ("cpu",)
    )
