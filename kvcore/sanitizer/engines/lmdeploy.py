# SPDX-License-Identifier: Apache-2.0
"""The adapter for LMDeploy 0.18.0's PyTorch engine: its Scheduler, InputsMakerAsync and EngineLoop
run unchanged, one turn of the loop at a time, with letters instead of the model agent.

Speculative decoding, media, connectors and disaggregation are not followed.
"""

import importlib
import itertools
import logging
import types
from typing import Any, ClassVar

from kvcore.sanitizer.chunks import CacheGroup, Chunk
from kvcore.sanitizer.hunter.adapter import EngineAdapter
from kvcore.sanitizer.hunter.driven import Driven, Silent
from kvcore.sanitizer.hunter.kit import BatchReporter

torch: Any = importlib.import_module("torch")


def source(module: str) -> Any:
    """Import a module of its PyTorch engine, without its log."""
    logging.getLogger("lmdeploy").setLevel(logging.CRITICAL)
    return importlib.import_module(f"lmdeploy.pytorch.{module}")


def finished(call: Any) -> Any:
    """Run a coroutine that nothing keeps waiting, and return its result."""
    try:
        call.send(None)
    except StopIteration as end:
        return end.value
    raise RuntimeError("the engine waits for something that no stand-in gives")


class Executor:
    """The stand-in for the model agent: it answers batches in the order in which they were sent."""

    device_type = "cuda"

    def __init__(self, engine: "Engine") -> None:
        self.engine = engine
        self.sent: list[tuple[list[Any], list[Any]]] = []
        # Of the next decode, as ARStepInputs keeps them: request, start, count, tokens to come.
        self.rows: list[tuple[Any, int, int, int]] = []

    async def forward_async(self, inputs: Any) -> None:
        its, delta = inputs["inputs"], inputs["delta"]
        if delta is not None:
            self.rows = [self.rows[place] for place in delta.indice_cpu]
        rows, others = self.rows, list[Any]()
        if its is not None:
            sizes = zip(its.history_lengths.tolist(), its.seq_length.tolist(), strict=True)
            others = rows
            rows = [
                (seq, *size, seq.sampling_param.max_new_tokens - seq.num_new_tokens - 1)
                for seq, size in zip(self.engine.running, sizes, strict=True)
            ]
        if its is None or not its.is_chunk or its.is_last_chunk:
            after = [(seq, start + count, 1, left - 1) for seq, start, count, left in rows]
            self.rows = others + after
        flying = self.sent[-1][0] if self.sent else []
        ends = {(seq.seq_id, start + count) for seq, start, count, _ in flying}
        # A request is sent once more before the answer that ends it is known.
        told = [row[:3] for row in rows if row[3] >= 0 or (row[0].seq_id, row[1]) not in ends]
        self.sent.append((rows, told))
        self.engine.target.follow(told, inputs["cache_inputs"])

    async def get_output_async(self) -> Any:
        rows, told = self.sent.pop(0)
        self.engine.target.ran(told)
        answers = [self.engine.world.token(start + count) for _, start, count, _ in rows]
        stopped = [left <= 0 for *_, left in rows]
        made = source("engine.model_agent").BatchedOutputs
        return made(torch.tensor(answers), torch.tensor(stopped), torch.zeros(len(rows)).long())

    async def sleep(self, level: int) -> None:
        del level
        self.rows.clear()
        self.engine.target.forgets()

    def wakeup(self, tags: Any) -> None:
        del tags


