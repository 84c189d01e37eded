# SPDX-License-Identifier: Apache-2.0
"""The adapter for the continuous batching of transformers 5.23.0.

Its loop, scheduler, caches and swap pool run unchanged. Not followed: tensor parallelism, CUDA
graphs, and the block tables of the decode path, which need a GPU.
"""

import contextlib
import importlib
from collections.abc import Iterable
from functools import partial
from typing import Any, ClassVar

from kvcore.sanitizer import CacheGroup, SlotChunk
from kvcore.sanitizer.hunter.adapter import EngineAdapter
from kvcore.sanitizer.hunter.driven import Driven, Silent, without_pins
from kvcore.sanitizer.hunter.kit import BatchReporter, around

torch: Any = importlib.import_module("torch")


def source() -> Any:
    """Import the module of its manager, with stand-ins for streams, events and pinned memory."""
    package = "transformers.generation.continuous_batching."
    api = importlib.import_module(package + "continuous_api")
    if torch.Event is not Silent:
        without_pins(torch)
        torch.Event = Silent
        api.logger.disabled = True
        for name in ("continuous_api", "input_outputs", "model_runner", "offloading_manager"):
            module: Any = importlib.import_module(package + name)
            module.stream_context = lambda _: contextlib.nullcontext()
            module.create_device_stream = Silent
        api.ContinuousBatchingAsyncIOs._supported_device_types = ("cpu",)
        del api.ContinuousBatchProcessor.__del__
    return api


class Model(torch.nn.Module):  # type: ignore[misc] # torch has no types here
    """The part of a model that a manager sees, without its answers."""

    _supports_flash_attn = False
    dtype, device = torch.float16, torch.device("cpu")

    def __init__(self, window: Any) -> None:
        super().__init__()
        kinds = ["full_attention"] + (["sliding_attention"] if window else [])
        self.config = importlib.import_module("transformers").LlamaConfig(
            hidden_size=8, num_attention_heads=1, num_key_value_heads=1, vocab_size=16,
            num_hidden_layers=len(kinds), intermediate_size=8, layer_types=kinds,
            sliding_window=window,
        )  # fmt: skip
        self.config._attn_implementation = "flash_attention_2"  # this attention needs no masks

    def _get_logits_processor(self, _: Any) -> list[Any]:
        return []


def sample_of(name: str) -> tuple[str, int]:
    """Return the request and the number of the sample of a name."""
    request, _, child = name.partition("__child#")
    return request, int(child) + 1 if child else 0


