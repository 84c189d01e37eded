# SPDX-License-Identifier: Apache-2.0
"""kvcore behind transformers' own cache: it gets the same calls, and only its answers are compared.

transformers' cache and schedulers decide. Calls for decoding requests reach kvcore once a step has
them all, other calls at once. If kvcore finds more tokens, that is counted and is not a difference;
kvcore follows the engine, which computes them. The first call in which kvcore finds fewer tokens,
refuses what transformers grants, or raises is reported with both answers and what both sides hold;
from then on kvcore gets no more calls. With KVCORE_SHADOW_EVERY=n, only the answers of every n-th
step are compared. The clock is read in one of STEPS_PER_TIMED steps, since reading it takes as long
as a small call.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from time import perf_counter_ns
from typing import Any, ClassVar

from transformers.generation.continuous_batching.cache import PagedAttentionCache
from transformers.generation.continuous_batching.requests import RequestState, RequestStatus
from transformers.generation.continuous_batching.utils import logger

from kvcore import CopyOnWrite, Evict
from kvcore.compat.shadow_steps import stopped
from kvcore_transformers.allocators import group_of
from kvcore_transformers.cache import Held, KvcoreCache
from kvcore_transformers.statistics import Statistics

STEPS_PER_TIMED = 16
DECODING = RequestStatus.DECODING
can_store = PagedAttentionCache.can_store_request_tokens
"""Looked up once, since every token of a step makes this call."""


class Behind(KvcoreCache):
    """The decisions of `KvcoreCache` without tensors, block tables, copies and a host tier.

    A request that transformers moves to the host is forgotten, and looked up again when it returns.
    """

    def __init__(self, own: PagedAttentionCache) -> None:
        # PagedAttentionCache.__init__ would make the tensor.
        self.num_sectors, self.use_prefix_sharing = own.num_sectors, own.allow_block_sharing
        allocators = own.cache_allocators.values()
        self.engine_shares = own.use_prefix_sharing
        self.begin([])
        self.manager = self.make_manager(tuple(map(group_of, allocators)))
        self.total, self.statistics = self.statistics, Statistics()
        self.num_hits = self.num_evictions = 0

    def search_as(self, request_id: str, prompt_ids: list[int], found: int) -> int:
        """Take at most what the engine found. Returns the number of tokens, which can be less."""
        hit = self.search_prefix_match(request_id, prompt_ids[: found + 1]) if found else 0
        self._count(hit, len(prompt_ids) if found else 0)
        return hit

    def store_as(self, state: RequestState, request_len: int, granted: bool) -> bool:
        """Schedule the next tokens of a request if the engine does.

        A prompt is looked up with each of its chunks, up to the end of the chunk, so that kvcore
        holds no more than the engine. If the engine never shares, the prompt is looked up once.
        """
        name, past = state.request_id, state.position_offset
        is_new, is_prompt = name not in self.requests, state.status != DECODING
        if granted and (is_new or (self.engine_shares and is_prompt and request_len > 1)):
            tokens = state.initial_tokens + state.generated_tokens
            self.free_blocks(name)
            reach = past + request_len + 1 if self.engine_shares else None
            hit = self.search_prefix_match(name, tokens[:reach])
            is_compared = is_new and not state.is_cpu_offloaded
            self._count(max(0, hit - past), len(tokens) if is_compared else 0)
        return granted and self.can_store_request_tokens(state, request_len)

    def close_batch(self) -> None:
        """Take the open batch; there is nothing to copy."""
        batch = self.manager.take_batch()
        self.renew()
        self.scheduled.clear()
        if len(batch):
            kinds = batch.column("kind").tolist()
            self.num_evictions += kinds.count(Evict.kind)
            self.total.evictions += kinds.count(Evict.kind)
            self.total.copies += kinds.count(CopyOnWrite.kind)

    def _extend(self, request_id: str, blocks: Iterable[Iterable[int]]) -> None:
        """Note that a request got blocks."""
        del blocks
        self.scheduled.add(request_id)

    def _set(self, request_id: str, group: int, position: int, block: int) -> None:
        """Do nothing: `decode` notes that the request got a slot."""

    def _count(self, num_hits: int, num_queries: int) -> None:
        """Count the tokens that were found, and those that were looked up for the first time."""
        self.num_hits += num_hits
        self.total.hits += num_hits
        self.total.queries += num_queries

    def show(self, request_id: str) -> str:
        """Describe what is free and what a request holds, in sectors."""
        manager, known = self.manager, request_id in self.requests
        held = [len(ids) for ids in manager.get_block_ids(request_id)] if known else []
        usable = manager.config.num_usable_blocks
        return f"{manager.num_free_blocks} of {usable} sectors free, {held} held by the request"

    def _swap_in(self, state: RequestState, request_len: int) -> bool:
        """Return True: the request was forgotten, so there is nothing to bring back."""
        del state, request_len
        return True


class Shadow:
    """What the two caches did. It holds no reference to transformers' cache, and outlives it.

    kvcore: None if it could not be made. difference: the report of the first difference, None
    before. num_refused: calls in which transformers had no room. nanoseconds: time in each cache
    and in comparing, over the num_timed steps that were timed. known: requests of kvcore, none once
    it gets no more calls. later: requests that were granted a token, which kvcore has not seen yet.
    """

    def __init__(self, own: ShadowCache, every: int) -> None:
        self.every = every
        self.kvcore: Behind | None = None
        self.difference: str | None = None
        self.num_calls = self.num_steps = self.num_refused = 0
        self.hits = self.evictions = 0
        self.nanoseconds = {"transformers": 0, "kvcore": 0, "comparing": 0}
        self.clock: Callable[[], int] = perf_counter_ns
        self.num_timed = 1
        self.known: Mapping[str, Held] = {}
        self.later: list[RequestState] = []
        self.note = self.later.append
        self._started = perf_counter_ns()
        try:
            self.kvcore = Behind(own)
            self.known = self.kvcore.requests
        except Exception as error:  # whatever it is, transformers' cache goes on
            self.part(own, "__init__", "", None, error)

    @property
    def hit_tokens(self) -> dict[str, int]:
        """Number of tokens that each found."""
        return {"transformers": self.hits, "kvcore": self.kvcore.num_hits if self.kvcore else 0}

    @property
    def num_evictions(self) -> dict[str, int]:
        """Number of blocks that each evicted."""
        ours = self.kvcore.num_evictions if self.kvcore else 0
        return {"transformers": self.evictions, "kvcore": ours}

    def compare_call(
        self,
        own: ShadowCache,
        name: str,
        request_id: str,
        mine: Callable[[], Any],
        theirs: Callable[[Behind, Any], Any],
        same: Callable[[Any, Any], bool] | None = None,
    ) -> Any:
        """Return transformers' answer, compared with kvcore's by `same` if it is given."""
        if self.later:
            self.catch_up(own)
        clock = self.clock
        started = clock()
        answer = mine()
        clock_start = clock()
        self.nanoseconds["transformers"] += clock_start - started
        if self.difference is not None or self.kvcore is None:
            return answer
        self.num_calls += 1
        try:
            other = theirs(self.kvcore, answer)
            answered = clock()
            self.nanoseconds["kvcore"] += answered - clock_start
            if same and self.num_steps % self.every == 0 and not same(other, answer):
                self.part(own, name, request_id, answer, other)
            self.nanoseconds["comparing"] += clock() - answered
        except Exception as error:  # whatever it is, transformers' answer stands
            self.part(own, name, request_id, answer, error)
        return answer

    def catch_up(self, own: ShadowCache) -> None:
        """Make the calls for decoding requests to kvcore, all at once, and compare the answers."""
        states, self.later[:] = self.later[:], []
        self.num_calls += len(states)
        call, first = "can_store_request_tokens", states[0].request_id
        try:
            started = self.clock()
            answers = self.kvcore.decode(states) if self.kvcore else {}
            self.nanoseconds["kvcore"] += self.clock() - started
            refused = [name for name, got in answers.items() if not got]
            if refused and self.num_steps % self.every == 0:
                self.part(own, call, refused[0], True, False)
        except Exception as error:  # whatever it is, transformers' answers stand
            self.part(own, call, first, True, error)

    def step(self) -> None:
        """Count a planned step, and choose whether the next one is timed."""
        self.num_steps += 1
        is_timed = self.num_steps % STEPS_PER_TIMED == 0
        self.clock = perf_counter_ns if is_timed else stopped
        self.num_timed += is_timed

    def part(self, own: ShadowCache, name: str, request_id: str, mine: Any, theirs: Any) -> None:
        """Report a difference, and make no more calls to kvcore."""
        self.known = {}
        held = [len(each.block_table.get(request_id, ())) for each in own.cache_allocators.values()]
        free = own.compute_free_capacity(relative=False) / own.bytes_per_sector
        sides = [f"{free:g} of {own.num_sectors} sectors free, {held} blocks held by the request"]
        try:
            sides.append("it was not made" if self.kvcore is None else self.kvcore.show(request_id))
        except Exception as error:  # this is an error of kvcore too
            sides.append(f"it cannot tell what it holds: {error!r}")
        of_call = f"{name} of request {request_id!r}" if request_id else name
        self.difference = (
            f"kvcore parts from transformers' cache in call {self.num_calls}, step "
            f"{self.num_steps}: {of_call} gave {mine!r} with transformers ({sides[0]}) and "
            f"{theirs!r} with kvcore ({sides[1]})"
        )
        logger.error(self.difference)

    def report(self) -> str:
        """Log the counts as a warning, so that transformers shows them. Returns the text."""
        whole = max(1, perf_counter_ns() - self._started)
        scale = max(1, self.num_steps) / self.num_timed / 1e9
        own, kvcore, comparing = (each * scale for each in self.nanoseconds.values())
        text = (
            f"kvcore in the shadow of transformers' cache: {self.num_calls} calls in "
            f"{self.num_steps} steps, {'parted' if self.difference else 'no difference'}, "
            f"{self.num_refused} calls refused by transformers; transformers and kvcore: "
            f"{' and '.join(map(str, self.hit_tokens.values()))} hit tokens, "
            f"{' and '.join(map(str, self.num_evictions.values()))} evictions, "
            f"{own:.3f} and {kvcore:.3f} s in the cache (of {self.num_timed} steps that were "
            f"timed, times {scale * 1e9:.1f}); comparing took {comparing:.3f} s, "
            f"{100e9 * comparing / whole:.1f} % of the time"
        )
        logger.warning(text)
        return text


class ShadowCache(PagedAttentionCache):
    """transformers' own cache with kvcore behind it. The report is logged when it is dropped."""

    called: ClassVar[str] = "kvcore's shadow"
    every: ClassVar[int] = 1

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.shadow = Shadow(self, self.every)
        weakref.finalize(self, self.shadow.report)  # at the latest when Python exits

    def search_prefix_match(self, request_id: str, prompt_ids: list[int]) -> int:
        """Return transformers' hit; kvcore's must have at least as many tokens."""
        call = partial(super().search_prefix_match, request_id, prompt_ids)

        def theirs(kvcore: Behind, found: int) -> int:
            return kvcore.search_as(request_id, prompt_ids, found)

        shadow = self.shadow
        found: int = shadow.compare_call(
            self, "search_prefix_match", request_id, call, theirs, operator.ge
        )
        shadow.hits += found if shadow.difference is None else 0
        return found

    def can_store_request_tokens(
        self, state: RequestState, request_len: int, dry_run: bool = False
    ) -> bool:
        """Return transformers' answer; kvcore schedules what was granted, except in a dry run."""
        shadow = self.shadow
        if not dry_run and state._status is DECODING and state.request_id in shadow.known:
            if (clock := shadow.clock) is stopped:
                is_granted: bool = can_store(self, state, request_len)
            else:
                started = clock()
                is_granted = can_store(self, state, request_len)
                shadow.nanoseconds["transformers"] += clock() - started
            if is_granted:
                shadow.note(state)
            else:
                shadow.num_refused += 1
            return is_granted
        call = partial(can_store, self, state, request_len, dry_run)
        if dry_run:
            return bool(call())

        def theirs(kvcore: Behind, granted: bool) -> bool:
            shadow.num_refused += not granted
            return kvcore.store_as(state, request_len, granted)

        name = "can_store_request_tokens"
        return bool(shadow.compare_call(self, name, state.request_id, call, theirs, operator.ge))

    def free_blocks(self, request_id: str, no_cache: bool = False) -> None:
        """Forget a request in both."""
        call = partial(super().free_blocks, request_id, no_cache)
        self.shadow.compare_call(
            self, "free_blocks", request_id, call, lambda kvcore, _: kvcore.free_blocks(request_id)
        )

    def free_all_requests(self, clear_ledgers: bool = False) -> None:
        """Forget all requests in both, and with clear_ledgers the cached content too."""
        call = partial(super().free_all_requests, clear_ledgers)
        self.shadow.compare_call(
            self,
            "free_all_requests",
            "",
            call,
            lambda kvcore, _: kvcore.free_all_requests(clear_ledgers),
        )

    def prepare_fork_request(
        self, src_state: RequestState, dst_req_ids: list[str], copy_src_and_dst: Any
    ) -> list[str]:
        """Return transformers' children, which kvcore forks too."""
        call = partial(super().prepare_fork_request, src_state, dst_req_ids, copy_src_and_dst)
        forked: list[str] = self.shadow.compare_call(
            self,
            "prepare_fork_request",
            src_state.request_id,
            call,
            lambda kvcore, forked: kvcore.prepare_fork_request(src_state, forked, None),
        )
        return forked

    def evict_cached_blocks(self) -> bool:
        """Let transformers evict; kvcore evicts when it needs a block."""
        before = self._num_free()
        evicted = bool(super().evict_cached_blocks())
        if self.shadow.difference is None:
            self.shadow.evictions += self._num_free() - before
        return evicted

    def extend_read_and_write_indices(self, *args: Any) -> None:
        """Append transformers' indices; the first call of a step closes kvcore's batch."""
        self.close_batch()
        super().extend_read_and_write_indices(*args)

    def fill_block_table(self, *args: Any) -> None:
        """Fill in transformers' table; the first call of a step closes kvcore's batch."""
        self.close_batch()
        super().fill_block_table(*args)

    def report(self) -> str:
        """Log the counts so far, and return the text."""
        return self.shadow.report()

    def close_batch(self) -> None:
        """Close kvcore's batch if it is not empty: the step has been planned."""
        shadow, kvcore = self.shadow, self.shadow.kvcore
        if kvcore and shadow.difference is None and (kvcore.scheduled or shadow.later):
            shadow.compare_call(
                self, "close_batch", "", lambda: None, lambda ours, _: ours.close_batch()
            )
            shadow.step()

    def _num_free(self) -> int:
        """Return the number of free blocks of all allocators."""
        return sum(self.pool.count_free_blocks(a.index) for a in self.cache_allocators.values())
