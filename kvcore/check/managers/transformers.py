# SPDX-License-Identifier: Apache-2.0
"""transformers 5.23.0's cache allocators, called as its scheduler and its forward pass call them.

    kvcore check --manager kvcore.check.managers.transformers:Manager

It runs in transformers' environment, on a CPU. A block has the size of a sector. Layers with a
window are rings: a table of the world repeats the blocks of the ring.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import attrs
from transformers import ContinuousBatchingConfig, MistralConfig
from transformers.generation.continuous_batching.cache import PagedAttentionCache
from transformers.generation.continuous_batching.distributed import DistributedHelper
from transformers.generation.continuous_batching.requests import RequestStatus

from kvcore import Config
from kvcore.types.commands import CopyOnWrite

FIRST = 2
"""Sectors before it are never handed out."""


def made(config: Config) -> Any:
    """Make the cache for such a pool. Raises ValueError."""
    groups, size = config.groups, config.block_size
    kinds = ["sliding_attention" if each.window else "full_attention" for each in groups]
    window = next((each.window for each in groups if each.window), None)
    usable, rest = divmod(config.num_usable_blocks, len(groups))
    if len({*kinds}) < len(groups) or rest or (window or 0) % size:
        raise ValueError(
            "use one group, or a full and a windowed group with equal numbers of whole blocks"
        )
    model = MistralConfig(
        hidden_size=128 // size, num_attention_heads=1, num_key_value_heads=1,
        num_hidden_layers=len(kinds), layer_types=kinds, sliding_window=window,
    )  # fmt: skip
    options = ContinuousBatchingConfig(
        page_size=size, num_blocks=usable, max_batch_tokens=8, max_memory_percent=0.9,
        max_blocks_per_request=0,
    )  # fmt: skip
    return PagedAttentionCache(model, options, "cpu", DistributedHelper(None, None))


class Manager:
    """The cache, with the requests of a scheduler and their computed and scheduled counts."""

    def __init__(self, config: Config) -> None:
        self.cache, self.first = made(config), FIRST - int(config.null_block)
        self.requests: dict[str, Any] = {}
        self.copies: list[CopyOnWrite] = []
        self.rings = [n for n, each in enumerate(config.groups) if each.window]
        self.allocators = self.cache.cache_allocators

    def __deepcopy__(self, memo: Any) -> Manager:
        other = copy.copy(self)
        other.requests, other.copies = copy.deepcopy(self.requests, memo), [*self.copies]
        other.cache = copy.copy(self.cache)
        other.cache.pool = copy.deepcopy(self.cache.pool, memo)
        other.allocators = other.cache.cache_allocators = {}
        for name, each in self.allocators.items():
            twin = other.allocators[name] = copy.copy(each)
            twin.pool, twin.ledger = other.cache.pool, copy.deepcopy(each.ledger, memo)
            twin.block_table = copy.deepcopy(each.block_table, memo)
        return other

    def add_request(self, request: Any) -> None:
        tokens = list(request.tokens)
        self.requests[request.request_id] = State(request.request_id, tokens)

    def get_computed_blocks(self, name: str) -> tuple[None, int]:
        if self.rings:
            return None, 0
        (allocator,) = self.allocators.values()
        matched = allocator.match_prefix_blocks(self.requests[name].initial_tokens)
        return None, len(matched) * allocator.tokens_per_page

    def allocate_slots(self, name: str, count: int, hit: Any = None) -> Any:
        state = self.requests[name]
        if hit is not None:
            state.computed = self.cache.search_prefix_match(name, state.initial_tokens)
        if self.fits(state, count):
            return self.get_block_ids(name)
        self.free(name)
        return None

    def append(self, names: list[str], tokens: list[int]) -> Any:
        state = self.requests[names[0]]
        if not self.fits(state, 1):
            return None
        state.initial_tokens.append(tokens[0])
        return self.get_block_ids(names[0])

    def fits(self, state: Any, count: int) -> bool:
        """Return whether the cache can store these tokens, if necessary by evicting cached ones."""
        self.cache.pool.try_to_free_sectors()
        if not self.cache.can_store_request_tokens(state, count):
            if not self.cache.evict_cached_blocks():
                return False
            self.cache.pool.try_to_free_sectors()
            if not self.cache.can_store_request_tokens(state, count):
                return False
        state.scheduled = count
        state.complete = self.cache.count_new_complete_blocks(state, count)
        return True

    def fork(self, name: str, child: str) -> bool:
        pairs: Any = {kind: ([], []) for kind in self.allocators}
        if not self.cache.prepare_fork_request(self.requests[name], [child], pairs):
            return False
        self.requests[child] = copy.deepcopy(self.requests[name])
        self.requests[child].request_id = child
        for sources, targets in pairs.values():
            shifted = ([block - self.first for block in each] for each in (sources, targets))
            self.copies += map(CopyOnWrite, *shifted)
        return True

    def take_batch(self) -> list[CopyOnWrite]:
        copies, self.copies = self.copies, []
        return copies

    def end_step(self) -> None:
        for state in self.requests.values():
            if state.scheduled:
                self.cache.mark_complete_blocks(state, state.complete)
                state.computed += state.scheduled
                state.scheduled = 0

    def free(self, name: str) -> None:
        self.cache.free_blocks(name)
        self.requests[name].computed = self.requests[name].scheduled = 0

    def remove_request(self, name: str) -> None:
        del self.requests[name]

    def get_block_ids(self, name: str) -> list[list[int]]:
        state, tables = self.requests[name], []
        for number, each in enumerate(self.allocators.values()):
            table = [block - self.first for block in each.block_table[name]]
            length = -(-(state.computed + state.scheduled) // each.tokens_per_page)
            ring = each.sliding_window // each.tokens_per_page if number in self.rings else length
            tables.append([table[place % ring] for place in range(length)])
        return tables

    @property
    def num_free_blocks(self) -> int:
        pool = self.cache.pool
        kept = sum(len(each.ledger.cached_blocks) for each in self.allocators.values())
        free = sum(pool.count_free_blocks(each.index) for each in self.allocators.values())
        return int(pool.num_free_sectors + free + kept)

    def state_name(self, slots: Callable[[int], object]) -> bytes:
        pool, ledgers = self.cache.pool, [each.ledger for each in self.allocators.values()]
        tables = [sorted(each.block_table.items()) for each in self.allocators.values()]
        held = [block for kind in tables for _, table in kind for block in table]
        kept = [block for each in ledgers for block in each.cached_blocks]
        open_trees = [tree for each in pool._free_blocks for tree in each.trees.items()]
        free = [block for _, leaves in open_trees for block in leaves]
        order = [*held, *kept, *free, *pool.free_sectors]
        places = {block: place for place, block in reversed([*enumerate(order)])}
        live = [(places[block], slots(block - self.first)) for block in sorted({*held, *kept})]
        known = [
            (
                sorted((places[block], count) for block, count in each.shared_ref_counts.items()),
                sorted((key, places[block]) for key, block in each.hash_to_block.items()),
                sorted((places[block], key) for block, key in each.block_to_hash.items()),
                [places[block] for block in each.cached_blocks],
            )
            for each in ledgers
        ]
        named = [[(n, [places[block] for block in table]) for n, table in kind] for kind in tables]
        trees = [(places[root], [places[block] for block in each]) for root, each in open_trees]
        queue = [places[sector] for sector in pool.free_sectors]
        return repr((sorted(live), known, named, trees, queue)).encode()


@attrs.define
class State:
    """A request, with the attributes that the cache reads."""

    request_id: str
    initial_tokens: list[int]
    computed: int = 0
    scheduled: int = 0
    complete: dict[str, int] = attrs.field(factory=dict)
    generated_tokens: list[int] = attrs.field(factory=list)
    status: RequestStatus = RequestStatus.DECODING

    def current_len(self) -> int:
        return self.computed
