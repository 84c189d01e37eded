# SPDX-License-Identifier: Apache-2.0
"""The paged cache of continuous batching, whose blocks kvcore manages.

A step may be planned while the previous one is computed (`use_async_batching`). A request then gets
a position whose token is not known yet, and the manager gets the token when the next one is
scheduled. transformers runs all steps and copies in one order on the device, so a batch that was
taken counts as executed.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar

import torch
from attrs import define
from transformers.generation.continuous_batching.cache import PagedAttentionCache
from transformers.generation.continuous_batching.requests import RequestState, RequestStatus

from kvcore import Config, CopyOnWrite, Evict, Group, KVCacheManager, Request
from kvcore.errors import HitInOpenBatch, InOpenBatch
from kvcore.record.recorder import record_if_requested
from kvcore_transformers.allocators import Pool, group_of, within
from kvcore_transformers.copies import KINDS, Copies
from kvcore_transformers.statistics import Statistics


@define
class Held:
    """What the adapter remembers of a request.

    num_added: its tokens that the manager has. num_swapped: its blocks in the host tier.
    """

    num_added: int
    num_swapped: int = 0


class KvcoreCache(PagedAttentionCache):
    """transformers' paged cache over a `KVCacheManager`."""

    called: ClassVar[str] = "kvcore"
    of_installation: ClassVar[Statistics] = Statistics()

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.pool = Pool()
        for each in self.cache_allocators.values():
            each.pool = self.pool
        self.begin(list(self.cache_allocators.values()))
        self.use_host(None, None)

    def begin(self, parts: list[Any]) -> None:
        """Begin without requests. parts: the allocators whose block tables are filled in."""
        self.statistics = self.of_installation
        self.parts = parts
        self.requests: dict[str, Held] = {}
        self.missing: dict[str, int] = {}
        """Number of blocks that each refused request lacked."""
        self.scheduled: set[str] = set()
        """Requests that got blocks, new or cached, since the open batch began."""
        self.expected: list[RequestState] = []
        self.answers: dict[str, bool] = {}
        self.is_outdated = False
        """Whether the weights changed, or a step broke off, since the last epoch began."""

    def use_host(self, host: torch.Tensor | None, stream: Any) -> None:
        """Begin with an empty pool, a host tier and the stream of the forward passes.

        host: a row of bytes per host block, or None.
        """
        groups = tuple(group_of(each) for each in self.parts)
        self.manager = self.make_manager(groups, 0 if host is None else len(host))
        self.copies = Copies(self.cache_tensor.view(-1, self.bytes_per_sector), host, stream)

    def make_manager(self, groups: tuple[Group, ...], num_host_blocks: int = 0) -> KVCacheManager:
        """Make the manager that decides about the sectors."""
        config = Config(
            num_blocks=self.num_sectors + 1,
            groups=groups,
            enable_caching=self.use_prefix_sharing,
            num_host_blocks=num_host_blocks,
        )
        manager = KVCacheManager(config)
        record_if_requested(manager)
        return manager

    def search_prefix_match(self, request_id: str, prompt_ids: list[int]) -> int:
        """Look up a prompt, and take the blocks that are found. Returns their number of tokens."""
        if not self.use_prefix_sharing:
            return 0
        if not self.renew():
            return 0
        if request_id not in self.requests:
            self.statistics.queries += len(prompt_ids)
        self._know(request_id, prompt_ids)
        hit = self.manager.get_computed_blocks(request_id)
        if hit.num_tokens == 0 or not self.manager.allocate_slots(request_id, 0, hit):
            return 0
        self._extend(request_id, hit.blocks.blocks)
        self.statistics.hits += hit.num_tokens
        return hit.num_tokens

    def renew(self) -> bool:
        """Begin an epoch if the weights changed. Returns False while an open batch forbids it.

        Content of earlier epochs is not found any more; requests that hold blocks keep them.
        """
        if self.is_outdated:
            self.is_outdated = False  # another thread may set it again meanwhile
            try:
                self.manager.advance_epoch()
            except InOpenBatch:
                self.is_outdated = True
        return not self.is_outdated

    def expect(self, ready: list[RequestState]) -> None:
        """Announce the decoding requests that the scheduler will certainly ask for, in order."""
        self.expected, self.answers = ready, {}

    def can_store_request_tokens(
        self, state: RequestState, request_len: int, dry_run: bool = False
    ) -> bool:
        """Schedule the next tokens of a request. Returns False if they do not fit."""
        request_id = state.request_id
        if request_id in self.answers:
            return self.answers.pop(request_id)
        past = state.position_offset
        if dry_run:  # of a request that was never added
            needed = sum(-(-(past + request_len) // size) for size in self._sizes())
            return needed <= self.manager.num_free_blocks
        if state.status == RequestStatus.DECODING and request_id in self.requests:
            return self._decode(state)
        if state.is_cpu_offloaded and not self._swap_in(state, request_len):
            return False
        held = self._know(request_id, state.initial_tokens)
        prefill_ends = past + request_len == len(state.initial_tokens)
        if state.num_children and prefill_ends and request_len > 1:
            request_len -= 1  # the scheduler has the last token computed after the fork
        self._add_tokens(state, held, past + request_len)
        # num_new exceeds request_len only for the requests of a warm-up, which begin in mid-prompt.
        num_new = past + request_len - self.manager.num_computed_tokens(request_id)
        if num_new < 1:  # only in a shadow, which may have found tokens that the engine computes
            return True
        got = self.manager.allocate_slots(request_id, num_new)
        if not got:
            self.missing[request_id] = got.needed
            return False
        self._extend(request_id, got.blocks)
        return True

    def free_blocks(self, request_id: str, no_cache: bool = False) -> None:
        """Forget a request. Its full blocks stay findable until needed, even with no_cache."""
        del no_cache
        if self.requests.pop(request_id, None) is None:
            return
        try:
            self.manager.free(request_id)
        except HitInOpenBatch:  # the step broke off between its plan and its forward pass
            self.close_batch()
            self.manager.free(request_id)
        self.manager.remove_request(request_id)
        self.missing.pop(request_id, None)
        self.scheduled.discard(request_id)
        for each in self.parts:
            del each.block_table[request_id]

    def free_all_requests(self, clear_ledgers: bool = False) -> None:
        """Forget all requests, and with clear_ledgers the cached content too."""
        for request_id in list(self.requests):
            self.free_blocks(request_id)
        if clear_ledgers:
            self.manager.reset_prefix_cache()

    def reset(self) -> None:
        """Forget all requests and the cached content."""
        self.free_all_requests(clear_ledgers=True)

    def swap_out(self, state: RequestState) -> bool:
        """Move an active request to the host tier. Returns False if it cannot be moved.

        A token that a step is sampling at present is dropped, and sampled again.
        """
        request_id, manager = state.request_id, self.manager
        held = self.requests[request_id]
        keep = state.position_offset
        if not manager.config.num_host_blocks or request_id in self.scheduled:
            return False
        if state.status == RequestStatus.DECODING:
            keep = min(keep, len(state.initial_tokens) + len(state.generated_tokens) - 1)
            if keep == 0:
                return False
            self._add_tokens(state, held, keep)
            if held.num_added > keep or state.position_offset > keep:
                manager.truncate(request_id, keep)
                held.num_added = keep
        if manager.num_computed_tokens(request_id) != keep:  # a window's block was given back
            return False
        swapped = manager.swap_out([request_id])
        if not swapped:
            return False
        held.num_swapped = swapped.num_copied
        if state.status == RequestStatus.DECODING:
            state.remaining_prefill_tokens = [(state.initial_tokens + state.generated_tokens)[-1]]
        state.position_offset, state.is_cpu_offloaded = keep, True
        return True

    def prepare_fork_request(
        self, src_state: RequestState, dst_req_ids: list[str], copy_src_and_dst: Any
    ) -> list[str]:
        """Let children share all blocks; a request that writes into a shared one gets a copy."""
        del copy_src_and_dst
        num_added = self.requests[src_state.request_id].num_added
        for child in dst_req_ids:
            self.manager.fork(src_state.request_id, child)
            self.requests[child] = Held(num_added)
            for each in self.parts:
                each.block_table[child] = each.block_table[src_state.request_id][:]
        return dst_req_ids

    def extend_read_and_write_indices(self, *args: Any) -> None:
        """Append the indices of one request, after the copies of the step."""
        if self.scheduled:
            self.close_batch()
        super().extend_read_and_write_indices(*args)

    def fill_block_table(self, *args: Any) -> None:
        """Fill in the block table of one request, after the copies of the step."""
        if self.scheduled:
            self.close_batch()
        super().fill_block_table(*args)

    def count_new_complete_blocks(self, state: RequestState, request_len: int) -> dict[str, int]:
        """Return no blocks to mark later: the manager keeps count itself."""
        del state, request_len
        return {}

    def mark_complete_blocks(self, state: RequestState, complete_blocks: dict[str, int]) -> None:
        """Do nothing: the manager published the blocks when they were scheduled."""

    def evict_cached_blocks(self) -> bool:
        """Evict nothing: cached blocks count as free, and are evicted one by one when needed."""
        return False

    def compute_free_capacity(self, relative: bool = True) -> int | float:
        """Return the free bytes, or their share of all bytes."""
        free = self.manager.num_free_blocks
        return free / self.num_sectors if relative else free * self.bytes_per_sector

    def close_batch(self) -> None:
        """Take the open batch and make its copies."""
        batch = self.manager.take_batch()
        self.renew()
        if not len(batch):
            self.scheduled.clear()
            return
        kinds = batch.column("kind").tolist()
        self.statistics.evictions += kinds.count(Evict.kind)
        if not KINDS.isdisjoint(kinds):
            self.copies.apply(batch, kinds, self.statistics)
        if CopyOnWrite.kind in kinds:
            for request_id in self.scheduled:
                self._read_tables(request_id)
        self.scheduled.clear()

    def _know(self, request_id: str, tokens: list[int]) -> Held:
        """Add a request unless it was added before."""
        held = self.requests.get(request_id)
        if held is None:
            self.manager.add_request(Request(request_id, tokens))
            held = self.requests[request_id] = Held(len(tokens))
            for each in self.parts:
                each.block_table[request_id] = []
        return held

    def _add_tokens(self, state: RequestState, held: Held, num_tokens: int) -> None:
        """Give the manager at least the first num_tokens tokens of a request."""
        if held.num_added < num_tokens:
            tokens = (state.initial_tokens + state.generated_tokens)[held.num_added : num_tokens]
            self.manager.add_tokens(state.request_id, tokens)
            held.num_added += len(tokens)

    def _decode(self, state: RequestState) -> bool:
        """Schedule all expected requests at once. Returns whether this one got its slot."""
        if self.expected:
            self.answers, self.expected = self.decode(self.expected), []
        if state.request_id not in self.answers:
            self.answers |= self.decode([state])
        return self.answers.pop(state.request_id)

    def decode(self, states: list[RequestState]) -> dict[str, bool]:
        """Schedule a position for each request, in order, with its token or a placeholder.

        Returns whether each one got it, by id.
        """
        known, tokens, to_come = list[str](), list[int](), list[str]()
        for state in states:
            request_id, generated = state.request_id, state.generated_tokens
            held = self.requests[request_id]
            num_known = len(state.initial_tokens) + len(generated)
            if held.num_added == num_known:
                to_come.append(request_id)
                continue
            if held.num_added < num_known - 1:
                self._add_tokens(state, held, num_known - 1)
            held.num_added = num_known
            known.append(request_id)
            tokens.append(generated[-1])
        answers = dict.fromkeys(known, True)
        for request_id in self._append_alike(known, tokens):
            answers[request_id] = False
            self.requests[request_id].num_added -= 1
        if to_come:
            answers |= dict.fromkeys(to_come, True)
            answers |= dict.fromkeys(self._append_alike(to_come, None), False)
        return answers

    def _append_alike(self, names: list[str], tokens: list[int] | None) -> list[str]:
        """Call `append`, and once more behind each refused request. Returns the refused ones."""
        refused = []
        while names:
            appended = self.manager.append(names, tokens)
            done, refusal = appended.done, appended.refused
            self.scheduled.update(names if refusal is None else names[:done])
            if appended.columns:
                for place, group, position, block in zip(*appended.grown, strict=True):
                    # of the refused one, too: its window was trimmed
                    self._set(names[place], group, position, block)
            if refusal is None:
                break
            self.missing[names[done]] = refusal.needed
            refused.append(names[done])
            names, tokens = names[done + 1 :], tokens and tokens[done + 1 :]
        return refused

    def _swap_in(self, state: RequestState, request_len: int) -> bool:
        """Bring a request back from the host tier if its next tokens fit as well."""
        request_id, past, manager = state.request_id, state.position_offset, self.manager
        held = self.requests[request_id]
        growth = sum(-(-(past + request_len) // size) - -(-past // size) for size in self._sizes())
        spare = growth + len(self.parts)  # one per group: a shared block may be copied
        others = manager.num_free_blocks < manager.config.num_usable_blocks
        if others and manager.num_free_blocks < held.num_swapped + spare:
            return False
        if held.num_swapped:
            if not manager.swap_in([request_id]):
                return False
            held.num_swapped = 0
            self._read_tables(request_id)
            self.scheduled.add(request_id)
        return True

    def _extend(self, request_id: str, blocks: Iterable[Iterable[int]]) -> None:
        """Append new blocks to a request's tables."""
        self.scheduled.add(request_id)
        for each, new in zip(self.parts, blocks, strict=True):
            each.block_table[request_id] += within(each, new)

    def _set(self, request_id: str, group: int, position: int, block: int) -> None:
        """Put a block at a position of a request's table, or at its end."""
        allocator = self.parts[group]
        n = allocator.blocks_per_sector
        place = slice(position * n, (position + 1) * n)
        allocator.block_table[request_id][place] = within(allocator, [block])

    def _read_tables(self, request_id: str) -> None:
        """Read a request's tables from the manager again."""
        for each, blocks in zip(self.parts, self.manager.get_block_ids(request_id), strict=True):
            each.block_table[request_id] = within(each, blocks)

    def _sizes(self) -> list[int]:
        """Return the block size of each group."""
        return [group.block_size for group in self.manager.config.groups]
