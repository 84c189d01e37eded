# SPDX-License-Identifier: Apache-2.0
"""The adapter for mini-sglang at commit 20fcd7f, from the checkout named by KVCORE_MINI_SGLANG.

Its Scheduler runs unchanged, with and without overlap. Several GPUs are not followed.
"""

import importlib
import os
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, NamedTuple

from kvcore.sanitizer import Chunk
from kvcore.sanitizer.hunter.adapter import EngineAdapter
from kvcore.sanitizer.hunter.driven import AbsentModules, Driven, Silent, without_pins
from kvcore.sanitizer.hunter.kit import BatchReporter, around

TESTED = "20fcd7f"
torch: Any = importlib.import_module("torch")


def source() -> Any:
    """Import the module of its Scheduler, with stand-ins for kernels, networks, models and pinned
    memory.
    """
    if "minisgl" not in sys.modules:
        root = Path(os.environ["KVCORE_MINI_SGLANG"], "python")
        packages = ("minisgl", "minisgl.utils", "minisgl.kernel", "minisgl.engine")
        known: dict[str, Any] = {}
        AbsentModules(root, (), known, packages)
        load = importlib.import_module
        known |= {**vars(load("minisgl.utils.misc")), **vars(load("minisgl.utils.registry"))}
        known |= {"init_logger": Silent, "load_tokenizer": Silent, "Engine": Device}
        known["fast_compare_key"] = same_length
        without_pins(torch)
        torch.cuda.Stream, torch.cuda.stream, torch.cuda.set_stream = Silent, nullcontext, Silent
    return importlib.import_module("minisgl.scheduler.scheduler")


def same_length(one: Any, other: Any) -> int:
    """Count the equal leading numbers."""
    length = min(len(one), len(other))
    differ = (one[:length] != other[:length]).nonzero()
    return int(differ[0]) if len(differ) else length


class Output(NamedTuple):
    """The engine's output for a batch."""

    next_tokens_gpu: Any
    next_tokens_cpu: Any
    copy_done_event: Any


class Device(Silent):
    """The stand-in for the part with the GPU: it gives letters for the model's answers."""

    def __init__(self, config: Any) -> None:
        self.world = config.world
        self.num_pages = self.world.num_blocks
        self.max_seq_len = self.num_pages * self.world.block_size
        shape = self.world.max_rows + 1, (self.max_seq_len + 31) // 32 * 32
        self.page_table = torch.zeros(shape, dtype=torch.int32)
        self.device, self.graph_runner = self.page_table.device, self
        self.stream = self.attn_backend = self.sampler = Silent()

    def pad_batch(self, batch: Any) -> None:
        batch.padded_reqs = batch.reqs

    def forward_batch(self, batch: Any, args: Any) -> Any:
        del args
        for req in batch.reqs:
            req.complete_one()
        answers = [self.world.token(req.cached_len) for req in batch.reqs]
        tokens = torch.tensor(answers, dtype=torch.int32)
        return Output(tokens, tokens, Silent())


class Engine(Driven):
    """The Scheduler in its own loop."""

    def __init__(self, world: Any) -> None:
        self.its = source()
        self.world, self.num_blocks = world, world.num_blocks
        self.messages: list[Any] = []
        self.live: list[str] = []
        self.last: Any = None
        core: Any = importlib.import_module("minisgl.core")
        core._GLOBAL_CTX = SimpleNamespace(page_size=world.block_size)
        self.target = self.its.Scheduler(
            SimpleNamespace(
                page_size=world.block_size, cache_type=world.axes["cache_type"],
                max_running_req=world.max_rows, max_extend_tokens=world.token_budget,
                model_path="", offline_mode=True, tp_info=None, world=world,
            )
        )  # fmt: skip
        self.target.receive_msg, self.target.send_result = self.receive, self.reply

    def receive(self, blocking: bool = False) -> list[Any]:
        if blocking:
            self.target.run_when_idle()
        messages, self.messages = self.messages, []
        return messages

    def reply(self, replies: list[Any]) -> None:
        ended = {f"r{each.uid}" for each in replies if each.finished}
        self.live = [name for name in self.live if name not in ended]

    def arrive(self, arrival: Any) -> None:
        params = importlib.import_module("minisgl.core").SamplingParams(
            ignore_eos=True, max_tokens=arrival.new
        )
        ids = torch.tensor(arrival.prompt, dtype=torch.int32)
        self.messages.append(self.its.UserMsg(int(arrival.name[1:]), ids, params))
        self.live.append(arrival.name)

    def abort(self, name: str) -> None:
        self.messages.append(self.its.AbortBackendMsg(int(name[1:])))
        self.live.remove(name)

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

        @around(target.prefill_manager, "add_one_req")
        def arrived(inner: Any, msg: Any) -> None:
            inner(msg)
            it.begin(f"r{msg.uid}", msg.input_ids.tolist())

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
                    it.learn(f"r{req.uid}", req.input_ids.tolist())
                it.complete()
            inner(data, *more)

        @around(target, "_free_req_resources")
        def freed(inner: Any, req: Any) -> None:
            it.end(f"r{req.uid}")
            inner(req)
