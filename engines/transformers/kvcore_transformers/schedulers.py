# SPDX-License-Identifier: Apache-2.0
"""transformers' schedulers without the decisions that end or block a generation."""

from __future__ import annotations

from typing import Any

from transformers.generation.continuous_batching.requests import RequestState, RequestStatus
from transformers.generation.continuous_batching.scheduler import (
    FIFOScheduler,
    PrefillFirstScheduler,
    Scheduler,
)


class _Mended(Scheduler):
    """What both schedulers do differently from transformers' own."""

    def add_waiting_request(self, state: RequestState) -> None:
        """Queue a request. Raises ValueError, which fails that request alone.

        In transformers, a second request with an id in use mixes the blocks of both, and a
        prompt without tokens, or with a negative one, can end the loop.
        """
        name, tokens = state.request_id, state.initial_tokens
        if name in self.active_requests or name in self.waiting_requests:
            raise ValueError(
                f"request {name} is being served: no other can have its id before it ends"
            )
        if not tokens or min(tokens) < 0:
            least = f", the least of them {min(tokens)}" if tokens else ""
            raise ValueError(f"request {name} has {len(tokens)} tokens{least}")
        super().add_waiting_request(state)

    def clear_cancelled_requests(self) -> list[RequestState]:
        """Drop the cancelled requests, and admit new ones again.

        After an offload transformers admits none until a request finishes; if the last active one
        is cancelled instead, all others wait forever.
        """
        cancelled = super().clear_cancelled_requests()
        if cancelled:
            self.block_new_requests = False
        return cancelled

    def _process_candidates(
        self,
        candidates: list[RequestState],
        token_budget: int,
        cache_budget: int,
        removed: set[str],
    ) -> Any:
        """Schedule candidates; the decoding ones at the front get their slots in one call."""
        ready, left, limit = [], cache_budget, self.cache.read_cache_limit
        for state in candidates[: min(token_budget, self.max_requests_per_batch)]:
            read = state.position_offset
            left -= read if limit is None else min(read, limit)
            if state._status != RequestStatus.DECODING or left < 0:
                break
            ready.append(state)
        self.cache.expect(ready)
        return super()._process_candidates(candidates, token_budget, cache_budget, removed)

    def _schedule_request(
        self, state: RequestState, request_tokens: list[int], token_budget: int, removed: set[str]
    ) -> None:
        """Schedule a request; its children become requests of their own if one token is left.

        The last token of a parent is computed after the fork. If it is the only one left,
        transformers schedules no token, and the forward pass of the step fails.
        """
        if state.num_children and len(request_tokens) == 1:
            num_children, state.num_children = state.num_children, 0
            for number in range(num_children):
                child = state.create_equivalent_initial_request()
                child.request_id = f"{state.request_id}__child#{number}"
                self.add_waiting_request(child)
        super()._schedule_request(state, request_tokens, token_budget, removed)


class Fifo(_Mended, FIFOScheduler):
    """First in, first out."""


class PrefillFirst(_Mended, PrefillFirstScheduler):
    """Prompts whose prefill has begun come first."""
