# SPDX-License-Identifier: Apache-2.0
"""Applies a replay's batches to a device of another distribution, whose memory checks every read.

The device is found by an entry point of the group `kvcore.devices`, as in `kvcore simulate
--torch`, so that kvcore imports no tensors. Each token's slot gets a number derived from all tokens
up to it; a step must read these numbers. Numbers of requests that are not in the step are forgotten
and computed again from their tokens.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import NoReturn

from kvcore.oracle.content_oracle import Pass
from kvcore.oracle.device import DeviceSize, MakeDevice
from kvcore.replay.configuration import make_config
from kvcore.replay.loop import Sequence as Running
from kvcore.replay.loop import Step
from kvcore.replay.results import Options
from kvcore.scheduler import ScheduledChunk
from kvcore.types.commands import Batch
from kvcore.types.errors import InvariantViolation

MODULUS, FACTOR = 2**61 - 1, 0x1B873593_CC9E2D51 % (2**61 - 1)
NODE_SHIFT = 16
"""Nodes have 45 bits, so that a device can store them as float64."""


class OnDevice:
    """Passes each step of one run to a device. Raises InvariantViolation for a wrong read.

    num_read: tokens that steps have read, all of them as written.
    """

    def __init__(self, make: MakeDevice, options: Options) -> None:
        config = make_config(options)
        num_tokens = config.num_usable_blocks * options.block_size
        self._device = make(
            DeviceSize(config, config.max_rows(options.max_running), num_tokens, _no_contents)
        )
        self._prefixes: dict[str, Prefix] = {}
        self.num_read = 0

    def __call__(self, batch: Batch, step: Step) -> None:
        """Apply a batch and play its forward pass."""
        known = self._prefixes
        names = [each.sequence.sequence_id for each in step.chunks]
        self._prefixes = {name: known.get(name, Prefix()) for name in names}
        self._device.apply(batch)
        self._device.forward([self._pass(each) for each in step.chunks])
        self.num_read += sum(each.end for each in step.chunks)

    def _pass(self, chunk: ScheduledChunk[Running]) -> Pass:
        sequence = chunk.sequence
        tokens = sequence.tokens(0, chunk.end)
        return Pass(
            request_id=sequence.sequence_id,
            row=sequence.row,
            start=chunk.start,
            end=chunk.end,
            nodes=self._prefixes[sequence.sequence_id].nodes(tokens, chunk.end),
        )


class Prefix:
    """The numbers of a request's prefixes, computed as its tokens arrive."""

    def __init__(self) -> None:
        self._nodes = array("q")
        self._last = 1

    def nodes(self, tokens: Sequence[int], end: int) -> Sequence[int]:
        """Return a number for each position, at least up to `end`."""
        last, add = self._last, self._nodes.append
        for token in tokens[len(self._nodes) : end]:
            last = (last * FACTOR + token + 1) % MODULUS
            add(last >> NODE_SHIFT)
        self._last = last
        return self._nodes


def _no_contents(key: bytes) -> NoReturn:
    """Raise: nothing is stored or loaded in a replay."""
    raise InvariantViolation("CACHE-KV", f"content {key.hex()} is asked for")
