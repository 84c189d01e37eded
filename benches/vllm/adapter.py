# SPDX-License-Identifier: Apache-2.0
"""vLLM 0.33.0's schedulers over kvcore: its KVCacheManager, as far as they ask for it.

`KvcoreScheduler` and `KvcoreAsyncScheduler` are vLLM's own classes; only the manager that they make
is another one. What kvcore has no notion of is `Unsupported`, by name, when the scheduler is made.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

from vllm.v1 import kv_cache_interface as specs
from vllm.v1.core.sched import scheduler as vllm_scheduler
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

from kvcore import Config, Group
from kvcore.compat import KVCacheBlocks
from kvcore.compat import KVCacheManager as Compat
from kvcore.types.groups import Kind

KINDS: dict[type[Any], Kind] = {
    specs.FullAttentionSpec: "full_attention",
    specs.MLAAttentionSpec: "mla",
    specs.SlidingWindowSpec: "sliding_window",
    specs.ChunkedLocalAttentionSpec: "chunked_local",
}
"""Exactly these: a subclass of one has a rule of its own."""

OFF: dict[str, Any] = {
    "num_hash_lookahead_tokens": 0,
    "num_prefill_lookahead": 0,
    "enable_kv_cache_events": False,
    "dcp_world_size": 1,
    "pcp_world_size": 1,
    "metrics_collector": None,
    "watermark": 0.0,
    "enable_mamba_shared_prefix_checkpoint": False,
}
"""Arguments of vLLM's manager that have no counterpart, and what they are if they are not used."""


class Unsupported(NotImplementedError):
    """kvcore, or this adapter, has no such feature."""


def read_group(group: Any) -> Group:
    """A group of vLLM's configuration. Raises Unsupported."""
    spec = group.kv_cache_spec
    kind = KINDS.get(type(spec))
    if kind is None or group.role is not specs.KVCacheGroupRole.DEFAULT or group.host_resident:
        raise Unsupported(f"groups of {type(spec).__name__}, role {group.role.name}")
    if not spec.prefix_cacheable:
        raise Unsupported(f"groups of {type(spec).__name__} that are not cached")
    window = None
    if kind == "sliding_window":
        window = spec.sliding_window + spec.extra_retained_tokens
    elif kind == "chunked_local":
        window = spec.attention_chunk_size
    return Group(spec.block_size, kind=kind, window=window, eagle=group.is_eagle_group)


def read_config(
    kv_cache_config: Any,
    *,
    max_model_len: int,
    max_in_flight_tokens: int | None,
    enable_caching: bool,
    use_eagle: bool,
) -> Config:
    """The configuration of vLLM's manager as kvcore's. Raises Unsupported, InvalidConfig."""
    groups = tuple(read_group(group) for group in kv_cache_config.kv_cache_groups)
    if not groups:
        raise Unsupported("a model without cache groups")
    return Config(
        kv_cache_config.num_blocks,
        groups=groups,
        max_model_len=max_model_len,
        max_num_batched_tokens=max_in_flight_tokens or max_model_len,
        enable_caching=enable_caching,
        eviction="uncached_first",
        use_eagle=use_eagle,
        record_new_blocks=kv_cache_config.needs_kv_cache_zeroing,
    )


