# SPDX-License-Identifier: Apache-2.0
"""Make only the manager calls of vLLM's V1 scheduler for the operations of the list.

It imports nothing of vLLM, so that tests can drive a facade in the same way.
"""

from __future__ import annotations

from typing import Any

from benches.peers.work import Decode


class VllmScheduler:
    """Calls a manager as vLLM does. A subclass makes the requests (`add`)."""

    def __init__(self, manager: Any) -> None:
        self.manager = manager
        self.requests: dict[int, Any] = {}
        self.hits: list[int] = []

    def add(self, request: int, prompt: Any) -> None:
        """Make a request of a prompt and keep it; implemented by subclasses."""
        raise NotImplementedError

    def prefill(self, request: int, end: int) -> None:
        known = self.requests[request]
        computed = known.num_computed_tokens
        if computed:
            if end > computed:
                self.grown(self.manager.allocate_slots(known, end - computed))
                known.num_computed_tokens = end
            return
        blocks, num_hit = self.manager.get_computed_blocks(known)[:2]
        self.hits.append(num_hit)
        end = max(end, num_hit + 1)
        self.grown(self.allocate_first(known, end - num_hit, num_hit, blocks))
        known.num_computed_tokens = end

    def allocate_first(self, known: Any, num_new: int, num_hit: int, blocks: Any) -> Any:
        """Allocate after a hit."""
        del num_hit
        return self.manager.allocate_slots(known, num_new, blocks)

    def grown(self, blocks: object) -> None:
        """Raise RuntimeError if an allocation was refused."""
        if blocks is None:
            raise RuntimeError("the pool has no room")

    def decode(self, decode: Decode) -> None:
        requests, allocate = self.requests, self.manager.allocate_slots
        for request, token in zip(decode.requests, decode.tokens, strict=True):
            known = requests[request]
            known.append_output_token_ids(token)
            if allocate(known, 1) is None:
                raise RuntimeError("the pool has no room")
            known.num_computed_tokens += 1

    def preempt(self, request: int) -> None:
        known = self.requests[request]
        self.manager.free(known)
        known.num_computed_tokens = 0

    def finish(self, request: int) -> None:
        self.manager.free(self.requests.pop(request))

    def end_step(self) -> None:
        pass


class V1Of085(VllmScheduler):
    """The scheduler of 0.8.5, which drops a request's hashes when it ends."""

    def finish(self, request: int) -> None:
        known = self.requests[request]
        super().finish(request)
        self.manager.free_block_hashes(known)


class V1Facade(V1Of085):
    """The scheduler of 0.8.5 over kvcore's facade, which hands out commands at each step."""

    def end_step(self) -> None:
        self.manager.take_batch()
