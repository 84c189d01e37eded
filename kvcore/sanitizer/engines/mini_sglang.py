# SPDX-License-Identifier: Apache-2.0
"""The adapter for mini-sglang at commit 20fcd7f, from the checkout named by KVCORE_MINI_SGLANG.

Its Scheduler runs unchanged, with and without overlap. Several GPUs are not followed.
"""

import contextlib
import importlib
import os
import sys
import types
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from kvcore.sanitizer import Chunk
from kvcore.sanitizer.hunter.adapter import EngineAdapter
from kvcore.sanitizer.hunter.driven import AbsentModules, Driven, Silent, without_pins
from kvcore.sanitizer.hunter.kit import BatchReporter, around

TESTED = "20fcd7f"
torch: Any = importlib.import_module("torch")


class Output(NamedTuple):
    """The engine's output for a batch."""

    next_tokens_gpu: Any
    next_tokens_cpu: Any
    copy_done_event: Any


def source() -> Any:
    """Import the module of its Scheduler, with stand-ins for kernels, networks, models and pinned
    memory.
    """
    if "minisgl" not in sys.modules:
        root = Path(os.environ["KVCORE_MINI_SGLANG"], "python")
        packages = ("minisgl", "minisgl.utils", "minisgl.kernel", "minisgl.engine")
        known: dict[str, Any] = {}
        AbsentModules(root, (), known, packages)
        load, silent = importlib.import_module, Silent()
        known |= {**vars(load("minisgl.utils.misc")), **vars(load("minisgl.utils.registry"))}
        known |= {"init_logger": lambda _: silent, "fast_compare_key": same_length}
        torch.Tensor.pin_memory = lambda tensor: tensor
        pageable = {**vars(torch)}
        for each in ("empty", "tensor"):
            pageable[each] = without_pins(getattr(torch, each))
        for name in ("minisgl.scheduler.cache", "minisgl.scheduler.scheduler"):
            vars(load(name))["torch"] = types.SimpleNamespace(**pageable)
    return importlib.import_module("minisgl.scheduler.scheduler")


def same_length(one: Any, other: Any) -> int:
    """Count the equal leading numbers."""
    length = min(len(one), len(other))
    differ = (one[:length] != other[:length]).nonzero()
    return int(differ[0]) if len(differ) else length


