# SPDX-License-Identifier: Apache-2.0
"""Compare vLLM 0.33.0's scheduler over its own manager and kvcore's, step by step.

Runs in vLLM's environment: `python -m benches.vllm` makes that and calls this. Both
sides get the same traffic. A step is equal if both schedule the same tokens and speculative tokens,
start requests at the same hits, give them the same block ids, have the same blocks in the index,
and announce the same ones in the runs with events (stored.py). The first step of a run that
differs is printed with the actions of each side, and with the rule that explains it (rules.py). The
exit status is 1 if no rule does.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

os.environ |= {
    "CUDA_VISIBLE_DEVICES": "",
    "HF_HUB_OFFLINE": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}  # before vLLM is imported

import attrs
import kvcore_vllm
import torch
from vllm.config import (
    CacheConfig,
    DeviceConfig,
    KVTransferConfig,
    ModelConfig,
    SchedulerConfig,
    SpeculativeConfig,
    VllmConfig,
)
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
    SlidingWindowSpec,
)
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from benches.vllm import connector
from benches.vllm.images import add_encoder, images_of
from benches.vllm.interruptions import interrupt
from benches.vllm.options import MODES, read_options
from benches.vllm.report import Step, Verdict, decisions, statistics, summary, verdict_of
from benches.vllm.rules import RULES, Watch, explain, unexplained_keys
from benches.vllm.stored import events_of, note_stored
from benches.vllm.traffic import Arrival, Traffic, sampled

MODEL = {
    "architectures": ["OPTForCausalLM"],
    "model_type": "opt",
    "torch_dtype": "float16",
    "hidden_size": 64,
    "ffn_dim": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "word_embed_proj_dim": 64,
    "max_position_embeddings": 2048,
    "vocab_size": 512,
}
"""A model name that vLLM requires; nothing is computed."""
MAX_MODEL_LEN = 400
SIZES = {
    "max_num_seqs": 8,
    "max_num_batched_tokens": 128,
    "max_model_len": MAX_MODEL_LEN,
    "long_prefill_token_threshold": 64,
}
NUM_DRAFTS = 3
WINDOW = 40
STEPS_BETWEEN_CHECKS = 10
IN_FLIGHT = {False: 1, True: 2}
"""Number of steps scheduled before the first output arrives, by whether it is asynchronous."""


@attrs.frozen
class World:
    """The parameters of a run, which follow from the seed: block size, pool, policy.

    on_failure: vLLM's policy for a request whose load failed, if loads can fail.
    """

    mode: str
    seed: int
    block_size: int
    num_blocks: int
    policy: str
    on_failure: str

    @property
    def is_async(self) -> bool:
        """Whether a step is scheduled before the previous step's tokens are known."""
        return MODES[self.mode].is_async

    @property
    def hash_block_size(self) -> int:
        """The tokens of a block hash."""
        return self.block_size // (1 + 3 * MODES[self.mode].has_parts)

    @property
    def attention_size(self) -> int:
        """The tokens of a block of attention, in some runs fewer than those of a state's."""
        return self.hash_block_size if self.seed % 3 == 0 else self.block_size

    @property
    def has_drafts(self) -> bool:
        """Whether there are speculative tokens."""
        return MODES[self.mode].has_drafts


