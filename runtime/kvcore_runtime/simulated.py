# SPDX-License-Identifier: Apache-2.0
"""The device that `kvcore simulate --torch` runs beside the core's own: real tensors, guard mode.

Rules: batches go through the runtime that serves a model (`shadow.py`), so what it refuses, and
what it reads that is stale or of another request, ends the run. A load is filled when its batch is
applied, from what was stored or else from what its key stands for; that one later fails changes
nothing here, since nobody may read it before its end.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvcore.check.simulate.device import Pass, Plan
from kvcore.check.simulate.prefixes import Nodes
from kvcore.commands import Batch, Load
from kvcore.hashing import HASH_SIZE
from kvcore_runtime.shadow import Computed, Shadow

MAX_STEP_TOKENS = 1 << 18


class SimulatedDevice:
    """A shadow cache as the simulator drives one."""

    def __init__(self, plan: Plan) -> None:
        self._contents = plan.contents
        self._shadow = Shadow(
            plan.config,
            max_rows=plan.num_rows,
            max_len=plan.num_tokens,
            max_tokens=MAX_STEP_TOKENS,
        )

    def apply(self, batch: Batch) -> None:
        """Carry out the commands of the next batch. Raises what `Shadow.apply` raises."""
        if Load.kind in batch.column("kind").tolist():
            for command in batch:
                if isinstance(command, Load):
                    self._offer(command.key)
        if batch.number != self._shadow.runtime.next_number:
            self._shadow.skip(batch.number)
        self._shadow.apply(batch)

    def forward(self, passes: Sequence[Pass]) -> None:
        """Play the forward pass behind it. Raises what `Shadow.forward` raises."""
        self._shadow.forward(
            [
                Computed(
                    request_id=each.request_id,
                    row=each.row,
                    start=each.loaded,
                    end=each.end,
                    stamps=each.nodes,
                    written=each.start,
                )
                for each in passes
            ]
        )

    def arrive(self, operation: int, nodes: Nodes | None) -> None:
        """Nothing is left to do: the load was filled when it was applied."""

    def _offer(self, key: bytes) -> None:
        """Put what a key stands for where loads find it, unless it was stored."""
        group = int.from_bytes(key[HASH_SIZE:], "big")
        pages = self._shadow.tier.pages
        if key not in pages:
            pages[key] = self._shadow.page(group, self._contents(key))


def make_device(plan: Plan) -> SimulatedDevice:
    """The device of a run."""
    return SimulatedDevice(plan)
