# SPDX-License-Identifier: Apache-2.0
"""The KVCacheManager that vLLM's schedulers and connectors call, over `kvcore.compat`.

A step ends with `take_new_block_ids`, the last call of each schedule. Tokens that are allocated
outside of a step count as computed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from vllm.v1.metrics.stats import PrefixCacheStats
from vllm.v1.request import RequestStatus

from kvcore.compat import KVCacheManager as Compat
from kvcore.record.recorder import record_if_requested
from kvcore_vllm.blocks import Block, BlockPool, Blocks, Tables
from kvcore_vllm.coordinator import Coordinator
from kvcore_vllm.events import Events
from kvcore_vllm.groups import check_lookahead, check_options, has_parts, read_config, read_spec
from kvcore_vllm.parts import Parts
from kvcore_vllm.queries import Queries
from kvcore_vllm.retention import SPARSE, Retention
from kvcore_vllm.states import States
from kvcore_vllm.windows import Windows
from kvcore_vllm.zeroing import Zeroing

ADMITTED = (RequestStatus.WAITING, RequestStatus.PREEMPTED)


class KVCacheManager(Queries):
    """vLLM's manager under its names. Raises NotServed for what kvcore does not support.

    num_withdrawn: blocks that lost their keys because their request left the step that was to write
    them. vLLM leaves them findable.
    """

    def __init__(
        self,
        kv_cache_config: Any,
        max_model_len: int,
        scheduler_block_size: int,
        hash_block_size: int,
        max_in_flight_tokens: int | None = None,
        enable_caching: bool = True,
        use_eagle: bool = False,
        num_hash_lookahead_tokens: int = 0,
        num_prefill_lookahead: int = 0,
        log_stats: bool = False,
        enable_kv_cache_events: bool = False,
        dcp_world_size: int = 1,
        watermark: float = 0.0,
        enable_mamba_shared_prefix_checkpoint: bool = False,
        **options: Any,
    ) -> None:
        check_options(options)
        config = read_config(
            kv_cache_config,
            max_model_len=max_model_len,
            max_in_flight_tokens=max_in_flight_tokens,
            scheduler_block_size=scheduler_block_size,
            hash_block_size=hash_block_size,
            enable_caching=enable_caching,
            enable_events=enable_kv_cache_events,
            use_eagle=use_eagle,
            dcp_world_size=dcp_world_size,
        )
        if enable_caching and use_eagle:
            check_lookahead(num_prefill_lookahead, scheduler_block_size)
        compat = Compat(  # states.py and parts.py read tables again, and put them in vLLM's form
            config, log_stats=False, keep_tokens=False, ends_steps=True, reads_tables=True
        )
        record_if_requested(compat.core)
        self.compat, self.kv_cache_config = compat, kv_cache_config
        self.max_model_len, self.enable_caching = max_model_len, enable_caching
        specs = [read_spec(group) for group in kv_cache_config.kv_cache_groups]
        # As in vLLM not with several groups and hashes that cover the tokens behind a block.
        again = use_eagle or len(config.groups) == 1
        self._num_prefilled_again = max(0, num_prefill_lookahead - 1) if again else 0
        self._states = States(compat) if config.has_states else None
        self.parts = None
        self._allocate: Any = compat.allocate_slots
        self.mamba_shared_prefix_checkpoint = False
        if self._states is not None and has_parts(kv_cache_config, config, dcp_world_size):
            keeps = enable_mamba_shared_prefix_checkpoint
            self._serve_parts(self._states, use_eagle, num_hash_lookahead_tokens, keeps)
        self.num_withdrawn, self._in_step = 0, False
        self.watermark_blocks = int(watermark * config.num_blocks)
        lookahead = num_hash_lookahead_tokens
        self.events = Events(compat, specs, lookahead) if enable_kv_cache_events else None
        self._show(log_stats, hash_block_size, specs)
        self._windows = Windows(compat) if config.has_windows else None
        self._retain(scheduler_block_size, drops=use_eagle)
        self._zeroing = Zeroing(specs, wanted=kv_cache_config.needs_kv_cache_zeroing)
        self._loading = set[str]()  # requests of the last step that load
        if self.events is None and not (self._is_late or self._retention):
            vars(self)["cache_blocks"] = compat.cache_blocks  # called for each request of a step

    def _show(self, log_stats: bool, hash_block_size: int, specs: list[Any]) -> None:
        """Set what vLLM's scheduler reads besides the methods."""
        self.log_stats = log_stats
        self.prefix_cache_stats = PrefixCacheStats() if log_stats else None
        self.num_kv_cache_groups = len(specs)
        self.block_pool = BlockPool(self, hash_block_size)
        self.coordinator = Coordinator(self, specs)
        self.empty_kv_cache_blocks = Blocks(((),) * len(specs), self.block_pool.block)

    def _retain(self, block_size: int, *, drops: bool) -> None:
        """Keep what vLLM keeps of windows and states. drops: whether look-ups drop a block."""
        self._retention = None
        if self.enable_caching and any(each.kind in SPARSE for each in self.compat.config.groups):
            self._retention = Retention(
                *(self.compat, self.coordinator, self.kv_cache_config.kv_cache_groups),
                block_size=block_size,
                drops=drops,
                num_again=self._num_prefilled_again,
            )
        limits = self._retention is not None and self._retention.limits
        self._is_late = limits or self._num_prefilled_again > 0

    def _serve_parts(self, states: States, use_eagle: bool, lookahead: int, keeps: bool) -> None:
        """Serve hits inside blocks. lookahead: tokens that a block's hash covers after it. keeps:
        whether states are kept where prompts part, if EAGLE reads a group.
        """
        groups = self.kv_cache_config.kv_cache_groups
        flagged = use_eagle or any(group.is_eagle_group for group in groups)
        keeps = keeps and flagged and not self._num_prefilled_again
        self.mamba_shared_prefix_checkpoint = keeps
        self.parts = Parts(
            self.compat, states, drops=use_eagle, num_lookahead=lookahead, keeps_junctions=keeps
        )
        self._allocate = self.parts.allocate_slots

    # Look-ups.

    def get_computed_blocks(
        self, request: Any, max_cache_hit_length: int | None = None
    ) -> tuple[Blocks, int, int]:
        """Return the longest hit, its number of tokens, and where what others computed ends.

        The last is 0 if no state is missing there.
        """
        if not self.prefix_cache_lookup_enabled(request):
            return self.empty_kv_cache_blocks, 0, 0
        ids: Tables
        longest = request.num_tokens - 1
        most = longest if max_cache_hit_length is None else min(max_cache_hit_length, longest)
        if most == longest and not self.coordinator.num_dropped:
            found, num_tokens = self.compat.get_computed_blocks(request)
            ids = found.blocks
            hit = self.compat.last_hit
        else:
            hit = self.coordinator.look_up(request.block_hashes, most)
            ids, num_tokens = hit.blocks.blocks, hit.num_tokens
        if self.events is not None:
            self.events.report_hit(request, ids)
        junction = 0
        if self._states is not None and hit is not None:
            junction = self._states.junction(request, hit)
        elif self._retention is not None:
            junction = self._retention.junction(request, num_tokens, most)
        return self._result(self.shown(ids)), num_tokens, junction

    def get_computed_blocks_for_connector(
        self, request: Any, max_cache_hit_length: int | None = None
    ) -> tuple[Blocks, int, int, bool]:
        """Return the same, and False: hits never differ between groups."""
        return *self.get_computed_blocks(request, max_cache_hit_length), False

    # Allocation.

    def allocate_slots(
        self,
        request: Any,
        num_new_tokens: int,
        num_new_computed_tokens: int = 0,
        new_computed_blocks: Any = None,
        num_lookahead_tokens: int = 0,
        num_external_computed_tokens: int = 0,
        delay_cache_blocks: bool = False,
        num_encoder_tokens: int = 0,
        full_sequence_must_fit: bool = False,
        reserved_blocks: int = 0,
        has_scheduled_reqs: bool = True,
        skip_zeroing_group_ids: Sequence[int] = (),
    ) -> Blocks | None:
        """Allocate slots for new tokens. Returns the new blocks, or None if they do not fit."""
        if self.waits_for_state(request):
            return None
        hit = new_computed_blocks
        kept = self._kept_free(request) if has_scheduled_reqs else 0
        if kept and full_sequence_must_fit:
            needed = self.coordinator.num_needed_by_whole(request, hit, num_encoder_tokens)
            if needed + kept > self.block_pool.get_num_free_blocks():
                return None
        num_local = request.num_computed_tokens + num_new_computed_tokens
        computed = num_local + num_external_computed_tokens
        end = computed + num_new_tokens
        if self.compat.max_model_len is None:
            num_lookahead_tokens = max(0, min(num_lookahead_tokens, self.max_model_len - end))
        if self._windows is not None:
            self._windows.hold(request.request_id, computed, request.num_in_flight_tokens)
        got = self._allocate(
            request,
            num_new_tokens,
            num_new_computed_tokens,
            None if hit is None else self.compat.create_kv_cache_blocks(self.numbers(hit)),
            num_lookahead_tokens,
            num_external_computed_tokens,
            delay_cache_blocks or self._is_late,
            num_encoder_tokens,
            full_sequence_must_fit,
            reserved_blocks=reserved_blocks + kept,
        )
        writes = got is not None and not delay_cache_blocks
        if writes and self._is_late:
            self._publish(request, min(end, request.num_tokens))
        if writes and self._retention is not None:
            writes = self._retention.note(request, num_local, end)
        self._note_end(request, end, writes=writes)
        if got is None:
            return None
        if got is self.compat.empty_kv_cache_blocks and not num_external_computed_tokens:
            return self.empty_kv_cache_blocks
        self._note_new(request, got.blocks, num_external_computed_tokens, skip_zeroing_group_ids)
        if num_external_computed_tokens and not delay_cache_blocks:
            self._loading.add(request.request_id)
        if self._states is None:
            return self._result(got.blocks)
        return self._result(self._states.with_nulls(got.blocks, computed, end))

    def waits_for_state(self, request: Any) -> bool:
        """Return whether a request's hit is longer once this step has written a state."""
        return self._states is not None and self._states.waits(request.request_id)

    def cache_blocks(self, request: Any, num_computed_tokens: int) -> None:
        """Publish a request's full blocks up to a token count."""
        self._publish(request, num_computed_tokens)
        if self._retention is not None:
            self._retention.note(request, 0, num_computed_tokens)
        if self.events is not None:
            self.events.collect(request)

    # Giving back.

    def free(self, request: Any) -> None:
        """Give back a request's blocks, tail first."""
        tables = self._let_go(request)
        held = [[each for each in table if each != 0] for table in tables]
        core = self.compat.core
        # The core puts each at the front of the free queue in turn; vLLM keeps their order.
        core.unpin([each for table in held for each in table if not core.has_key(each)])
        core.unpin([each for table in held for each in reversed(table) if core.has_key(each)])

    def pop_blocks_for_free(self, request: Any) -> list[Block]:
        """Forget a request's tables, and hold its blocks until `block_pool.free_blocks`."""
        ids = [each for table in self._let_go(request) for each in table]
        return (
            [self.block_pool.block(each) for each in ids]
            if self.parts is None
            else [self.parts.held(each) for each in ids]
        )

    def remove_skipped_blocks(
        self, request_id: str, processed_computed_tokens: int, num_prompt_tokens: int | None = None
    ) -> None:
        """Give back the blocks that no query from this count on sees."""
        del num_prompt_tokens  # only for a kind of window that is not served
        if self._windows is not None:
            self.compat.remove_skipped_blocks(request_id, processed_computed_tokens)
            self._windows.release(request_id, processed_computed_tokens)

    def evict_blocks(self, block_ids: Iterable[int]) -> None:
        """Forget the keys of blocks."""
        number = (lambda each: each) if self.parts is None else self.parts.number
        self.compat.evict_blocks([number(each) for each in block_ids])

    def reset_prefix_cache(self) -> bool:
        """Forget every key. Returns False, and changes nothing, while any block is in use."""
        done = self.compat.reset_prefix_cache()
        if done and self.prefix_cache_stats is not None:
            self.prefix_cache_stats.reset = True
        return done

    # Each step.

    def new_step_starts(self) -> None:
        """Begin a step, whose schedule follows."""
        self._end_step()
        self.compat.new_step_starts()
        if self._states is not None:
            self._states.begin_step()
        self._loading.clear()
        self._in_step = True

    def take_new_block_ids(self) -> list[int]:
        """Return the blocks to zero, and end the step: what it scheduled counts as computed."""
        self._end_step()
        self._in_step = False
        return self._zeroing.take()

    def record_blocks_for_zeroing(self, request_id: str, start_token: int) -> None:
        """Have a request's blocks zeroed from a token on: a failed load left them unwritten."""
        pairs = zip(self.get_block_ids(request_id), self.compat.config.groups, strict=True)
        self._zeroing.note([table[start_token // group.block_size :] for table, group in pairs])

    def take_events(self) -> list[Any]:
        """Return the events since the last call."""
        return [] if self.events is None else self.events.annotated()

    def take_kv_cache_block_copies(self) -> tuple[list[Any], list[Any]]:
        """Return the copies for hits inside blocks, and the blocks that are held until they are
        over. The worker copies states to other positions by itself.
        """
        return ([], []) if self.parts is None else self.parts.take_copies()

    def take_boundary_state_offloads(self) -> dict[str, Any]:
        """Return no offloads: only connectors take them, which are not served beside states."""
        return {}

    def finalize_partial_tail_offloads(self, request: Any) -> list[Any]:
        """Return the state of the prompt's last hash if the request has computed no more."""
        return [] if self.parts is None else self.parts.take_end(request)

    def _note_end(self, request: Any, end: int, *, writes: bool) -> None:
        """Note that a call has ended: the step, if the call is outside of one, and its events.

        writes: whether the step writes the request's state after `end` tokens.
        """
        if not self._in_step:
            self._end_step()
            if self._states is not None:
                self._states.begin_step()
        elif self._states is not None and writes:
            self._states.note_end(request, end)
        if self.events is not None:
            self.events.collect(request)

    def _note_new(
        self, request: Any, blocks: Tables, num_loaded: int, skipped_groups: Sequence[int]
    ) -> None:
        """Note the blocks to zero: the new ones, or the whole tables if tokens are loaded, except
        in groups whose loads fill them.
        """
        if num_loaded:
            self._zeroing.note(self.get_block_ids(request.request_id), skipped_groups)
        else:
            self._zeroing.note(blocks)

    def _kept_free(self, request: Any) -> int:
        """Return how many blocks stay free when a request is admitted beside others."""
        return self.watermark_blocks if request.status in ADMITTED else 0

    def _publish(self, request: Any, num_tokens: int) -> None:
        """Publish full blocks, except those with tokens that the next chunk writes again, and
        those behind all hits.
        """
        end = max(0, num_tokens - self._num_prefilled_again)
        if self._retention is not None and self._retention.limits:
            end = self._retention.limit(end)
        self.compat.cache_blocks(request, end)

    def _end_step(self) -> None:
        """Note that what the step scheduled counts as computed."""
        self.compat.step_ends()
        if self._retention is not None:
            self._retention.end_step()

    def _confirm_loads(self, request: Any) -> None:
        """Tell the core that the loads of a step are over if the step's output has arrived."""
        over = not (self._in_step or request.num_in_flight_tokens)
        if over and request.request_id in self._loading:
            self.compat.core.take_batch()
            self._loading.clear()

    def _let_go(self, request: Any) -> Tables:
        """Free a request but pin its blocks. Returns its tables."""
        self._confirm_loads(request)
        if self._in_step and self.compat.is_step_over:
            self._end_step()
        core = self.compat.core
        tables = self.tables(request.request_id)
        if self.parts is not None:
            self.parts.forget(request)
        held = [each for table in tables for each in table if each != 0]
        num_found = sum(map(core.has_key, held))
        core.pin(held)
        if self._windows is not None:
            core.unpin(self._windows.pop(request.request_id))
        self.compat.free(request)
        if self._retention is not None:
            self._retention.forget(request.request_id)
        self.num_withdrawn += num_found - sum(map(core.has_key, held))
        if self.events is not None:
            self.events.collect(request)
        return tables
