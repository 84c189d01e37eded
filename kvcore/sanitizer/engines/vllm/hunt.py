# SPDX-License-Identifier: Apache-2.0
"""vLLM 0.33.0 for the hunter: its schedulers and their KVCacheManager, in EngineCore's loop.

There is no worker: the sampled tokens are computed from the scheduler's outputs. Connectors,
drafts, media and pipeline parallelism are not driven.
"""

import importlib
import os
from types import SimpleNamespace
from typing import Any, ClassVar

from kvcore.sanitizer import CacheGroup, Chunk
from kvcore.sanitizer.hunter.adapter import EngineAdapter
from kvcore.sanitizer.hunter.driven import Driven
from kvcore.sanitizer.hunter.kit import BatchReporter, around

os.environ.setdefault("VLLM_LOGGING_LEVEL", "CRITICAL")
os.environ.setdefault("VLLM_TARGET_DEVICE", "cpu")


def source() -> Any:
    """Import the modules of vLLM that a hunt uses, by the last parts of their names."""
    names = (
        *("config", "sampling_params", "v1.request", "v1.kv_cache_interface", "v1.outputs"),
        *("v1.core.kv_cache_utils", "v1.core.sched.scheduler", "v1.core.sched.async_scheduler"),
        "utils.hashing",
    )
    return SimpleNamespace(
        **{name.split(".")[-1]: importlib.import_module(f"vllm.{name}") for name in names}
    )


def specs(kinds: Any, layers: str, size: int) -> list[Any]:
    """Make the specifications of a model's layers. kinds: the module of vLLM's."""
    made, float32 = [], importlib.import_module("torch").float32
    spec: Any = {"block_size": size, "num_kv_heads": 1, "head_size": 1, "dtype": float32}
    if layers != "window":
        made.append(kinds.FullAttentionSpec(**spec))
    if layers in ("window", "both"):
        made.append(kinds.SlidingWindowSpec(**spec, sliding_window=2 * size))
    if layers == "states":
        state = {"shapes": ((1,),), "dtypes": (float32,), "mamba_cache_mode": "align"}
        made.append(kinds.MambaSpec(block_size=size, **state))
    return made


class Engine(Driven):
    """EngineCore's step, or its step with a queue of batches, around a scheduler."""

    def __init__(self, world: Any) -> None:
        its, axes, size = source(), world.axes, world.block_size
        self.world, self.its = world, its
        self.num_blocks = world.num_blocks + 1  # plus the null block
        self.depth = 2 if axes["async_scheduling"] else 1
        groups = specs(its.kv_cache_interface, axes["layers"], size)
        kind = its.kv_cache_interface.KVCacheGroupSpec
        self.length = world.max_tokens
        config = self.config()
        while sum(-(-g.max_memory_usage_bytes(config) // g.page_size_bytes) for g in groups) > (
            world.num_blocks
        ):
            self.length -= 1  # as the engine checks when it starts
            config = self.config()
        cache = its.kv_cache_interface.KVCacheConfig(
            num_blocks=self.num_blocks,
            kv_cache_tensors=[],
            kv_cache_groups=[kind([str(i)], each) for i, each in enumerate(groups)],
        )
        its.kv_cache_utils.init_none_hash(its.hashing.sha256)
        self.hasher = its.kv_cache_utils.get_request_block_hasher(size, its.hashing.sha256)
        scheduler = its.scheduler.Scheduler
        if axes["async_scheduling"]:
            scheduler = its.async_scheduler.AsyncScheduler
        grammar = SimpleNamespace(accept_tokens=lambda *_: True)
        self.target = scheduler(config, cache, grammar, size, size)
        self.requests: dict[str, Any] = {}
        self.known: dict[str, int] = {}  # request: tokens known to its worker
        self.queue: list[Any] = []

    def config(self) -> Any:
        """Make a VllmConfig without the files of a model."""
        world, axes, config = self.world, self.world.axes, self.its.config
        cache = config.CacheConfig(block_size=world.block_size, enable_prefix_caching=True)
        cache.num_gpu_blocks = self.num_blocks
        if axes["layers"] == "states":
            cache.mamba_cache_mode = "align"
        length = self.length
        scheduling = config.SchedulerConfig(
            max_num_batched_tokens=max(world.token_budget, world.max_rows),
            max_num_seqs=world.max_rows,
            max_model_len=length,
            is_encoder_decoder=False,
            enable_chunked_prefill=True,
            long_prefill_token_threshold=min(length, axes["chunk_pages"] * world.block_size),
            policy=axes["policy"],
            async_scheduling=axes["async_scheduling"],
            watermark=axes["watermark"],
            scheduler_reserve_full_isl=axes["scheduler_reserve_full_isl"],
        )
        model = SimpleNamespace(
            uses_mrope=False, is_encoder_decoder=False, max_model_len=length, is_diffusion=False,
            runner_type="generate", supports_multimodal_inputs=False, return_sampling_mask=False,
        )  # fmt: skip
        return SimpleNamespace(
            scheduler_config=scheduling, cache_config=cache, model_config=model, lora_config=None,
            parallel_config=config.ParallelConfig(), kv_events_config=None, num_lookahead_tokens=0,
            observability_config=config.ObservabilityConfig(), kv_transfer_config=None,
            ec_transfer_config=None, speculative_config=None, num_speculative_tokens=0,
            num_prefill_lookahead_tokens=0, num_hash_lookahead_tokens=0, is_mm_encoder_only=False,
            max_concurrent_batches=self.depth, use_v2_model_runner=axes["use_v2_model_runner"],
            max_in_flight_tokens=self.depth * scheduling.max_num_batched_tokens,
            ec_manager_config=SimpleNamespace(get_encoder_cache_manager_obj=lambda: None),
            aux_output_config=SimpleNamespace(enabled=False),
        )  # fmt: skip

    def arrive(self, arrival: Any) -> None:
        if len(arrival.prompt) + arrival.new > self.length:
            raise ValueError("longer than max_model_len")
        params = self.its.sampling_params.SamplingParams(max_tokens=arrival.new, ignore_eos=True)
        params.update_from_generation_config({}, 99)
        request = self.its.request.Request(
            request_id=arrival.name, prompt_token_ids=list(arrival.prompt), pooling_params=None,
            sampling_params=params, priority=arrival.priority, arrival_time=len(self.requests),
            block_hasher=self.hasher, cache_salt=str(arrival.tenant) if arrival.tenant else None,
        )  # fmt: skip
        self.requests[arrival.name] = request
        self.target.add_request(request)

    def step(self) -> None:
        planned = None
        if self.target.has_requests():
            planned = self.target.schedule()
            self.queue.append((planned, self.answers(planned)))
            more = planned.total_num_scheduled_tokens > 0 or self.target.has_requests()
            if len(self.queue) < self.depth and more:
                return
        if self.queue:
            self.target.update_from_output(*self.queue.pop(0))

    def answers(self, planned: Any) -> Any:
        """Return the workers' answers: a token per request whose last known token was computed."""
        cached = planned.scheduled_cached_reqs
        starts = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        for new in planned.scheduled_new_reqs:
            starts[new.req_id] = new.num_computed_tokens
            self.known[new.req_id] = len(new.prefill_token_ids or new.prompt_token_ids)
        for name in cached.resumed_req_ids:
            self.known[name] = len(cached.all_token_ids[name])
        names, sampled = list(planned.num_scheduled_tokens), []
        for name in names:
            end = starts[name] + planned.num_scheduled_tokens[name]
            sampled.append([self.world.token(end)] if end >= self.known[name] else [])
            self.known[name] = max(self.known[name], end + len(sampled[-1]))
        return self.its.outputs.ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: at for at, name in enumerate(names)},
            sampled_token_ids=sampled,
        )

    def abort(self, name: str) -> None:
        status = self.its.request.RequestStatus.FINISHED_ABORTED
        self.target.finish_requests(name, status)

    def epoch(self) -> bool:
        """Change the weights, and reset the caches together with the running requests."""
        return bool(self.target.reset_prefix_cache(reset_running_requests=True))

    def reset(self) -> None:
        self.target.reset_prefix_cache()

    def finish_batches(self) -> None:
        while self.queue or self.target.has_requests():
            self.step()

    @property
    def in_flight(self) -> bool:
        return bool(self.queue)

    @property
    def live(self) -> list[str]:
        return [name for name, each in self.requests.items() if not each.is_finished()]

    def free(self) -> int:
        return int(self.target.kv_cache_manager.block_pool.get_num_free_blocks())