class KVCacheManager:
    """What vLLM's schedulers call, by vLLM's names, over `kvcore.compat`.

    num_withdrawn: blocks that lost their keys since the step that was to write them computes their
    request no more. vLLM leaves them findable.
    """

    mamba_shared_prefix_checkpoint = False

    def __init__(
        self,
        kv_cache_config: Any,
        *,
        max_model_len: int,
        scheduler_block_size: int,
        hash_block_size: int,
        max_in_flight_tokens: int | None = None,
        enable_caching: bool = True,
        use_eagle: bool = False,
        log_stats: bool = False,
        **options: Any,
    ) -> None:
        for name, value in options.items():
            if value != OFF[name]:
                raise Unsupported(f"{name}={value!r}")
        config = read_config(
            kv_cache_config,
            max_model_len=max_model_len,
            max_in_flight_tokens=max_in_flight_tokens,
            enable_caching=enable_caching,
            use_eagle=use_eagle,
        )
        if enable_caching and config.hash_block_size != hash_block_size:
            raise Unsupported(f"hashes of {hash_block_size} tokens, finer than blocks")
        del scheduler_block_size  # of the block sizes, and kvcore derives it
        self.num_withdrawn = 0
        self.compat = compat = Compat(config, log_stats=log_stats)
        self.coordinator = SimpleNamespace(
            enable_partial_hash_hits=False,
            single_type_managers=tuple(
                SimpleNamespace(block_size=group.block_size, kv_cache_spec=given.kv_cache_spec)
                for group, given in zip(config.groups, kv_cache_config.kv_cache_groups, strict=True)
            ),
        )
        self.empty_kv_cache_blocks = compat.empty_kv_cache_blocks
        self.append = compat.append
        self.new_step_starts = compat.new_step_starts
        self.cache_blocks = compat.cache_blocks
        self.get_blocks = compat.get_blocks
        self.get_block_ids = compat.get_block_ids
        self.evict_blocks = compat.evict_blocks
        self.reset_prefix_cache = compat.reset_prefix_cache
        self.make_prefix_cache_stats = compat.make_prefix_cache_stats

    @property
    def usage(self) -> float:
        """Share of the usable blocks that have an owner."""
        return self.compat.usage

    def get_computed_blocks(
        self, request: Any, max_cache_hit_length: int | None = None
    ) -> tuple[KVCacheBlocks, int, int]:
        """The longest hit, its tokens, and no boundary of a shared prefix."""
        if max_cache_hit_length is not None:
            raise Unsupported("a bound of a look-up")
        return *self.compat.get_computed_blocks(request), 0

    def allocate_slots(
        self,
        request: Any,
        num_new_tokens: int,
        *,
        num_lookahead_tokens: int = 0,
        has_scheduled_reqs: bool = True,
        skip_zeroing_group_ids: tuple[int, ...] = (),
        **options: Any,
    ) -> KVCacheBlocks | None:
        """Slots for the next tokens, or None."""
        if num_new_tokens == 1 and num_lookahead_tokens == 0 and not options:
            blocks = self.append(request)
            if blocks is not None:
                return blocks
        del has_scheduled_reqs  # for the watermark, which is refused
        if skip_zeroing_group_ids:
            raise Unsupported("blocks of a load that are not zeroed")
        return self.compat.allocate_slots(
            request, num_new_tokens, num_lookahead_tokens=num_lookahead_tokens, **options
        )

    def free(self, request: Any) -> None:
        """Give back a request's blocks; those without a key are used again from the tail on.

        The core puts one after the other at the front of the free queue, vLLM all of them as they
        come, so that pins have to bring them into vLLM's order.
        """
        core = self.compat.core
        tables = self.get_block_ids(request.request_id)
        held = [block for table in tables for block in table if block != 0]
        num_found = sum(core.has_key(block) for block in held)
        core.pin(held)
        self.compat.free(request)
        found = [block for block in reversed(held) if core.has_key(block)]
        self.num_withdrawn += num_found - len(found)
        core.unpin([block for block in held if not core.has_key(block)])
        core.unpin(found)

    def estimate_cached_tokens(self, request: Any) -> int:
        """Tokens of a request up to the last block that can be found."""
        counts = []
        tables = self.get_block_ids(request.request_id)
        for group, table in zip(self.compat.config.groups, tables, strict=True):
            found = [place for place, block in enumerate(table, 1) if self.has_content(block)]
            counts.append(max(found, default=0) * group.block_size)
        return min(counts)

    def has_content(self, block: int) -> bool:
        """Whether a block can be found; the null block has no content."""
        return block != 0 and self.compat.core.has_key(block)

    def record_prefix_cache_stats(self, request: Any, num_hits: int) -> None:
        """Nothing: the allocation that uses a hit counts it."""

    def take_new_block_ids(self) -> list[int]:
        """Blocks to be zeroed. It is the last call of each schedule, so the step ends here."""
        self.compat.step_ends()
        return self.compat.take_new_block_ids()

    def take_events(self) -> list[Any]:
        """None: they are refused."""
        return []

    def take_kv_cache_block_copies(self) -> tuple[list[Any], list[Any]]:
        """None: blocks of vLLM's requests are never copied."""
        return [], []

    def take_boundary_state_offloads(self) -> dict[str, Any]:
        """None: there are no state-space groups."""
        return {}


@contextlib.contextmanager
def swapped() -> Iterator[None]:
    """While it lasts, a scheduler that is made gets kvcore's manager."""
    own = vllm_scheduler.KVCacheManager
    vllm_scheduler.KVCacheManager = KVCacheManager
    try:
        yield
    finally:
        vllm_scheduler.KVCacheManager = own


def refuse_connectors(config: Any) -> None:
    """Raise Unsupported for a connector: it calls the manager's pool itself."""
    if config.kv_transfer_config is not None:
        raise Unsupported("connectors")


class KvcoreScheduler(Scheduler):  # type: ignore[misc] # vLLM has no types here
    """vLLM's scheduler over kvcore."""

    def __init__(self, vllm_config: Any, *args: Any, **options: Any) -> None:
        refuse_connectors(vllm_config)
        with swapped():
            super().__init__(vllm_config, *args, **options)


class KvcoreAsyncScheduler(AsyncScheduler):  # type: ignore[misc] # vLLM has no types here
    """vLLM's asynchronous scheduler over kvcore."""

    def __init__(self, vllm_config: Any, *args: Any, **options: Any) -> None:
        refuse_connectors(vllm_config)
        with swapped():
            super().__init__(vllm_config, *args, **options)