class Engine(Driven):
    """The engine in its own loop, with letters instead of the model's answers."""

    def __init__(self, world: Any) -> None:
        axes, size = world.axes, world.block_size
        self.world, self.states = world, axes["states"]
        config, makers = source("config"), source("engine.inputs_maker")
        loops = source("engine.engine_loop")
        num_states = world.max_rows + 2 + (self.states or 0)
        self.cache = config.CacheConfig(
            max_batches=world.max_rows, block_size=size, num_cpu_blocks=0,
            num_gpu_blocks=world.num_blocks, max_prefill_token_num=world.token_budget,
            enable_prefix_caching=axes["prefix_caching"], window_size=axes["window_size"] or -1,
            num_state_caches=num_states, prefix_cache_state_budget=self.states or 0,
            prefix_cache_decode_state_interval=size * axes["blocks_per_save"],
            states_shapes=[] if self.states is None else [(1,)],
        )  # fmt: skip
        schedule = config.SchedulerConfig(
            world.max_rows, 1 << 20, prefill_interval=min(size, axes["prefill_interval"])
        )
        # It truncates times to seconds and orders equal ones by address; these differ.
        clock = types.SimpleNamespace(perf_counter=itertools.count().__next__)
        source("paging.block_manager.base_block_manager").time = clock
        strategy = source("strategies.ar.sequence").ARSequenceStrategy()
        meta = source("messages").SequenceMeta(size, strategy=strategy)
        self.num_blocks = max(world.num_blocks + 1, num_states)  # block 0 is behind the window
        self.executor = Executor(self)
        silent: Any = Silent()
        silent.num_adapters = lambda: 1
        self.target = it = object.__new__(source("engine.engine").Engine)
        it.scheduler = source("paging").Scheduler(schedule, self.cache, seq_meta=meta)
        its_config = makers.InputsMakerConfig(
            world.max_rows, world.token_budget, source("disagg.config").EngineRole.Hybrid, size,
            size, self.cache.window_size, self.cache.enable_prefix_caching,
            self.cache.prefix_cache_decode_state_interval, is_ssm=self.states is not None,
            prefill_interval=schedule.prefill_interval,
        )  # fmt: skip
        self.maker = makers.InputsMakerAsync(
            self.executor, it.scheduler, it.scheduler.state_checkpoints, silent,
            source("strategies.ar.engine").AREngineStrategy(schedule, self.cache), silent, silent,
            its_config,
        )  # fmt: skip
        it._engine_loop = self.loop = loops.EngineLoop(
            silent, it.scheduler, it.scheduler.state_checkpoints, self.executor, strategy,
            self.maker, loops.EngineLoopConfig(its_config.role),
        )  # fmt: skip
        it.executor, it.req_manager, it.cache_config = self.executor, silent, self.cache
        self.loop.drain_for_sleep = self.drained
        make, self.running = self.maker._make_forward_inputs, list[Any]()

        def made(*args: Any) -> Any:
            payload = make(*args)
            self.running = payload["running"] if payload else []
            return payload

        self.maker._make_forward_inputs = made
        self.next: tuple[Any, Any] = (None, None)
        self.requests: dict[str, Any] = {}
        it.follow = it.ran = it.gone = it.forgets = lambda *_: None

    def arrive(self, arrival: Any) -> None:
        session = self.target.scheduler.add_session(int(arrival.name[1:]))
        params = source("messages").SamplingParam(max_new_tokens=arrival.new)
        adapter = f"tenant {arrival.tenant}" if arrival.tenant else None
        seq = session.add_sequence(torch.tensor(arrival.prompt), params, adapter_name=adapter)
        seq.resp = types.SimpleNamespace(data=None, _input_logprobs=None, is_done=False)
        self.requests[arrival.name] = seq

    def step(self) -> None:
        """Run one turn of EngineLoop.main_loop; a batch is in flight after it."""
        inputs, running = self.next
        if running is None:
            inputs, running = finished(self.maker.send_next_inputs())
        if running is None:
            return
        self.target.scheduler.activate_seqs(running)
        self.next = finished(self.loop._main_loop_get_outputs(running, inputs))
        self.maker.preempt_invalid_decode_seqs()
        for name, seq in list(self.requests.items()):
            if seq.status.name == "STOPPED":
                self.leave(name)

    def leave(self, name: str) -> None:
        self.target.scheduler.end_session(self.requests.pop(name).session_id)
        self.target.gone(name)

    def abort(self, name: str) -> None:
        self.target.scheduler.stop_session(self.requests[name].session_id)
        self.leave(name)

    def epoch(self) -> bool:
        """Put the engine to sleep, change the weights and wake it, as its documents say. Its main
        loop does not wait for the batch in flight.
        """
        self.next = None, None
        for _, told in self.executor.sent:
            self.target.ran(told)
        self.executor.sent.clear()
        finished(self.target.sleep())
        self.target.wakeup()
        for name in self.requests:
            self.target.gone(name)
        self.requests.clear()
        return True

    async def drained(self) -> None:
        """Stand for the wait until the main loop has drained: it has."""

    @property
    def in_flight(self) -> bool:
        return self.next[1] is not None

    @property
    def live(self) -> list[str]:
        return list(self.requests)

    def free(self) -> int:
        """Count free blocks and those that only the prefix tree holds."""
        manager, trie = self.target.scheduler.block_manager, self.target.scheduler.block_trie
        kept, nodes = 0, list(trie._roots.values())
        while nodes:
            node = nodes.pop()
            nodes += node.children.values()
            kept += node.block_id >= 0 and manager.allocator.get_ref_count(node.block_id) == 1
            held = node.state_checkpoint
            kept += held is not None and held.frozen_block_id >= 0
        return int(manager.get_num_free_gpu_blocks()) + kept