class Adapter(EngineAdapter):
    NAME, MODULES = "vllm 0.33.0", ("vllm",)
    AXES: ClassVar[dict[str, tuple[Any, ...]]] = {
        "block_size": (16, 4, 8),
        "policy": ("fcfs", "priority"),
        "async_scheduling": (True, False),
        "layers": ("full", "both", "window", "states"),
        "chunk_pages": (0, 1, 2, 4),
        "watermark": (0.0, 0.2),
        "scheduler_reserve_full_isl": (True, False),
        "use_v2_model_runner": (True, False),
    }
    MOVES = frozenset({"abort", "epoch", "reset", "priority", "tenants"})
    Engine = Engine

    @staticmethod
    def refusal(error: BaseException) -> bool:
        return str(error) == "longer than max_model_len"

    @staticmethod
    def groups(engine: Any) -> list[CacheGroup]:
        of = importlib.import_module("kvcore.sanitizer.engines.vllm.scheduler").cache_group
        groups = engine.target.kv_cache_config.kv_cache_groups
        return [of(each.kv_cache_spec) for each in groups]

    @staticmethod
    def attach(target: Any, sanitizer: Any) -> None:
        """Follow a scheduler as the attached mode does, but from the planning of a step on."""
        its = importlib.import_module("kvcore.sanitizer.engines.vllm.scheduler")
        arrived: dict[str, Any] = {}
        it = BatchReporter(sanitizer)
        scheduled: set[str] = set()  # in this step

        @around(target.kv_cache_manager, "allocate_slots")
        def allocated(inner: Any, request: Any, *args: Any, **named: Any) -> Any:
            blocks = inner(request, *args, **named)
            if blocks is not None:  # else it will be preempted, and nothing of it was scheduled
                scheduled.add(request.request_id)
            return blocks

        @around(target, "_preempt_request")
        def preempted(inner: Any, request: Any, *args: Any, **named: Any) -> None:
            if request.request_id in scheduled:
                chunk = request.num_computed_tokens < request.num_prompt_tokens
                goal = "chunk-preempted-in-its-step" if chunk else "preempted-in-its-step"
                sanitizer.reached.add(goal)
            inner(request, *args, **named)

        @around(target, "add_request")
        def added(inner: Any, request: Any) -> None:
            inner(request)
            arrived[request.request_id] = request

        @around(target, "schedule")
        def planned(inner: Any, *args: Any) -> Any:
            output = inner(*args)
            scheduled.clear()  # a reset preempts too, but between two steps
            names, starts, counts, tables = its.work_of(sanitizer, arrived, output)
            for at, lists in tables.items():
                for group_id, blocks in enumerate(lists):
                    if blocks:
                        sanitizer.extend(names[at], group_id, blocks)
            it.issue(list(map(Chunk, names, starts, counts)))
            return output

        @around(target, "update_from_output")
        def updated(inner: Any, output: Any, result: Any) -> Any:
            it.complete()
            return inner(output, result)
