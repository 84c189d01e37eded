# SPDX-License-Identifier: Apache-2.0
"""The adapter for SGLang 0.5.23 with its hierarchical cache, on a CPU.

Its requests, UnifiedRadixCache, allocator, host pool and cache controller run unchanged, in the
loop of `sglang_loop.py`; copies between device and host are followed instead of made. A copy is
reported done some steps later; one to the host may also take place then.
"""

import atexit
import importlib
import importlib.metadata
import logging
import sys
import types
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

from kvcore.sanitizer.engines.sglang_loop import Loop, LoopAdapter, Request, tree_core
from kvcore.sanitizer.hunter.driven import AbsentModules, Silent

torch: Any = importlib.import_module("torch")
PACKAGES = (
    "sglang",
    *(f"sglang.srt{name}" for name in ("", ".utils", ".distributed", ".managers")),
)
"""Packages whose own files are not run."""
ABSENT = (
    *("numpy", "orjson", "psutil", "pydantic", "pydantic_core", "requests", "sgl_kernel"),
    *("transformers", "triton", "zmq", "sglang.kernels", "sglang.srt.configs"),
    *("sglang.srt.constrained", "sglang.srt.disaggregation", "sglang.srt.layers"),
    *("sglang.srt.distributed.device_communicators", "sglang.srt.lora", "sglang.srt.multimodal"),
    *("sglang.srt.observability", "sglang.srt.parser", "sglang.srt.runtime_context"),
    *("sglang.srt.sampling", "sglang.srt.server_args", "sglang.srt.utils.common"),
)
SETTINGS = SimpleNamespace(
    extra_metric_labels=None, hicache_host_memory_mode="cache", hicache_io_backend="kernel",
    hicache_storage_backend=None, hicache_storage_prefetch_policy="best_effort",
    hicache_write_policy="write_through", served_model_name="", speculative_algorithm=None,
    strip_thinking_cache=False,
)  # fmt: skip


class Done(Silent):
    """An event of a stream on which everything is done at once."""

    def query(self) -> bool:
        return True


def never(*_: Any) -> bool:
    """Answer a question about the machine with no."""
    return False


