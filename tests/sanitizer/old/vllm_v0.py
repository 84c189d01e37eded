# SPDX-License-Identifier: Apache-2.0
"""The adapter of vLLM 0.4.2 to 0.5.4, whose first scheduler and block managers run unchanged.

A group has one sequence, so nothing is forked and nothing swapped.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, ClassVar

from kvcore.sanitizer import Chunk
from kvcore.sanitizer.hunter.adapter import EngineAdapter
from kvcore.sanitizer.hunter.driven import Driven
from kvcore.sanitizer.hunter.kit import BatchReporter, around
from tests.sanitizer.old.absent import called, release, source

PRESENT = ("core", "sequence", "block")


class Engine(Driven):
    """LLMEngine.step around the Scheduler, with letters instead of the model's answers."""

    def __init__(self, world: Any) -> None:
        self.world, self.num_blocks = world, world.num_blocks
        self.its = source("sequence", *PRESENT)
        self.length = min(world.max_tokens, world.num_blocks * world.block_size)
        scheduling = SimpleNamespace(
            max_num_seqs=world.max_rows, max_model_len=self.length, delay_factor=0.0,
            max_num_batched_tokens=max(world.token_budget, world.max_rows, self.length),
            chunked_prefill_enabled=False, num_lookahead_slots=0, preemption_mode=None,
            use_v2_block_manager=world.axes["block_manager"] == "v2", embedding_mode=False,
        )  # fmt: skip
        cache = SimpleNamespace(
            block_size=world.block_size, num_gpu_blocks=world.num_blocks, num_cpu_blocks=0,
            sliding_window=None, enable_prefix_caching=True, cache_dtype="auto",
        )  # fmt: skip
        scheduler = source("core.scheduler", *PRESENT).Scheduler
        self.target = called(scheduler, scheduler_config=scheduling, cache_config=cache)
        self.groups: dict[str, Any] = {}
        self.new: dict[str, int] = {}

    def arrive(self, arrival: Any) -> None:
        prompt = list(arrival.prompt)
        if len(prompt) + arrival.new > self.length:
            raise ValueError("longer than max_model_len")
        sequence = called(
            self.its.Sequence, seq_id=len(self.groups), prompt="", prompt_token_ids=prompt,
            inputs={"prompt": "", "prompt_token_ids": prompt}, block_size=self.world.block_size,
        )  # fmt: skip
        params = SimpleNamespace(n=1, best_of=1, use_beam_search=False, max_tokens=arrival.new)
        group = called(
            self.its.SequenceGroup, request_id=arrival.name, seqs=[sequence],
            sampling_params=params, arrival_time=float(len(self.groups)),
        )  # fmt: skip
        self.groups[arrival.name], self.new[arrival.name] = group, arrival.new
        self.target.add_seq_group(group)

    def step(self) -> None:
        if not self.target.has_unfinished_seqs():
            return
        planned, outputs = self.target.schedule()[:2]
        for group in outputs.ignored_seq_groups:
            for each in group.get_seqs():
                each.status = self.its.SequenceStatus.FINISHED_IGNORED
        for chosen, data in zip(outputs.scheduled_seq_groups, planned, strict=True):
            chosen.seq_group.update_num_computed_tokens(chosen.token_chunk_size)
            if data.do_sample:
                self.append(chosen.seq_group)
        self.target.free_finished_seq_groups()

    def append(self, group: Any) -> None:
        sequence = group.get_seqs()[0]
        token = self.world.token(sequence.get_len())
        sequence.append_token_id(token, {token: SimpleNamespace(logprob=0.0)})
        if sequence.get_output_len() == self.new[group.request_id]:
            sequence.status = self.its.SequenceStatus.FINISHED_LENGTH_CAPPED
            self.target.free_seq(sequence)

    def abort(self, name: str) -> None:
        self.target.abort_seq_group(name)

    @property
    def live(self) -> list[str]:
        return [name for name, each in self.groups.items() if not each.is_finished()]

    def free(self) -> int:
        return int(self.target.block_manager.get_num_free_gpu_blocks())


class _Tokens(Sequence[int]):
    """The tokens of a sequence, which grow."""

    def __init__(self, data: Any) -> None:
        self.data = data

    def __len__(self) -> int:
        return int(self.data.get_len())

    def __getitem__(self, at: Any) -> Any:
        return self.data.get_token_ids()[at]


class Adapter(EngineAdapter):
    NAME = f"vllm {release()}"
    AXES: ClassVar[dict[str, tuple[Any, ...]]] = {
        "block_size": (16, 4, 8),
        "block_manager": ("v1", "v2"),
    }
    MOVES = frozenset({"abort"})
    Engine = Engine

    @staticmethod
    def version() -> str:
        return release()

    @staticmethod
    def refusal(error: BaseException) -> bool:
        return str(error) == "longer than max_model_len"

    @staticmethod
    def attach(target: Any, sanitizer: Any) -> None:
        """Follow a Scheduler: the tables and prefixes that it gives to the workers."""
        it = BatchReporter(sanitizer)
        names: dict[int, str] = {}  # of sequences

        @around(target, "schedule")
        def scheduled(inner: Any) -> Any:
            planned, outputs, *more = inner()
            assert not outputs.blocks_to_swap_in
            assert not outputs.blocks_to_swap_out
            chunks = [follow(each) for each in planned]
            copies = outputs.blocks_to_copy
            if isinstance(copies, dict):
                copies = [(old, new) for old, many in copies.items() for new in many]
            sanitizer.copy(copies)
            if chunks:
                it.ran(chunks)
            return planned, outputs, *more

        def follow(data: Any) -> Chunk:
            (number, table), name = next(iter(data.block_tables.items())), data.request_id
            tokens = data.seq_data[number].get_token_ids()
            it.begin(name, _Tokens(data.seq_data[number]))
            it.show(name, list(table))
            names[number] = name
            if not data.is_prompt:
                return Chunk(name, len(tokens) - 1, 1)
            start = len(data.computed_block_nums or ()) * target.cache_config.block_size
            return Chunk(name, start, len(tokens) - start)

        @around(target.block_manager, "free")
        def freed(inner: Any, sequence: Any, *more: Any) -> None:
            inner(sequence, *more)
            if (name := names.pop(sequence.seq_id, "")) and sequence.is_finished():
                it.end(name)
            elif name:
                it.drop(name)
