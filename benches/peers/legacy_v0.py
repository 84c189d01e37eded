# SPDX-License-Identifier: Apache-2.0
"""Play V0's stories on vLLM 0.8.5's block manager, and steps of its scheduler over both managers.

The stories are those of benches/legacy_v0.py. The original asserts that a sequence's cached
tokens were queried before it is freed, so all are queried, outside the clock. Only the facade takes
batches, so no table shows that. The scheduler is vLLM's own in both cases.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import vllm.core.scheduler as vllm_scheduler
from vllm import SamplingParams
from vllm.config import CacheConfig, SchedulerConfig
from vllm.core.block.prefix_caching_block import PrefixCachingBlockAllocator
from vllm.core.block_manager import SelfAttnBlockSpaceManager
from vllm.core.interfaces import AllocStatus as VllmStatus
from vllm.core.interfaces import BlockSpaceManager
from vllm.inputs import token_inputs
from vllm.sequence import Logprob
from vllm.sequence import Sequence as VllmSequence
from vllm.sequence import SequenceGroup as VllmGroup

from benches.legacy import Each, Work
from benches.legacy_v0 import NUM_BLOCKS, NUM_GROUPS, PROMPT, SIZE, Blocks, Naive
from benches.peers.legacy import Beside
from kvcore.legacy.blocks.blocks import BackendName
from kvcore.legacy.v0.block_manager import SelfAttnBlockSpaceManager as FacadeManager
from kvcore.legacy.v0.sequences import AllocStatus, SequenceGroup

NUM_STEPS = 24
MAX_MODEL_LEN = 2048


class DecoderGroup(SequenceGroup):
    """A group as the original manager expects it."""

    def is_encoder_decoder(self) -> bool:
        """Return False: it has no encoder."""
        return False


class Driven(Naive):
    """A story of benches/legacy_v0.py, on either manager."""

    def __init__(self, kind: BackendName | None, *, caching: bool) -> None:
        """kind: the facade's backend; None for the original."""
        super().__init__("python")
        self.caching = caching
        self.manager: Any = manager(kind, caching=caching)
        self.groups = [DecoderGroup(each.request_id, each.seqs) for each in self.groups]

    def phases(self) -> Iterator[tuple[str, Work]]:
        """Yield all phases but the batch; query cached tokens before sequences are freed."""
        if not hasattr(self.manager, "take_batch"):
            self.manager.take_batch = list
        for name, work in super().phases():
            if name == "take_batch":
                work()
                continue
            if name.startswith("free"):
                for seq in (seq for group in self.groups for seq in group.seqs):
                    self.manager.get_num_cached_tokens(seq)
            yield name, work


class OriginalBlocks(Blocks):
    """Block objects of the original's allocator."""

    def __init__(self) -> None:
        super().__init__("python")
        self.allocator: Any = PrefixCachingBlockAllocator(NUM_BLOCKS, SIZE)


class Steps:
    """The scheduler over a manager: prompts, steps that decode one token, forks, the end."""

    def __init__(self, make: Callable[..., Any], statuses: type, *, caching: bool) -> None:
        self.statuses = statuses
        BlockSpaceManager.get_block_space_manager_class = lambda _: make
        most = NUM_GROUPS * PROMPT
        scheduling = SchedulerConfig(
            "generate",
            max_num_batched_tokens=most,
            max_num_seqs=2 * NUM_GROUPS,
            max_model_len=MAX_MODEL_LEN,
        )
        cache = CacheConfig(SIZE, 1.0, 1, "auto", enable_prefix_caching=caching)
        cache.num_gpu_blocks = cache.num_cpu_blocks = NUM_BLOCKS
        self.scheduler = vllm_scheduler.Scheduler(scheduling, cache, None)
        shared = list(range(PROMPT // 2))
        self.groups = [
            self.group(number, shared + [number] * (PROMPT // 2)) for number in range(NUM_GROUPS)
        ]
        for group in self.groups:
            self.scheduler.add_seq_group(group)

    def group(self, number: int, tokens: list[int]) -> Any:
        """Return a request with one sequence."""
        seqs = [VllmSequence(number, token_inputs(tokens), SIZE)]
        sampling = SamplingParams(max_tokens=MAX_MODEL_LEN)
        return VllmGroup(str(number), seqs, arrival_time=0.0, sampling_params=sampling)

    def step(self, outputs: list[Any]) -> None:
        """Call the scheduler for the next step."""
        outputs.append(self.scheduler.schedule()[1])

    def apply(self, output: Any) -> None:
        """Append the model's tokens."""
        for scheduled in output.scheduled_seq_groups:
            group = scheduled.seq_group
            group.update_num_computed_tokens(scheduled.token_chunk_size)
            for seq in group.get_seqs():
                seq.append_token_id(1, {1: Logprob(0.0)})

    def phases(self) -> Iterator[tuple[str, Work]]:
        """Yield phases with one call per step; the model's answers are outside the clock."""
        vllm_scheduler.AllocStatus = self.statuses
        outputs: list[Any] = []
        yield f"schedule {NUM_GROUPS} prompts of {PROMPT}", partial(self.step, outputs)
        for _ in range(NUM_STEPS):
            self.apply(outputs.pop())
            yield f"schedule {NUM_GROUPS} decodes", partial(self.step, outputs)
        seqs = [group.seqs[0] for group in self.groups]
        yield "free_seq, 34 blocks", Each(self.scheduler.free_seq, seqs)


def manager(kind: BackendName | None, *, caching: bool) -> Any:
    """Make the original manager, or the facade on a backend."""
    sizes = (SIZE, NUM_BLOCKS, NUM_BLOCKS)
    if kind is None:
        return SelfAttnBlockSpaceManager(*sizes, enable_caching=caching)
    return FacadeManager(*sizes, enable_caching=caching, backend=kind)


def steps(caching: bool) -> Beside:
    """Return the comparison of the scheduler's steps."""
    return Beside(
        f"vLLM's scheduler, {'with' if caching else 'without'} prefix caching",
        lambda: Steps(SelfAttnBlockSpaceManager, VllmStatus, caching=caching),
        lambda kind: Steps(partial(FacadeManager, backend=kind), AllocStatus, caching=caching),
    )


def calls(caching: bool) -> Beside:
    """Return the comparison of the manager's calls."""
    return Beside(
        f"V0's manager, {'with' if caching else 'without'} prefix caching",
        lambda: Driven(None, caching=caching),
        lambda kind: Driven(kind, caching=caching),
    )


BESIDE = (
    calls(caching=False),
    calls(caching=True),
    Beside("V0's block objects", OriginalBlocks, Blocks),
    steps(caching=False),
    steps(caching=True),
)
