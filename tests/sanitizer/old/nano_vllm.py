# SPDX-License-Identifier: Apache-2.0
"""The adapter of nano-vllm for its older commits, from the checkout named by KVCORE_NANO_VLLM."""

from __future__ import annotations

from typing import Any

from kvcore.sanitizer.engines import nano_vllm
from tests.sanitizer.old.versions import head


class Engine(nano_vllm.Engine):
    """The step of those commits. The oldest computes prompts as a whole and counts no chunks."""

    def __init__(self, world: Any) -> None:
        super().__init__(world)
        self.counts_none = False
        schedule = self.target.schedule

        def scheduled() -> Any:
            sequences, is_prefill = schedule()
            for each in sequences:
                if not hasattr(each, "num_scheduled_tokens") or self.counts_none:
                    self.counts_none = True
                    rest = len(each) - each.num_cached_tokens
                    each.num_scheduled_tokens = rest if is_prefill else 1
            return sequences, is_prefill

        self.target.schedule = scheduled

    def step(self) -> None:
        if self.target.is_finished():
            return
        sequences, is_prefill = self.target.schedule()
        answers = [self.world.token(len(each)) for each in sequences]
        phase = () if self.counts_none else (is_prefill,)
        self.target.postprocess(sequences, answers, *phase)


class Adapter(nano_vllm.Adapter):
    NAME = f"nano-vllm {head('nano-vllm')}"
    Engine = Engine

    @staticmethod
    def version() -> str:
        return head("nano-vllm")