class Engine(Driven):
    """ContinuousBatchingManager without its thread, with letters instead of the model's answers."""

    def __init__(self, world: Any) -> None:
        api, options = source(), dict(world.axes)
        transformers = importlib.import_module("transformers")
        config = transformers.generation.configuration_utils.ContinuousBatchingConfig(
            page_size=options.pop("block_size"), num_blocks=world.num_blocks,
            max_batch_tokens=world.token_budget, max_requests_per_batch=world.max_rows,
            default_compile_level=0, use_cuda_graph=False,
            **{name: value for name, value in options.items() if name != "window"},
        )  # fmt: skip
        answer = transformers.GenerationConfig(eos_token_id=-1, do_sample=False)
        model = Model(options["window"])
        self.world = world
        self.manager = api.ContinuousBatchingManager(model, answer, config)
        self.manager._wake_up_loop, self.manager.current_batch = Silent(), 0
        self.target = self.manager.batch_processor = self.manager._create_batch_processor()
        self.cache = self.target.cache
        self.num_blocks = self.cache.num_sectors + 2  # and two of trash
        self.target.model_runner._forward_process_and_sample = self.forward
        self.starting = self.target.use_async_batching
        self.waiting: set[str] = set()

    def forward(self, model: Any, data: Any, carried: Any, before: Any, answers: Any) -> None:
        del model, data, carried, before
        io = self.target.inputs_and_outputs
        io = io.io_pairs[io.current_pair].host_io if hasattr(io, "io_pairs") else io
        new = [each.state for each in io.requests_in_batch if each.has_new_token]
        for place, state in enumerate(new):
            _, sample = sample_of(state.request_id)
            answers[0, place] = self.world.token(state.position_offset, sample)

    def names(self, name: str, samples: int = 8) -> list[str]:
        return [name, *(f"{name}__child#{number}" for number in range(samples - 1))]

    def arrive(self, arrival: Any) -> None:
        self.manager.num_return_sequences = arrival.samples
        self.waiting.update(self.names(arrival.name, arrival.samples))
        self.manager.add_request(list(arrival.prompt), arrival.name, arrival.new)

    def abort(self, name: str) -> None:
        for each in self.names(name):
            if each in self.waiting:
                self.waiting.remove(each)
                self.manager.cancel_request(each)

    def step(self) -> None:
        self.starting = self.manager._generation_loop_body(self.target, self.starting) and (
            self.starting
        )
        while not self.manager.output_router.output_queue.empty():
            self.waiting.discard(self.manager.output_router.output_queue.get().request_id)

    def epoch(self) -> bool:
        """End a generate_batch(persistent_manager=True) and start the next one."""
        for _ in range(100):
            if not self.waiting:
                break
            self.step()
        else:
            return False
        self.finish_batches()
        if self.in_flight:  # as the loop does when it stops
            io = self.target.inputs_and_outputs
            io.current_pair = 1 - io.current_pair
            self.target.update_batch()
        self.manager._create_batch_processor()
        self.starting = self.target.use_async_batching
        return True

    def finish_batches(self) -> None:
        for _ in range(3):
            self.step()

    @property
    def in_flight(self) -> bool:
        return bool(self.target.use_async_batching and not self.starting)

    @property
    def live(self) -> list[str]:
        return sorted({sample_of(name)[0] for name in self.waiting})

    def free(self) -> int:
        allocators = self.cache.cache_allocators.values()
        kept = sum(len(each.ledger.cached_blocks) * each.bytes_per_block for each in allocators)
        return int(self.cache.compute_free_capacity(False) + kept) // int(
            self.cache.bytes_per_sector
        )


class Adapter(EngineAdapter):
    NAME, MODULES = "transformers 5.23.0", ("transformers",)
    AXES: ClassVar[dict[str, tuple[Any, ...]]] = {
        "block_size": (4, 8),
        "use_async_batching": (False, True),
        "scheduler_type": ("fifo", "prefill_first"),
        "cpu_offload_space": (0.0, 1e-6, 1e-4),
        "safety_margin": (None, 0.0),
        "allow_block_sharing": (True, False),
        "window": (None, 6),
    }
    MOVES = frozenset({"abort", "epoch", "samples"})
    Engine = Engine
    sample_of = staticmethod(sample_of)

    @staticmethod
    def groups(engine: Any) -> list[CacheGroup]:
        return [
            CacheGroup(
                block_size=each.tokens_per_page,
                ring=hasattr(each, "sliding_window"),
                window=getattr(each, "sliding_window", None),
            )
            for each in engine.cache.cache_allocators.values()
        ]

    @staticmethod
    def attach(target: Any, sanitizer: Any) -> None:
        """Follow a ContinuousBatchProcessor by the slots that its batches write and read."""
        Batches(target, sanitizer)


