# SPDX-License-Identifier: Apache-2.0
"""The paged cache of continuous batching with its blocks decided by kvcore.

A block of kvcore is a sector of transformers. Block 0, which kvcore never hands out, is sector 1,
which transformers writes padding into; so block n is sector n + 1, and null blocks behind a window
name a sector that no query reads.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar

from transformers.generation.continuous_batching.cache import PagedAttentionCache
from transformers.generation.continuous_batching.cache_allocators import (
    FullAttentionCacheAllocator,
    SlidingAttentionCacheAllocator,
)
from transformers.generation.continuous_batching.requests import RequestState, RequestStatus

from kvcore import Batch, Config, CopyOnWrite, Evict, Group, Hit, KVCacheManager, Request
from kvcore_transformers.statistics import Statistics


class Full(FullAttentionCacheAllocator):
    """Full-attention layers: the table and the indices."""

    missing: dict[str, int]
    """Sectors that each refused request lacked, all allocators together."""

    def needs_new_blocks(self, request_id: str, past_length: int, query_length: int) -> int:
        """What the last refusal of the request lacked, told by the first allocator for all."""
        del past_length, query_length
        return 0 if self.index else self.missing.get(request_id, 0) * self.blocks_per_sector


class Sliding(SlidingAttentionCacheAllocator):
    """Sliding layers in a table that grows and has null blocks behind the window.

    transformers' own is a ring, whose blocks are overwritten and cannot be shared.
    """

    missing: dict[str, int]
    supports_block_sharing = True
    needs_new_blocks = Full.needs_new_blocks
    get_write_indices = FullAttentionCacheAllocator.get_write_indices
    update = FullAttentionCacheAllocator.update

    def get_read_indices(self, request_id: str, past_length: int, query_length: int) -> list[int]:
        """Where the window before the query is, and the query."""
        seen = min(past_length, self.sliding_window - 1)
        return self.get_write_indices(request_id, past_length - seen, seen + query_length)


class Pool:
    """What transformers asks its own pool for: counts. Nothing is divided among allocators."""

    def __init__(self, manager: KVCacheManager) -> None:
        self.manager = manager

    @property
    def num_free_sectors(self) -> int:
        """Sectors that a request can take, those with cached content among them."""
        return self.manager.num_free_blocks

    def count_free_blocks(self, index: int) -> int:
        """Free blocks within sectors of an allocator: there are none."""
        del index
        return 0

    def try_to_free_sectors(self) -> None:
        """Nothing to do: a sector is free as soon as its block is."""


class KvcoreCache(PagedAttentionCache):
    """transformers' paged cache over a `KVCacheManager`."""

    of_installation: ClassVar[Statistics] = Statistics()

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.statistics = self.of_installation
        self.parts = list(self.cache_allocators.values())
        config = Config(
            num_blocks=self.num_sectors + 1,
            groups=tuple(_group(each) for each in self.parts),
            enable_caching=self.use_prefix_sharing,
        )
        self.manager = KVCacheManager(config)
        self.pool = Pool(self.manager)
        self.missing: dict[str, int] = {}
        for each in self.parts:
            each.pool, each.missing = self.pool, self.missing
        self.known = self.parts[0].block_table
        self.scheduled: set[str] = set()
        """Requests that got or took blocks since the open batch began."""
        self.is_unwritten = False
        """Whether a batch was taken whose forward pass has not been seen to end."""
        self.is_outdated = False
        """Whether cached blocks may come from weights that the model no longer has."""

    def search_prefix_match(self, request_id: str, prompt_ids: list[int]) -> int:
        """Look a prompt up, and take the blocks that are found; returns their tokens."""
        if not self.use_prefix_sharing:
            return 0
        if self.is_outdated and not self.manager.reset_prefix_cache():
            return 0
        self.is_outdated = False
        self._know(request_id, prompt_ids)
        hit = self.manager.get_computed_blocks(request_id)
        if hit.num_tokens == 0 or not self._take(request_id, hit):
            return 0
        self.statistics.hits += hit.num_tokens
        return hit.num_tokens

    def can_store_request_tokens(
        self, state: RequestState, request_len: int, dry_run: bool = False
    ) -> bool:
        """Schedule the next tokens of a request; False if they do not fit."""
        request_id, past = state.request_id, state.current_len()
        if dry_run:  # of a request that nobody knows
            sizes = [group.block_size for group in self.manager.config.groups]
            needed = sum(-(-(past + request_len) // size) for size in sizes)
            return needed <= self.manager.num_free_blocks
        if state.status == RequestStatus.DECODING and request_id in self.known:
            return self._append(request_id, state.tokens_to_process)
        self._know(request_id, state.initial_tokens)
        prefill_ends = past + request_len == len(state.initial_tokens)
        if state.num_children and prefill_ends and request_len > 1:
            request_len -= 1  # the scheduler leaves the last token to be computed after the fork
        # More than request_len only for the requests of a warm-up, which begin in mid-prompt.
        num_new = past + request_len - self.manager.num_computed_tokens(request_id)
        got = self.manager.allocate_slots(request_id, num_new)
        if not got:
            self.missing[request_id] = got.needed
            return False
        self._extend(request_id, got.blocks)
        return True

    def free_blocks(self, request_id: str, no_cache: bool = False) -> None:
        """Forget a request. Its full blocks stay findable until they are needed (no_cache too)."""
        del no_cache
        if request_id not in self.known:
            return
        if self.scheduled:
            self.close_batch()
        self.manager.free(request_id)
        self.manager.remove_request(request_id)
        self.missing.pop(request_id, None)
        for each in self.parts:
            del each.block_table[request_id]

    def free_all_requests(self, clear_ledgers: bool = False) -> None:
        """Forget all requests; the cached content too if asked, or if a step broke off."""
        for request_id in list(self.known):
            self.free_blocks(request_id)
        if clear_ledgers or self.is_unwritten:
            self.manager.reset_prefix_cache()
            self.is_unwritten = False

    def reset(self) -> None:
        """Forget requests and cached content."""
        self.free_all_requests(clear_ledgers=True)

    def prepare_fork_request(
        self, src_state: RequestState, dst_req_ids: list[str], copy_src_and_dst: Any
    ) -> list[str]:
        """Let children share all blocks; whichever writes into a shared one gets a copy then."""
        del copy_src_and_dst
        for child in dst_req_ids:
            self.manager.fork(src_state.request_id, child)
            for each in self.parts:
                each.block_table[child] = each.block_table[src_state.request_id][:]
        return dst_req_ids

    def extend_read_and_write_indices(self, *args: Any) -> None:
        """Give the indices of one request, after the step's copies."""
        if self.scheduled:
            self.close_batch()
        super().extend_read_and_write_indices(*args)

    def fill_block_table(self, *args: Any) -> None:
        """Give the table of one request, after the step's copies."""
        if self.scheduled:
            self.close_batch()
        super().fill_block_table(*args)

    def count_new_complete_blocks(self, state: RequestState, request_len: int) -> dict[str, int]:
        """Nothing to mark later: the manager counts."""
        del state, request_len
        return {}

    def mark_complete_blocks(self, state: RequestState, complete_blocks: dict[str, int]) -> None:
        """Note that the forward pass is over; it is called for each request of the step."""
        del state, complete_blocks
        self.is_unwritten = False

    def evict_cached_blocks(self) -> bool:
        """Evict nothing: cached blocks are free ones, and go one by one as they are needed."""
        return False

    def compute_free_capacity(self, relative: bool = True) -> int | float:
        """Free bytes, or their part of all."""
        free = self.manager.num_free_blocks
        return free / self.num_sectors if relative else free * self.bytes_per_sector

    def close_batch(self) -> None:
        """Take the open batch and make its copies."""
        batch = self.manager.take_batch()
        kinds = batch.column("kind").tolist()
        self.statistics.evictions += kinds.count(Evict.kind)
        if CopyOnWrite.kind in kinds:
            self._copy(batch)
            for request_id in self.scheduled:
                tables = self.manager.get_block_ids(request_id)
                for each, blocks in zip(self.parts, tables, strict=True):
                    each.block_table[request_id] = _within(each, blocks)
        self.scheduled.clear()
        self.is_unwritten = True

    def _know(self, request_id: str, tokens: list[int]) -> None:
        """Add a request unless it was added before."""
        if request_id in self.known:
            return
        self.manager.add_request(Request(request_id, tokens))
        self.statistics.queries += len(tokens)
        for each in self.parts:
            each.block_table[request_id] = []

    def _take(self, request_id: str, hit: Hit) -> bool:
        """Take the blocks of a hit."""
        if not self.manager.allocate_slots(request_id, 0, hit):
            return False
        self._extend(request_id, hit.blocks.blocks)
        return True

    def _append(self, request_id: str, tokens: list[int]) -> bool:
        """Add the token that was sampled, and a slot for it."""
        appended = self.manager.append([request_id], tokens)
        if appended.refused is not None:
            self.missing[request_id] = appended.refused.needed
            return False
        self.scheduled.add(request_id)
        if appended.columns:
            for _, group, position, block in zip(*appended.grown, strict=True):
                each = self.parts[group]
                n = each.blocks_per_sector
                each.block_table[request_id][position * n : (position + 1) * n] = _within(
                    each, [block]
                )
        return True

    def _extend(self, request_id: str, blocks: Iterable[Iterable[int]]) -> None:
        """Put new blocks behind those that a request has."""
        self.scheduled.add(request_id)
        for each, new in zip(self.parts, blocks, strict=True):
            each.block_table[request_id] += _within(each, new)

    def _copy(self, batch: Batch) -> None:
        """Copy sectors, segment by segment; inside a segment the order is free."""
        segments: dict[int, list[tuple[int, int]]] = {}
        columns = (batch.column(name) for name in ("kind", "segment", "a", "b"))
        for kind, segment, source, target in zip(*columns, strict=True):
            if kind == CopyOnWrite.kind:
                segments.setdefault(segment, []).append((source, target))
        each = self.parts[0]  # a sector is copied whole, whichever allocator uses it
        for pairs in segments.values():
            self.statistics.copies += len(pairs)
            sources, targets = zip(*pairs, strict=True)
            each.copy_blocks(_within(each, sources), _within(each, targets))


def _group(allocator: Any) -> Group:
    """An allocator as a group of kvcore."""
    size = allocator.blocks_per_sector * allocator.tokens_per_page
    if isinstance(allocator, Sliding):
        return Group(size, kind="sliding_window", window=allocator.sliding_window)
    return Group(size)


def _within(allocator: Any, blocks: Iterable[int]) -> list[int]:
    """An allocator's blocks that lie in the sectors of these blocks of kvcore."""
    n = allocator.blocks_per_sector
    if n == 1:
        return [block + 1 for block in blocks]
    return [inner for block in blocks for inner in range((block + 1) * n, (block + 2) * n)]