class Engine(Driven):
    """The Scheduler in its own loop, with letters instead of the model's answers."""

    def __init__(self, world: Any) -> None:
        its, size, rows = source(), world.block_size, world.max_rows
        self.world, self.num_blocks, self.its = world, world.num_blocks, its
        self.messages: list[Any] = []
        self.waiting: dict[int, None] = {}
        self.last: Any = None
        core: Any = importlib.import_module("minisgl.core")
        core._GLOBAL_CTX = types.SimpleNamespace(page_size=size)
        length = world.num_blocks * size
        table = torch.zeros((rows + 1, (length + 31) // 32 * 32), dtype=torch.int32)
        self.target = it = its.Scheduler.__new__(its.Scheduler)
        it.engine = Silent()
        it.engine.max_seq_len, it.engine.page_table = length, table
        it.engine.stream = it.engine.attn_backend = it.engine.sampler = Silent()
        it.engine.graph_runner = types.SimpleNamespace(pad_batch=self.pad)
        it.engine.forward_batch, it.device = self.forward, table.device
        it.stream, it.engine_stream_ctx = None, contextlib.nullcontext()
        it.table_manager = its.TableManager(rows, table)
        it.cache_manager, it.decode_manager = self.managers(table)
        it.prefill_manager = its.PrefillManager(
            it.cache_manager, it.table_manager, it.decode_manager
        )
        it.finished_reqs, it.eos_token_id = set(), -1
        it.token_pool, it.prefill_budget = it.table_manager.token_pool, world.token_budget
        it.receive_msg, it.send_result = self.receive, self.reply

    def managers(self, table: Any) -> tuple[Any, Any]:
        """Make the managers of the cache and of the running requests."""
        size, kind = self.world.block_size, self.world.axes["cache_type"]
        cache = self.its.CacheManager(self.num_blocks, size, table, kind)
        return cache, self.its.DecodeManager(size)

    def pad(self, batch: Any) -> None:
        batch.padded_reqs = batch.reqs

    def forward(self, batch: Any, args: Any) -> Any:
        del args
        for req in batch.reqs:
            req.complete_one()
        answers = [self.world.token(req.cached_len) for req in batch.reqs]
        tokens = torch.tensor(answers, dtype=torch.int32)
        return Output(tokens, tokens, Silent())

    def receive(self, blocking: bool = False) -> list[Any]:
        if blocking:
            self.target.run_when_idle()
        messages, self.messages = self.messages, []
        return messages

    def reply(self, replies: list[Any]) -> None:
        for each in replies:
            if each.finished:
                self.waiting.pop(each.uid, None)

    def arrive(self, arrival: Any) -> None:
        params = importlib.import_module("minisgl.core").SamplingParams(
            ignore_eos=True, max_tokens=arrival.new
        )
        ids = torch.tensor(arrival.prompt, dtype=torch.int32)
        self.messages.append(self.its.UserMsg(int(arrival.name[1:]), ids, params))
        self.waiting[int(arrival.name[1:])] = None

    def abort(self, name: str) -> None:
        self.messages.append(self.its.AbortBackendMsg(int(name[1:])))
        del self.waiting[int(name[1:])]

    def step(self) -> None:
        if self.world.axes["overlap"]:
            self.last = self.target.overlap_loop(self.last)
        else:
            self.target.normal_loop()

    def finish_batches(self) -> None:
        while self.last is not None or self.messages:
            self.step()

    @property
    def in_flight(self) -> bool:
        return self.last is not None

    @property
    def live(self) -> list[str]:
        return [f"r{uid}" for uid in self.waiting]

    def free(self) -> int:
        return int(self.target.cache_manager.available_size // self.world.block_size)


class Adapter(EngineAdapter):
    NAME = f"mini-sglang {TESTED}"
    AXES: ClassVar[dict[str, tuple[Any, ...]]] = {
        "block_size": (1, 4, 2),
        "overlap": (True, False),
        "cache_type": ("radix", "naive"),
    }
    MOVES = frozenset({"abort"})
    Engine = Engine

    @staticmethod
    def attach(target: Any, sanitizer: Any) -> None:
        """Follow a Scheduler: tables after `allocate_paged`, checks in `_process_last_data`."""
        it, size = BatchReporter(sanitizer), target.cache_manager.page_size
        tokens: dict[int, list[int]] = {}

        @around(target, "_process_one_msg")
        def arrived(inner: Any, msg: Any) -> None:
            ids = getattr(msg, "input_ids", None)
            inner(msg)
            if ids is not None and msg.uid not in tokens:
                tokens[msg.uid] = ids.tolist()
                it.begin(f"r{msg.uid}", tokens[msg.uid])

        @around(target.cache_manager, "allocate_paged")
        def allocated(inner: Any, reqs: Any, *more: Any) -> None:
            inner(reqs, *more)
            for req in reqs:
                row = target.engine.page_table[req.table_idx, : req.device_len : size]
                it.show(f"r{req.uid}", (row // size).tolist())
            it.issue([Chunk(f"r{req.uid}", req.cached_len, req.extend_len) for req in reqs])

        @around(target, "_process_last_data")
        def completed(inner: Any, data: Any, *more: Any) -> None:
            if data is not None:
                for req in data[0].batch.reqs:
                    known = tokens[req.uid]
                    known += req.input_ids[len(known) :].tolist()
                it.complete()
            inner(data, *more)

        @around(target, "_free_req_resources")
        def freed(inner: Any, req: Any) -> None:
            it.end(f"r{req.uid}")
            inner(req)
