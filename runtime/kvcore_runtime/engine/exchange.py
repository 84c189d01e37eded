# SPDX-License-Identifier: Apache-2.0
"""The interface through which an engine sends and loads keys and values of other engines.

The engine calls these methods at fixed places of its step, on its own thread; a call may use the
manager, whose open batch is then the next step's (`Engine.open_number`). Missing tokens are
computed: a failed load costs time, but never an answer. Only the sequence itself sees a block whose
load is not done.
"""

from __future__ import annotations

from kvcore import Config, Hit, Refused
from kvcore_runtime.cache.tables import PADDING_BLOCK
from kvcore_runtime.engine.sequence import Sequence


class Exchange:
    """An exchange that sends and loads nothing. Subclasses override what they need."""

    needs_idle_cache = False
    """Whether its calls access the cache directly, so that no step may run meanwhile."""
    takes_prompts = False
    """Whether `prompt_computed` needs all blocks of the prompt, even those behind a window."""

    @property
    def is_busy(self) -> bool:
        """Whether a step is needed to make progress, even if no sequence can be computed."""
        return False

    def is_fetching(self, sequence: Sequence) -> bool:
        """Tell whether a waiting sequence must keep waiting, since tokens are still fetched for it.

        Called in every step; other sequences are admitted meanwhile.
        """
        del sequence
        return False

    def begin(self, sequence: Sequence, hit: Hit) -> int | Refused:
        """Begin to load the available tokens of a waiting sequence after its hit.

        Returns their number; if it is 0, nothing has changed.
        """
        del sequence, hit
        return 0

    def poll(self) -> list[Sequence]:
        """Continue all loads, after the step's batch was applied; return the sequences that are
        done.

        They have the tokens that the manager then counts.
        """
        return []

    def idle(self) -> None:
        """Note that a plan computes nothing: wait a moment if something is still to arrive."""

    def flush(self, timeout_s: float) -> bool:
        """Wait until all that was sent has been taken. Returns whether it was within timeout_s."""
        del timeout_s
        return True

    def cancelled(self, number: int) -> list[Sequence]:
        """Note that batch `number` and all later ones, including the open one, were cancelled.

        Their stores and loads are given up, whether or not they ran. Returns the sequences whose
        load was among them; they wait or run without it.
        """
        del number
        return []

    def prompt_computed(self, sequence: Sequence) -> None:
        """Note that the forward pass wrote the last token of a prompt."""

    def finished(self, sequence: Sequence) -> None:
        """Note that a sequence is answered, and is about to free its blocks."""

    def forget(self, sequence: Sequence) -> None:
        """Note that a sequence ends here, finished or aborted; its load must stop at once."""


def is_null(config: Config, block: int) -> bool:
    """Tell whether a table entry stands for a block that has left a window."""
    return config.null_block and block == PADDING_BLOCK