class Batches(BatchReporter):
    """The hooks, each around the engine's method of that name."""

    def __init__(self, target: Any, sanitizer: Any) -> None:
        super().__init__(sanitizer)
        self.target = target
        self.offloading, self.kinds = target.offloading_manager, target.cache.cache_allocators
        self.chunks: list[SlotChunk] = []
        for owner, *names in (
            (target, "_generation_step", "update_batch"),
            (target.scheduler, "add_waiting_request", "finish_request", "clear_cancelled_requests"),
            (target.cache, "prepare_fork_request", "extend_read_and_write_indices"),
            (self.offloading, "_offload_to_cpu", "restore_scheduled_requests"),
        ):
            for name in names:
                around(owner, name)(getattr(self, name))
        for group_id, its in self.allocators():
            around(its, "copy_blocks")(partial(self.copy_blocks, group_id))

    def allocators(self) -> Iterable[tuple[int, Any]]:
        return enumerate(self.kinds.values())

    def begins(self, name: str, tokens: list[int], parent: str | None = None) -> None:
        self.tokens[name] = tokens
        self.sanitizer.begin(name, tokens, parent=parent)

    def ends(self, name: str) -> None:
        if self.tokens.pop(name, None) is not None:
            self.sanitizer.end(name)

    def add_waiting_request(self, inner: Any, state: Any) -> None:
        inner(state)
        self.begins(state.request_id, state.initial_tokens + state.generated_tokens)

    def finish_request(self, inner: Any, name: str) -> None:
        inner(name)
        self.ends(name)

    def clear_cancelled_requests(self, inner: Any) -> Any:
        states = inner()
        for state in states:
            self.ends(state.request_id)
        return states

    def prepare_fork_request(self, inner: Any, state: Any, names: list[str], pairs: Any) -> Any:
        forked = inner(state, names, pairs)
        for name in forked:
            self.begins(name, list(self.tokens[state.request_id]), state.request_id)
        return forked

    def extend_read_and_write_indices(
        self, inner: Any, name: str, past: int, count: int, reads: Any, writes: Any
    ) -> None:
        starts = [(len(reads[i]) if reads else 0, len(writes[i])) for i in range(len(writes))]
        inner(name, past, count, reads, writes)
        for group_id, its in self.allocators():
            read, written = starts[group_id]
            new = [_slot(its, place) for place in writes[group_id][written:]]
            old = [_slot(its, place) for place in (reads[group_id][read:] if reads else ())]
            old = [each for each in old if each >= 0]
            self.chunks.append(SlotChunk(name, group_id, past, count, new, old))

    def _generation_step(self, inner: Any, model: Any) -> None:
        self.issue(self.chunks[:])
        self.chunks.clear()
        inner(model)

    def update_batch(self, inner: Any) -> None:
        self.complete()
        inner()
        for name, state in self.target.scheduler.active_requests.items():
            self.learn(name, state.initial_tokens + state.generated_tokens)

    def copy_blocks(self, group_id: int, inner: Any, sources: Any, targets: Any) -> None:
        inner(sources, targets)
        self.sanitizer.copy(list(zip(sources, targets, strict=True)), group_id)

    def _offload_to_cpu(self, inner: Any, victims: Any, tables: Any) -> Any:
        names = inner(victims, tables)
        for name in names:
            swapped = self.offloading._request_id_to_cpu_blocks[name]
            for group_id, kind in enumerate(self.kinds):
                pairs = zip(tables[name].get(kind, []), swapped.get(kind, []), strict=True)
                self.sanitizer.copy(list(pairs), group_id, target="cpu")
        return names

    def restore_scheduled_requests(self, inner: Any, batch: Any) -> None:
        swapped = dict(self.offloading._request_id_to_cpu_blocks)
        names = [each.state.request_id for each in batch if each.state.is_cpu_offloaded]
        inner(batch)
        for name in names:
            for group_id, (kind, its) in enumerate(self.kinds.items()):
                table = its.block_table.get(name, [])
                pairs = list(zip(swapped[name].get(kind, []), table, strict=False))
                self.sanitizer.copy(pairs, group_id, source="cpu")


def _slot(its: Any, place: int) -> int:
    """Return the slot of a place in its memory; none for padding."""
    if place in (its.write_trash_index, its.sentinel_index):
        return -1
    block, offset = divmod(place, its.block_physical_stride)
    return int(block * its.tokens_per_page + offset)