def world_of(mode: str, seed: int) -> World:
    """Return a world: large or small blocks, roomy or tight pool, each policy, by the seed."""
    block_size = (16, 4)[seed % 2]
    num_shares = 1 + MODES[mode].has_windows + MODES[mode].has_states
    num_slots = (960, 640)[seed // 2 % 2] * num_shares
    return World(
        mode=mode,
        seed=seed,
        block_size=block_size,
        num_blocks=num_slots // block_size,
        policy=("fcfs", "priority")[seed // 4 % 2],
        on_failure=("recompute", "fail")[seed // 8 % 2],
    )


def make_config(world: World, model: str, **sizes: int) -> VllmConfig:
    """Make vLLM's configuration for a world. sizes: overrides for the scheduler's sizes."""
    length = sizes.get("max_model_len", MAX_MODEL_LEN)
    method = "ngram_gpu" if world.is_async else "ngram"
    speculative = SpeculativeConfig(
        method=method, num_speculative_tokens=NUM_DRAFTS, prompt_lookup_max=5, prompt_lookup_min=2
    )
    cache = CacheConfig(block_size=world.block_size, enable_prefix_caching=True)
    cache.num_gpu_blocks = world.num_blocks
    loads = KVTransferConfig(
        kv_connector=connector.NAME,
        kv_connector_module_path=connector.__name__,
        kv_connector_extra_config={"seed": world.seed},
        kv_role="kv_both",
        kv_load_failure_policy=world.on_failure,
    )
    config = VllmConfig(
        model_config=ModelConfig(
            model=model, skip_tokenizer_init=True, dtype="float16", max_model_len=length
        ),
        scheduler_config=SchedulerConfig(
            **SIZES | sizes,
            enable_chunked_prefill=True,
            is_encoder_decoder=False,
            async_scheduling=world.is_async,
            policy=world.policy,
            watermark=MODES[world.mode].watermark,
            # With windows vLLM's gate counts blocks that a request does not hold, and with states
            # it does not count the block of the state before a step.
            scheduler_reserve_full_isl=not (
                MODES[world.mode].has_windows or MODES[world.mode].has_states
            ),
            disable_hybrid_kv_cache_manager=MODES[world.mode].has_loads or None,
        ),
        cache_config=cache,
        device_config=DeviceConfig("cpu"),
        speculative_config=speculative if world.has_drafts else None,
        kv_transfer_config=loads if MODES[world.mode].has_loads else None,
        kv_events_config=events_of(world.mode, world.seed),
    )
    if MODES[world.mode].has_states:
        config.cache_config.mamba_cache_mode = "align"  # the model of this name has no such layers
    return config


class Side:
    """A scheduler with its requests, and a model that answers late."""

    def __init__(self, kind: type[Any], world: World, config: VllmConfig, seed: int) -> None:
        shape = {"num_kv_heads": 1, "head_size": 1, "dtype": torch.float32}
        shape["block_size"] = world.attention_size
        groups = [KVCacheGroupSpec(["full"], FullAttentionSpec(**shape))]
        if MODES[world.mode].has_windows:
            window = SlidingWindowSpec(sliding_window=WINDOW, **shape)
            groups.append(KVCacheGroupSpec(["window"], window))
        if MODES[world.mode].has_states:
            state = MambaSpec(
                block_size=world.block_size,
                shapes=((1,),),
                dtypes=(torch.float32,),
                mamba_cache_mode="align",
            )
            groups += [KVCacheGroupSpec([name], state) for name in ("state", "other state")]
        self.scheduler = kind(
            vllm_config=config,
            kv_cache_config=KVCacheConfig(
                num_blocks=world.num_blocks,
                kv_cache_tensors=[],
                kv_cache_groups=groups,
            ),
            structured_output_manager=StructuredOutputManager(config),
            block_size=world.block_size,
            hash_block_size=world.hash_block_size,
            log_stats=True,
        )
        self.world = world
        self.seed = seed
        self.answered: list[list[int]] = []
        self.interrupted: list[object] = []
        self.statistics: dict[str, object] = {}
        if MODES[world.mode].has_images:
            add_encoder(self.scheduler)
        self.in_flight: deque[tuple[int, Any, list[list[int]]]] = deque()
        self.stored = note_stored(self.scheduler)
        self._hasher = get_request_block_hasher(world.hash_block_size, sha256)

    def add(self, arrival: Arrival) -> None:
        """Add a request that arrives."""
        sampling = SamplingParams(max_tokens=arrival.max_tokens, ignore_eos=True)
        request = Request(
            request_id=arrival.name,
            prompt_token_ids=list(arrival.prompt),
            sampling_params=sampling,
            pooling_params=None,
            arrival_time=float(arrival.name),
            priority=arrival.priority,
            mm_features=images_of(arrival.prompt) if MODES[self.world.mode].has_images else None,
            block_hasher=self._hasher,
            resumable=MODES[self.world.mode].has_sessions,
        )
        request.session_id = arrival.name
        self.scheduler.add_request(request)

    def step(self, number: int) -> dict[str, object]:
        """Schedule, and take the output of the oldest step if enough are in flight."""
        planned = self.scheduler.schedule()
        decided = decisions(planned)
        if planned.total_num_scheduled_tokens or MODES[self.world.mode].has_loads:
            self.in_flight.append((number, planned, self.answers(number, planned)))
        if self.in_flight and (
            len(self.in_flight) == IN_FLIGHT[self.world.is_async]
            or not planned.total_num_scheduled_tokens
        ):
            decided["answers"] = self.take_output(*self.in_flight.popleft())
        decided["usage"] = round(self.scheduler.kv_cache_manager.usage, 6)
        decided["statistics"], self.statistics = self.statistics, {}
        decided["interrupted"], self.interrupted = self.interrupted, []
        decided["stored"] = self.stored.take()
        return decided

    def answers(self, number: int, planned: Any) -> list[list[int]]:
        """Return the model's tokens for each request of a step; none for a chunk of a prompt."""
        return [
            []
            if self.scheduler.requests[name].is_prefill_chunk
            else sampled(
                self.seed, number, name, planned.scheduled_spec_decode_tokens.get(name, ())
            )
            for name in planned.num_scheduled_tokens
        ]

    def take_output(self, number: int, planned: Any, answers: list[list[int]]) -> object:
        names = list(planned.num_scheduled_tokens)
        known = {name: self.scheduler.requests.get(name) for name in names}
        loads = planned.kv_connector_metadata
        outputs = self.scheduler.update_from_output(
            planned,
            ModelRunnerOutput(
                req_ids=names,
                req_id_to_index={name: place for place, name in enumerate(names)},
                sampled_token_ids=answers,
                logprobs=None,
                prompt_logprobs_dict={},
                pooler_output=[],
                kv_connector_output=loads and self.scheduler.connector.take_output(loads),
            ),
        )
        self.statistics = statistics(outputs.values())
        ended = [r for r in known.values() if r is not None and r.is_finished()]
        self.answered += [list(request.all_token_ids) for request in ended]
        if self.world.has_drafts and not self.world.is_async:
            going = [
                name
                for name, said in zip(names, answers, strict=True)
                if said and name in self.scheduler.requests
            ]
            drafts = [
                sampled(self.seed, -number, name, range(NUM_DRAFTS))[:NUM_DRAFTS] for name in going
            ]
            self.scheduler.update_draft_token_ids(DraftTokenIds(going, drafts))
        return {name: list(r.output_token_ids) for name, r in known.items() if r is not None}


KINDS = {
    False: (Scheduler, kvcore_vllm.Scheduler),
    True: (AsyncScheduler, kvcore_vllm.AsyncScheduler),
}


def watch(side: Side, manager: Any = None) -> Watch:
    """Make a recorder of the calls of a side's manager, or of the given one in it."""
    manager = manager or side.scheduler.kv_cache_manager
    blocks = manager.block_pool.blocks
    groups = enumerate(manager.kv_cache_config.kv_cache_groups)
    states = tuple(n for n, each in groups if isinstance(each.kv_cache_spec, MambaSpec))
    size = side.world.block_size
    return Watch(manager, size, lambda block: blocks[block].block_hash is not None, states)


def send(traffic: Traffic, number: int, sides: Sequence[Side]) -> None:
    """Send the traffic before a step to every side, based on the first side's requests."""
    first = sides[0]
    arrivals = traffic.arrivals(first.answered)
    if MODES[first.world.mode].has_sessions:
        # Fewer arrive, since requests that wait for input hold blocks.
        arrivals = arrivals[number % 3 :] + traffic.next_inputs(sorted(first.scheduler.requests))
    for arrival in arrivals:
        for side in sides:
            side.add(arrival)
    for name in traffic.aborted(sorted(first.scheduler.requests)):
        for side in sides:
            side.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)
    if MODES[first.world.mode].has_interruptions:
        for name in traffic.interruptions.draw():
            for side in sides:
                side.interrupted.append((name, interrupt(side.scheduler, name)))


def run(world: World, seed: int, num_steps: int, model: str) -> Iterator[Step]:
    """Yield the steps of both sides; checks the core's invariants at some of them."""
    config = make_config(world, model)
    own, kvcore = (Side(kind, world, config, seed) for kind in KINDS[world.is_async])
    watches = watch(own), watch(kvcore)
    traffic = Traffic(seed, MAX_MODEL_LEN)
    has_withdrawn = False
    for number in range(1, num_steps + 1):
        for each in watches:
            each.begin()
        send(traffic, number, (own, kvcore))
        vllm = own.step(number)
        try:
            ours = kvcore.step(number)
            has_parts = MODES[world.mode].has_parts
            rule = explain(*watches, has_parts=has_parts)
            if has_parts:  # more parts have keys than in vLLM
                vllm["parts"], ours["parts"] = rule in ("given up", "other part"), False
            else:
                keys = sorted(unexplained_keys(*watches, world.num_blocks))
                vllm["keys"], ours["keys"] = [], keys
            has_withdrawn |= bool(watches[1].lost)
            if has_withdrawn:  # kvcore announces again what is stored again
                vllm["stored"], ours["stored"] = [], []
            yield Step(number, vllm, ours, rule)
            if number % STEPS_BETWEEN_CHECKS == 0:
                kvcore.scheduler.kv_cache_manager.compat.core.check()
        except Exception as error:
            error.add_note(f"over kvcore, in step {number} of seed {seed}, {world}")
            raise


def main() -> int:
    """Compare; returns 1 if no rule explains a step that differs."""
    options = read_options()
    init_none_hash(sha256)
    failed = False
    with tempfile.TemporaryDirectory() as model:
        (Path(model) / "config.json").write_text(json.dumps(MODEL))
        for mode in options.modes:
            verdicts: list[Verdict] = []
            for seed in options.seeds:
                world = world_of(mode, seed)
                verdict = verdict_of(run(world, seed, options.steps, model))
                if verdict.differs:
                    rule = f", by rule: {RULES[verdict.rule]}" if verdict.rule else ""
                    print(f"{world}{rule}: {verdict.differs}", flush=True)
                failed |= bool(verdict.differs) and not verdict.rule
                verdicts.append(verdict)
            print(summary(mode, verdicts, options.steps), flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
