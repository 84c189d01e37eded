# SPDX-License-Identifier: Apache-2.0
"""The adapter for nano-vllm at commit bb823b3, from the checkout named by KVCORE_NANO_VLLM.

Its Scheduler and BlockManager run unchanged. Several GPUs are not followed. It has no abort, no
change of weights and no reset.
"""

from __future__ import annotations

import importlib
import os
import sys
import types
from pathlib import Path
from typing import Any, ClassVar

from kvcore.sanitizer import Chunk
from kvcore.sanitizer.hunter.adapter import EngineAdapter
from kvcore.sanitizer.hunter.driven import AbsentModules, Driven
from kvcore.sanitizer.hunter.kit import BatchReporter, around

TESTED = "bb823b3"


def source() -> Any:
    """Import its scheduler, without its `__init__`, which imports kernels, and its settings, which
    check a model's folder.
    """
    if "nanovllm" not in sys.modules:
        root = Path(os.environ["KVCORE_NANO_VLLM"])
        AbsentModules(root, ("nanovllm.config",), {}, ("nanovllm",))
    return importlib.import_module("nanovllm.engine.scheduler")


class Engine(Driven):
    """LLMEngine.step around the Scheduler, with letters instead of the model's answers."""

    def __init__(self, world: Any) -> None:
        self.world = world
        scheduler = source()
        scheduler.Sequence.block_size = world.block_size
        self.target = scheduler.Scheduler(
            types.SimpleNamespace(
                max_num_seqs=world.max_rows,
                max_num_batched_tokens=world.token_budget,
                eos=-1,
                kvcache_block_size=world.block_size,
                num_kvcache_blocks=world.num_blocks,
            )
        )
        self.num_blocks = world.num_blocks
        self.sequences: dict[str, Any] = {}

    def arrive(self, arrival: Any) -> None:
        params = importlib.import_module("nanovllm.sampling_params").SamplingParams(
            max_tokens=arrival.new, ignore_eos=True
        )
        sequence = source().Sequence(list(arrival.prompt), params)
        sequence.seq_id = arrival.name
        self.sequences[arrival.name] = sequence
        self.target.add(sequence)

    def step(self) -> None:
        if self.target.is_finished():
            return
        sequences, is_prefill = self.target.schedule()
        answers = [self.world.token(len(each)) for each in sequences]
        self.target.postprocess(sequences, answers, is_prefill)

    @property
    def live(self) -> list[str]:
        return [name for name, each in self.sequences.items() if not each.is_finished]

    def free(self) -> int:
        return len(self.target.block_manager.free_block_ids)


class Adapter(EngineAdapter):
    NAME = f"nano-vllm {TESTED}"
    AXES: ClassVar[dict[str, tuple[Any, ...]]] = {"block_size": (4, 2, 8)}
    Engine = Engine

    @staticmethod
    def attach(target: Any, sanitizer: Any) -> None:
        """Follow a Scheduler: `schedule`, `postprocess`, and the blocks that `deallocate` frees."""
        it = BatchReporter(sanitizer)

        @around(target, "schedule")
        def scheduled(inner: Any) -> Any:
            sequences, is_prefill = inner()
            chunks = []
            for each in sequences:
                name = str(each.seq_id)
                it.begin(name, each.token_ids)
                it.show(name, each.block_table)
                start = len(each) - 1
                if is_prefill:  # older commits compute the last token of a full hit again
                    start = min(start, each.num_cached_tokens)
                chunks.append(Chunk(name, start, each.num_scheduled_tokens))
            it.ran(chunks)
            return sequences, is_prefill

        @around(target.block_manager, "deallocate")
        def freed(inner: Any, sequence: Any) -> None:
            inner(sequence)
            it.drop(str(sequence.seq_id))

        @around(target, "postprocess")
        def finished(inner: Any, sequences: Any, *more: Any) -> None:
            inner(sequences, *more)
            for each in sequences:
                if each.is_finished:
                    it.end(str(each.seq_id))
