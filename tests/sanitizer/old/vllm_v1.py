# SPDX-License-Identifier: Apache-2.0
"""The adapter of vLLM 0.6.6.post1 and 0.7.0: the first KVCacheManager, under its scheduler.

Both run unchanged, and so do their requests.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, ClassVar

from kvcore.sanitizer import Chunk
from kvcore.sanitizer.hunter.adapter import EngineAdapter
from kvcore.sanitizer.hunter.driven import Driven
from kvcore.sanitizer.hunter.kit import BatchReporter, around
from tests.sanitizer.old.absent import called, release, source

PRESENT = ("v1.core", "v1.request", "v1.utils")


class Engine(Driven):
    """EngineCore.step around the Scheduler, with letters instead of the model's answers."""

    def __init__(self, world: Any) -> None:
        self.world, self.num_blocks = world, world.num_blocks
        scheduler = source("v1.core.scheduler", *PRESENT)
        self.its = source("v1.request", *PRESENT)
        self.length = min(world.max_tokens, world.num_blocks * world.block_size)
        scheduling = SimpleNamespace(
            max_num_seqs=world.max_rows, max_model_len=self.length,
            max_num_batched_tokens=max(world.token_budget, world.max_rows),
            max_num_encoder_input_tokens=0, encoder_cache_size=0,
        )  # fmt: skip
        cache = SimpleNamespace(
            num_gpu_blocks=world.num_blocks, block_size=world.block_size,
            sliding_window=None, enable_prefix_caching=True,
        )  # fmt: skip
        self.target = called(
            scheduler.Scheduler, scheduler_config=scheduling, cache_config=cache,
            model_config=SimpleNamespace(is_multimodal_model=False),
        )  # fmt: skip
        self.requests: dict[str, Any] = {}

    def arrive(self, arrival: Any) -> None:
        if len(arrival.prompt) + arrival.new > self.length:
            raise ValueError("longer than max_model_len")
        prompt = {"prompt": None, "prompt_token_ids": list(arrival.prompt)}
        media: dict[str, list[Any]] = {"multi_modal_placeholders": [], "multi_modal_inputs": []}
        params = SimpleNamespace(max_tokens=arrival.new, ignore_eos=True, stop_token_ids=())
        request = called(
            self.its.Request, request_id=arrival.name, arrival_time=0.0, sampling_params=params,
            inputs=SimpleNamespace(**prompt, **media, multi_modal_hashes=[]), **prompt, **media,
        )  # fmt: skip
        self.requests[arrival.name] = request
        self.target.add_request(request)

    def step(self) -> None:
        if not self.target.get_num_unfinished_requests():
            return
        planned = self.target.schedule()
        names, sampled = list(planned.num_scheduled_tokens), []
        for name in names:
            end = self.requests[name].num_computed_tokens + planned.num_scheduled_tokens[name]
            sampled.append(self.world.token(end))
        numbers = {name: at for at, name in enumerate(names)}
        answers = SimpleNamespace(req_id_to_index=numbers, sampled_token_ids=sampled)
        self.target.update_from_output(planned, answers)

    def abort(self, name: str) -> None:
        self.target.finish_requests(name, self.its.RequestStatus.FINISHED_ABORTED)

    @property
    def live(self) -> list[str]:
        return [name for name, each in self.requests.items() if not each.is_finished()]

    def free(self) -> int:
        return int(self.target.kv_cache_manager.free_block_queue.num_free_blocks)


class Adapter(EngineAdapter):
    NAME = f"vllm {release()}"
    AXES: ClassVar[dict[str, tuple[Any, ...]]] = {"block_size": (16, 4, 8)}
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
        """Follow a Scheduler: what it gives to the workers, before it takes their answers."""
        it = BatchReporter(sanitizer)
        arrived: dict[str, Any] = {}

        @around(target, "add_request")
        def added(inner: Any, request: Any) -> None:
            inner(request)
            arrived[request.request_id] = request

        @around(target, "schedule")
        def scheduled(inner: Any) -> Any:
            planned = inner()
            for name in planned.finished_req_ids:
                it.end(name)
            for name in planned.preempted_req_ids:
                sanitizer.drop(name)
            chunks = []
            for each in planned.scheduled_new_reqs:
                it.begin(each.req_id, arrived.pop(each.req_id)._all_token_ids)
            first = [*planned.scheduled_new_reqs, *planned.scheduled_resumed_reqs]
            lists = [(each, each.block_ids) for each in first]
            lists += [(each, each.new_block_ids) for each in planned.scheduled_running_reqs]
            for each, blocks in lists:
                sanitizer.extend(each.req_id, 0, blocks)
                count = planned.num_scheduled_tokens[each.req_id]
                chunks.append(Chunk(each.req_id, each.num_computed_tokens, count))
            it.ran(chunks)
            return planned
