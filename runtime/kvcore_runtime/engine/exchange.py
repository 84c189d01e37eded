# SPDX-License-Identifier: Apache-2.0
"""Where an engine gives and takes keys and values that one engine computes and another one uses.

The engine calls these at fixed places of its step, on its own thread; a call may call the
manager, whose open batch then is the next step's (`Engine.open_number`). What cannot be had is
computed: a load that fails, wholly or in part, costs time and never an answer. Nobody but the
sequence itself sees a block whose load is not done.
"""

from __future__ import annotations

from kvcore import Config, Hit, Refused
from kvcore_runtime.cache.tables import PADDING_BLOCK
from kvcore_runtime.engine.sequence import Sequence


class Exchange:
    """With nobody: gives nothing and has nothing. Others override what they need."""

    needs_idle_cache = False
    """Whether its calls touch the cache by themselves, so that no step may run meanwhile."""
    takes_prompts = False
    """Whether `prompt_computed` needs all blocks of the prompt, those too that a window leaves."""

    @property
    def is_busy(self) -> bool:
        """Whether a step is needed to get on, even if no sequence can be computed."""
        return False

    def is_fetching(self, sequence: Sequence) -> bool:
        """Whether a waiting sequence is to wait on, since what can be had of it is still fetched.

        Asked in every step; others are admitted meanwhile.
        """
        del sequence
        return False

    def begin(self, sequence: Sequence, hit: Hit) -> int | Refused:
        """Begin to load what can be had of a waiting sequence behind its hit.

        Returns the tokens that come, 0 for none; then nothing has changed.
        """
        del sequence, hit
        return 0

    def poll(self) -> list[Sequence]:
        """Get on with all loads, after the step's batch was applied; the sequences that are done.

        What the manager counts of them then is what they have.
        """
        return []

    def idle(self) -> None:
        """Note that a plan computes nothing: wait a moment if something comes from outside."""

    def flush(self, timeout_s: float) -> bool:
        """Wait until what was given away has been taken; whether it was in this time."""
        del timeout_s
        return True

    def cancelled(self, number: int) -> list[Sequence]:
        """Note that batch `number` and all later ones were cancelled, the open one too.

        What they stored or loaded is given up, whether it ran or not. Returns the sequences whose
        load was among it; they wait, or run, without it.
        """
        del number
        return []

    def prompt_computed(self, sequence: Sequence) -> None:
        """Note that the forward pass wrote the last token of a prompt."""

    def finished(self, sequence: Sequence) -> None:
        """Note that a sequence is answered, and is about to give its blocks back."""

    def forget(self, sequence: Sequence) -> None:
        """Note that a sequence ends here, finished or aborted; its load must stop at once."""


def is_null(config: Config, block: int) -> bool:
    """Whether an entry of a table stands for a block that was given back behind a window."""
    return config.null_block and block == PADDING_BLOCK
