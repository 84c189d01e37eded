# SPDX-License-Identifier: Apache-2.0
"""A small engine that schedules like vLLM, and relies only on the answers of `kvcore.compat`.

A step writes all its cells first, then reads what its queries see. What another engine computed
may come with a request's first step, later, in part or not at all.
"""

from __future__ import annotations

import random

import attrs

from kvcore.compat import BehindWindow, KVCacheBlocks, KVCacheManager
from tests.compat.worker import VOCABULARY, EngineRequest, Worker, answer, next_token


@attrs.frozen
class Chunk:
    """Positions of a request that a step computes; tokens: with drafts."""

    request: EngineRequest
    first: int
    end: int
    tokens: list[int]


class Engine:
    """Continuous batching with chunked prefill, preemption, drafts, and loads that may fail."""

    def __init__(self, manager: KVCacheManager, *, budget: int, dice: random.Random) -> None:
        self.manager = manager
        self.worker = Worker(manager.config)
        self.budget = budget
        self.dice = dice
        self.waiting: list[EngineRequest] = []
        self.loading: list[EngineRequest] = []
        self.running: list[EngineRequest] = []
        self.done: list[EngineRequest] = []
        self.happened: set[str] = set()
        self.num_preempted = 0
        self._lost: dict[str, int] = {}

    def step(self) -> None:
        """Schedule, compute, sample."""
        chunks = self._schedule()
        wrong = self._compute(chunks)
        for chunk in chunks:
            if chunk.request not in wrong:
                self._sample(chunk)
        self._count_what_is_there()

    def abort(self, request: EngineRequest) -> None:
        """Drop a request wherever it is."""
        self._drop(request, "FINISHED_ABORTED")
        self.happened.add("abort")

    def _drop(self, request: EngineRequest, status: str) -> None:
        for queue in (self.waiting, self.loading, self.running):
            if request in queue:
                queue.remove(request)
        request.status = status
        self.manager.free(request)

    def _compute(self, chunks: list[Chunk]) -> list[EngineRequest]:
        """Write, then read. Returns the requests that read what a failed load left."""
        for chunk in chunks:
            first = chunk.first
            self.worker.write(chunk.request, chunk.tokens, first, chunk.end, query=first)
        wrong = [
            chunk.request
            for chunk in chunks
            if not self.worker.is_right(chunk.request, chunk.tokens, chunk.first, chunk.end)
        ]
        assert self._lost or not wrong, f"{wrong} read what was never written for them"
        return wrong

    def _schedule(self) -> list[Chunk]:
        self.manager.new_step_starts()
        self._finish_loads()
        chunks: dict[str, Chunk] = {}
        num_preempted = self.num_preempted
        for request in list(self.running):
            count = request.num_tokens + self._num_ahead(request) - request.num_computed_tokens
            count = min(count, self._budget_left(chunks))
            if request not in self.running or count <= 0:
                continue
            got = self._allocate(request, count)
            while got is None and request in self.running:
                # As under a priority policy: the victim may be scheduled in this step already.
                victim = self.dice.choice(self.running)
                self._preempt(victim, was_scheduled=chunks.pop(victim.request_id, None) is not None)
                got = self._allocate(request, count) if request in self.running else None
            if got is not None:
                self._grow(request, got.get_block_ids())
                chunks[request.request_id] = self._chunk(request, count)
        if num_preempted == self.num_preempted:
            self._admit(chunks)
        for chunk in chunks.values():
            chunk.request.num_computed_tokens = chunk.end
        return list(chunks.values())

    def _num_ahead(self, request: EngineRequest) -> int:
        """Count the tokens to come that can be scheduled."""
        return len(request.spec_token_ids)

    def _budget_left(self, chunks: dict[str, Chunk]) -> int:
        return self.budget - sum(chunk.end - chunk.first for chunk in chunks.values())

    def _allocate(self, request: EngineRequest, count: int) -> KVCacheBlocks | None:
        """Allocate slots for a running request, from its start if its window is gone."""
        try:
            return self.manager.allocate_slots(request, count, num_lookahead_tokens=1)
        except BehindWindow:
            self.happened.add("behind the window")
            return None

    def _admit(self, chunks: dict[str, Chunk]) -> None:
        while self.waiting and (budget := self._budget_left(chunks)) > 0:
            request = self.waiting[0]
            blocks, num_hit = self.manager.get_computed_blocks(request)
            if num_hit:
                self.happened.add("hit")
            external, load_later = self._remote(request, num_hit)
            count = 0 if load_later else min(budget, request.num_tokens - num_hit - external)
            got = self.manager.allocate_slots(
                *(request, count, num_hit, blocks, 1, external),
                delay_cache_blocks=load_later,
                full_sequence_must_fit=True,
            )
            if got is None:
                return
            request = self.waiting.pop(0)
            request.num_computed_tokens = num_hit + external
            ids = self.manager.get_block_ids(request.request_id)
            self.worker.tables[request.request_id] = [list(table) for table in ids]
            self._load(request, num_hit, num_hit + external)
            if load_later:
                self.loading.append(request)
                continue
            request.status = "RUNNING"
            self.running.append(request)
            chunks[request.request_id] = self._chunk(request, count)

    def _chunk(self, request: EngineRequest, count: int) -> Chunk:
        first = request.num_computed_tokens
        tokens = request.all_token_ids + request.spec_token_ids
        return Chunk(request, first, first + count, tokens)

    def _grow(self, request: EngineRequest, ids: tuple[list[int], ...]) -> None:
        for table, new in zip(self.worker.tables[request.request_id], ids, strict=True):
            table += new

    def _preempt(self, request: EngineRequest, *, was_scheduled: bool) -> None:
        self.running.remove(request)
        self.manager.free(request)
        request.status, request.num_computed_tokens = "PREEMPTED", 0
        request.spec_token_ids = []
        self.num_preempted += 1
        self.waiting.insert(0, request)
        self.happened.add("preemption in mid-step" if was_scheduled else "preemption")

    def _remote(self, request: EngineRequest, num_hit: int) -> tuple[int, bool]:
        """Return the tokens that another engine has, and whether they come later."""
        most = request.num_tokens - num_hit
        match self.dice.randrange(4):
            case 0 if most > 1:
                return self.dice.randrange(1, most), False
            case 1 if most > 0:
                return self.dice.randint(1, most), True
        return 0, False

    def _load(self, request: EngineRequest, first: int, end: int) -> None:
        """Load external tokens, all of them or up to a failure."""
        if end > first and self.dice.randrange(3) == 0:
            self._lost[request.request_id] = end = self.dice.randrange(first, end)
        query = min(request.num_computed_tokens, request.num_tokens - 1)
        self.worker.write(request, request.all_token_ids, first, end, query=query)

    def _count_what_is_there(self) -> None:
        """Lower the counts of all requests that count tokens that a failed load did not bring."""
        for request in self.running + self.loading if self._lost else []:
            num_right = self.worker.num_right(request, request.num_computed_tokens)
            if num_right < request.num_computed_tokens:
                request.num_computed_tokens = num_right
                request.spec_token_ids = []
                self.happened.add("failed load")
        self._lost.clear()

    def _finish_loads(self) -> None:
        for request in list(self.loading):
            if self.dice.randrange(2):
                continue
            self.loading.remove(request)
            if request.num_computed_tokens == 0:
                self.manager.free(request)
                self.waiting.append(request)
                continue
            self.manager.cache_blocks(request, request.num_computed_tokens)
            if request.num_computed_tokens == request.num_tokens:
                request.num_computed_tokens -= 1
                self.happened.add("whole load")
            request.status = "RUNNING"
            self.running.append(request)

    def _sample(self, chunk: Chunk) -> None:
        """Take the model's tokens: those that repeat the drafts, and one more."""
        request, drafts = chunk.request, chunk.tokens[chunk.request.num_tokens : chunk.end]
        if chunk.end < request.num_tokens:
            return
        new = [next_token(request.all_token_ids)]
        while len(new) <= len(drafts) and drafts[len(new) - 1] == new[-1]:
            new.append(next_token(request.all_token_ids + new))
        rejected = len(drafts) - (len(new) - 1)
        if rejected:
            self.happened.add("rejection")
        if len(new) > 1:
            self.happened.add("acceptance")
        request.num_computed_tokens -= rejected
        request.output += new[: request.max_tokens - len(request.output)]
        if len(request.output) == request.max_tokens:
            self._drop(request, "FINISHED_LENGTH_CAPPED")
            self.done.append(request)
            return
        self._propose(request)

    def _propose(self, request: EngineRequest) -> None:
        """Guess the next tokens, mostly right."""
        right = answer(request.all_token_ids, self.dice.randrange(4))
        request.spec_token_ids = [
            token if self.dice.randrange(4) else self.dice.randrange(VOCABULARY) for token in right
        ]