KNOWN = {
    "float64": float,
    "ceil_align": lambda number, size: -(-number // size) * size,
    "get_device_module": lambda: SimpleNamespace(Event=Done, Stream=Silent),
    "SchedulerReqTimeStats": Silent,
    **{f"get_{name}": lambda: SETTINGS for name in ("memory", "observability", "serving", "spec")},
    **dict.fromkeys(("is_cuda", "is_hip", "is_npu", "is_xpu", "is_cpu"), never),
    **dict.fromkeys(("is_gfx95_supported", "is_fp8_fnuz", "get_bool_env_var"), never),
    "cpu_has_amx_support": never,
}


def source(module: str) -> Any:
    """Import a module of it, with stand-ins for kernels, networks, models and its settings."""
    if "sglang" not in sys.modules:
        files = importlib.metadata.distribution("sglang").files or []
        init = next(each for each in files if each.as_posix() == "sglang/__init__.py")
        AbsentModules(Path(str(init.locate())).parents[1], ABSENT, KNOWN, PACKAGES)
        importlib.import_module("sglang")
        logging.getLogger("sglang").setLevel(logging.CRITICAL)
        extension: Any = types.ModuleType("extension")  # its own loader checks torch's version
        extension.bindings = tree_core()
        sys.modules["sglang.srt.mem_cache.rust_tree_core.extension"] = extension
        source("mem_cache.unified_cache.tree_core_registry")._rust_fallback_reason = never
    return importlib.import_module(f"sglang.srt.{module}")


class Copied(Silent):
    """The event after copies. The first ones to the host, by number, take place before it."""

    def __init__(self, copies: "Copies", number: int) -> None:
        self.copies, self.number = copies, number
        self.due = copies.engine.num_steps + copies.engine.world.axes["copy_steps"]

    def query(self) -> bool:
        if is_due := self.copies.engine.num_steps >= self.due:
            self.synchronize()
        return bool(is_due)

    def synchronize(self) -> None:
        self.copies.make(self.number)


class Copies:
    """The stand-in for its transfer engine. Copies to the host take place in their order."""

    def __init__(self, engine: "Engine") -> None:
        self.engine = engine
        self.issued: list[list[tuple[int, int]]] = []
        self.num_made = 0

    def make(self, number: int) -> None:
        while self.num_made < number:
            self.engine.stores(self.issued[self.num_made])
            self.num_made += 1

    def submit_device_to_host(self, transfers: Any) -> Any:
        self.issued.append(self.pairs(transfers))
        if not self.engine.world.axes["copy_steps"]:
            self.make(len(self.issued))
        return completion(Copied(self, len(self.issued)))

    def submit_host_to_device(self, transfers: Any, **_: Any) -> Any:
        self.engine.loads([(host, page) for page, host in self.pairs(transfers)])
        return completion(Copied(self, 0))

    def pairs(self, transfers: Any) -> list[tuple[int, int]]:
        """Return the pages of the device and of the host."""
        size = self.engine.size
        slots = [
            pair
            for each in transfers
            for pair in zip(each.device_indices.tolist(), each.host_indices.tolist(), strict=True)
        ]
        return [(device // size, host // size) for device, host in slots[::size]]


def completion(event: Any) -> Any:
    return SimpleNamespace(start_event=event, finish_event=event, timing_enabled=False)


class HostRequest(Request):
    """A request with that of SGLang, which has the same list of tokens."""

    def __init__(self, arrival: Any, namespace: dict[str, Any]) -> None:
        super().__init__(arrival)
        self.req = source("managers.schedule_batch").Req(
            arrival.name, "", self.tokens[:], SimpleNamespace(custom_params=None), **namespace
        )
        self.req.full_untruncated_fill_ids = self.tokens
        self.prefilled = 0  # what its next chunks go up to


class Engine(Loop):
    """The loop around the cache with two tiers."""

    def __init__(self, world: Any) -> None:
        super().__init__(world)
        axes, size, self.num_steps = world.axes, world.block_size, 0
        self.stores: Any = lambda _: None
        self.loads: Any = lambda _: None
        pool = SimpleNamespace(
            device="cpu", layer_num=1, register_layer_transfer_counter=never, host_pool_decls=list
        )
        self.allocator = source("mem_cache.allocator.paged").PagedTokenToKVPoolAllocator(
            world.num_blocks * size, size, torch.float16, "cpu", pool, False
        )
        longest = (world.num_blocks + 1) * size
        component = source("mem_cache.unified_cache.component_type").ComponentType.FULL
        params = source("mem_cache.cache_init_params").CacheInitParams(
            disable=False, token_to_kv_pool_allocator=self.allocator, page_size=size,
            req_to_token_pool=source("mem_cache.memory_pool").ReqToTokenPool(
                64, longest, "cpu", False
            ),
            eviction_policy=axes["eviction_policy"], tree_components=(component,),
            tree_core_backend=axes["tree_core"],
        )  # fmt: skip
        SETTINGS.hicache_write_policy = axes["write_policy"]
        parts = source("mem_cache.hybrid_cache.hybrid_pool_assembler")
        parts.build_kv_host_pool = lambda **_: self.host_pool()
        parts._select_strategy = lambda *_: parts._PlainKvStrategy()
        self.cache = source("mem_cache.unified_radix_cache").UnifiedRadixCache(params)
        self.cache.init_hicache(SimpleNamespace(), params)
        self.cache.cache_controller.l2_transfer_engine = Copies(self)
        atexit.unregister(self.cache.shutdown)

    def host_pool(self) -> Any:
        """Make its host pool without memory."""
        base = source("mem_cache.pool_host.base").HostKVCache
        return type("Host", (base,), dict.fromkeys(base.__abstractmethods__))(
            dtype=torch.float16, device_capacity_tokens=self.world.num_blocks * self.size,
            size_per_token=1, start_layer=0, end_layer=1, host_to_device_ratio=1, host_size=0,
            page_size=self.size, layout="layer_first", pin_memory=False, device="cpu",
            host_token_capacity=self.world.axes["host_pages"] * self.size, is_dummy=True,
        )  # fmt: skip

    def request(self, arrival: Any) -> Any:
        return HostRequest(arrival, self.named(arrival.tenant))

    def step(self) -> None:
        self.num_steps += 1
        self.cache.check_hicache_events()
        super().step()
        self.cache.flush_pending_backups()

    def issue(self, batch: Any) -> None:
        self.cache.ready_to_load_host_cache()
        super().issue(batch)

    def match(self, request: Any) -> bool:
        """Admit a request with what it hits, if it fits; load what it hits in the host tier."""
        req, cache = request.req, self.cache
        adder = SimpleNamespace(tree_cache=cache)
        lock = source("managers.schedule_policy").PrefillAdder._lock_node
        req.init_next_round_input(cache)
        with lock(adder, req.last_node):
            if self.free() * self.size < len(request.tokens) + 1 - req.prefix_len:
                return False
            if req.needs_host_load_back():
                with lock(adder, req.best_match_node, lock_host=True):
                    params = source("mem_cache.base_prefix_cache").InitLoadBackParams(
                        req.best_match_node, req.host_hit_length, req=req
                    )
                    req.host_loaded_length, req.last_node = cache.init_load_back(params)
                req.prefix_len += req.host_loaded_length
                req.kv.cache_protected_len = req.prefix_len
            req.lock = cache.lock(req.last_node)
        cache.req_to_token_pool.alloc([req])
        self.append(request, cache.prefix_device_indices(req))
        request.computed, request.prefilled = req.prefix_len, len(request.tokens)
        self.gives(request)
        return True

    def append(self, request: Any, slots: Any) -> None:
        """Put slots behind those that a request has."""
        start = len(request.slots)
        place = request.req.kv.req_pool_idx, slice(start, start + len(slots))
        self.cache.req_to_token_pool.write(place, slots.to(torch.int32))
        request.slots += slots.tolist()

    def grow(self, request: Any, length: int, batch: Any) -> bool:
        """Allocate the pages up to a length; if necessary evict, then retract."""
        wanted = -(-(length - len(request.slots)) // self.size) * self.size
        while wanted > 0:
            self.allocator.evict_to_free_tokens(self.cache, wanted)
            slots = self.allocator.alloc(wanted)
            if slots is not None:
                self.append(request, slots)
                break
            if not self.make_room(request, batch):
                return False
        request.req.kv.kv_allocated_len = request.req.kv.kv_committed_len = length
        return True

    def insert(self, request: Any) -> None:
        """Publish what a chunk of a prompt has computed; answers are published at the end."""
        if request.computed <= request.prefilled:
            request.req.extend_end = request.computed
            source("mem_cache.common").checkpoint_kv_cache(request.req, self.cache)
            row = self.cache.req_to_token_pool.req_to_token[request.req.kv.req_pool_idx]
            request.slots = row[: len(request.slots)].tolist()
            self.gives(request)

    def give_up(self, request: Any, keep: bool) -> None:
        req = request.req
        if req.kv.holds_kv:
            req.output_ids = request.tokens[len(req.origin_input_ids) :]
            req.finished_reason = SimpleNamespace() if keep else None
            source("mem_cache.common").release_kv_cache(req, self.cache, checkpoint=keep)
        if not keep:
            req.reset_for_retract()

    def reset(self) -> bool:
        """Flush the cache, which it does if it is idle."""
        if not self.live:
            self.cache.reset()
            self.cache.req_to_token_pool.clear()
            self.allocator.clear()
        return not self.live

    def epoch(self) -> bool:
        return self.reset()

    @property
    def in_flight(self) -> bool:
        return bool(self.cache.cache_controller.has_inflight_device_transfers())

    def finish_batches(self) -> None:
        """Let the copies end."""
        super().finish_batches()
        self.cache.sanity_check()

    def free(self) -> int:
        return int(self.allocator.available_size() + self.cache.evictable_size()) // int(self.size)


class Adapter(LoopAdapter):
    NAME = "sglang 0.5.23"
    AXES: ClassVar[dict[str, tuple[Any, ...]]] = {
        "block_size": (4, 2, 8),
        "eviction_policy": ("lru", "lfu", "fifo", "mru", "filo"),
        "namespace": ("extra_key", "cache_salt"),
        "write_policy": ("write_through", "write_back", "write_through_selective"),
        "host_pages": (32, 8, 4),
        "copy_steps": (0, 2),
        "tree_core": ("rust", "python"),
    }
    MOVES = frozenset({"abort", "tenants", "epoch", "reset"})
    Engine = Engine

    @classmethod
    def version(cls) -> str:
        found = super().version()
        source("mem_cache.unified_radix_cache")
        return found

    @staticmethod
    def attach(target: Any, sanitizer: Any) -> None:
        """Follow the loop, and the copies between the tiers."""
        LoopAdapter.attach(target, sanitizer)
        target.stores = lambda pairs: sanitizer.copy(pairs, target="host")
        target.loads = lambda pairs: sanitizer.copy(pairs, source="host")
