# SPDX-License-Identifier: Apache-2.0
"""What an operator does to a running scheduler: resets of its caches, and pauses."""

from __future__ import annotations

import random
from typing import Any

import attrs
from vllm.v1.core.sched.interface import PauseState

RESETS = ("reset", "reset running", "reset encoder")
PAUSES = (PauseState.PAUSED_NEW.name, PauseState.PAUSED_ALL.name)


@attrs.define
class Interruptions:
    """Draws them by a seed. paused: whether the last pause has not ended."""

    dice: random.Random
    paused: bool = False

    def draw(self) -> list[str]:
        """Return what happens before a step: mostly nothing."""
        drawn = []
        if self.paused and self.dice.random() < 0.3:
            self.paused = False
            drawn.append(PauseState.UNPAUSED.name)
        elif not self.paused and self.dice.random() < 0.04:
            self.paused = True
            drawn.append(self.dice.choice(PAUSES))
        if self.dice.random() < (0.15 if self.paused else 0.05):
            drawn.append(self.dice.choice(RESETS))
        return drawn


def interrupt(scheduler: Any, name: str) -> object:
    """Do this to a scheduler. Returns its answer, or the text of vLLM's own refusal."""
    if name not in RESETS:
        return scheduler.set_pause_state(PauseState[name])
    if name == "reset":
        return scheduler.reset_prefix_cache()
    try:
        answer = scheduler.reset_prefix_cache(reset_running_requests=True)
    except RuntimeError as error:
        return str(error)
    if name == "reset encoder":  # as after new weights
        scheduler.reset_encoder_cache()
    return answer