class Batches(BatchReporter):
    """What an engine's batches read, write and copy."""

    def __init__(self, manager: Any, sanitizer: Any) -> None:
        super().__init__(sanitizer)
        self.manager = manager

    def told(self, seq: Any) -> str:
        """Report the tables of a request, and return its name."""
        name = f"r{seq.session_id}"
        self.begin(name, seq.valid_ids.tolist(), (seq.adapter_name,))
        null = [0] * (seq.num_ignored_history // seq.block_size)
        tables = [null + (self.manager.get_block_table(seq) + 1).tolist()]
        if len(self.sanitizer.groups) > 1:
            tables.append([seq.logical_state] if seq.logical_state >= 0 else [])
        self.show(name, *tables)
        return name

    def copied(self, plan: Any, group_id: int) -> None:
        if plan is not None:
            sources, targets = ([int(each) + (not group_id) for each in side] for side in plan)
            self.sanitizer.copy(list(zip(sources, targets, strict=True)), group_id)

    def followed(self, rows: Any, copies: Any) -> None:
        """Report a batch: copies to its requests, its work, and copies of what it leaves."""
        chunks = [Chunk(self.told(seq), start, count) for seq, start, count in rows]
        if copies is not None:
            self.copied(copies.kv_restore_plan, 0)
            self.copied(copies.state_restore_plan, 1)
        self.issue(chunks)
        if copies is not None:
            self.copied(copies.kv_save_plan, 0)
            self.copied(copies.state_save_plan, 1)

    def answered(self, rows: Any) -> None:
        for seq, *_ in rows:
            self.learn(f"r{seq.session_id}", seq.valid_ids.tolist())
        self.complete()

    def forgets(self) -> None:
        """Report that all memory was given up."""
        for group_id in range(len(self.sanitizer.groups)):
            self.sanitizer.fail(range(self.sanitizer.num_blocks), group_id)


class Adapter(EngineAdapter):
    NAME = "lmdeploy 0.18.0"
    MODULES = (
        "lmdeploy.pytorch.engine.engine_loop",
        "lmdeploy.pytorch.strategies.ar.sequence",
        "lmdeploy.pytorch.strategies.ar.engine",
    )
    AXES: ClassVar[dict[str, tuple[Any, ...]]] = {
        "block_size": (4, 2, 8),
        "prefix_caching": (True, False),
        "prefill_interval": (16, 2, 1),
        "states": (None, 0, 2, 4),
        "blocks_per_save": (0, 1, 2),
        "window_size": (None, 6),
    }
    MOVES = frozenset({"abort", "epoch", "tenants"})
    Engine = Engine

    @staticmethod
    def groups(engine: Any) -> list[CacheGroup]:
        size, window = engine.world.block_size, engine.cache.window_size
        window = window if window > 0 else None
        found = [CacheGroup(block_size=size, window=window, num_null=1)]
        if engine.states is not None:  # one slot for all positions of a request
            length = engine.world.num_blocks * size
            found.append(CacheGroup(block_size=length, state=True, pool=1))
        return found

    @staticmethod
    def attach(target: Any, sanitizer: Any) -> None:
        """Follow an engine: tables and copies when a batch is sent, checked when it is answered."""
        it = Batches(target.scheduler.block_manager, sanitizer)
        target.follow, target.ran, target.gone = it.followed, it.answered, it.end
        target.forgets = it.forgets
