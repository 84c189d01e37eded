# SPDX-License-Identifier: Apache-2.0
"""Choose the requests that give way if the pool is full; kvcore moves them to the host tier.

Two decisions differ from transformers': the newest starved requests go until all others fit by the
manager's own count, and no cached content is dropped to make room, since its blocks count as free.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers.generation.continuous_batching.offloading_manager import OffloadingManager
from transformers.generation.continuous_batching.requests import RequestState, RequestStatus
from transformers.generation.continuous_batching.utils import logger


class Offload(OffloadingManager):
    """transformers' offloading over the host tier of a `KVCacheManager`."""

    def __init__(
        self,
        cache: Any,
        scheduler: Any,
        cpu_offload_space_gib: float | None,
        safety_threshold: float,
        compute_stream: Any,
        distributed_helper: Any,
    ) -> None:
        """Make the host tier, whose size in blocks transformers computes."""
        del distributed_helper  # only for tensor parallelism, which is refused
        self.cache, self.scheduler = cache, scheduler
        num_blocks = self._compute_num_cpu_sectors(cpu_offload_space_gib, safety_threshold)
        if cpu_offload_space_gib and not num_blocks:
            size = cache.bytes_per_sector
            logger.warning(f"{cpu_offload_space_gib=} is less than one block of {size} bytes")
        shape = (num_blocks, cache.bytes_per_sector)
        pinned = torch.device(cache.device).type != "cpu"
        host = torch.empty(shape, dtype=torch.uint8, pin_memory=pinned) if num_blocks else None
        cache.use_host(host, compute_stream)

    def offload_requests(self) -> bool:
        """Put starved requests back into the queue, the newest first, until the others fit.

        One active request stays. Those that go keep their content in the host tier if it has room,
        and otherwise start over. Returns whether any went.
        """
        scheduler = self.scheduler
        starved, gone = scheduler.starved_requests, []
        while starved and len(scheduler.active_requests) > 1 and not self._fit(starved):
            state, _ = starved.pop()
            gone.append(self._put_aside(state))
            del scheduler.active_requests[state.request_id]
        for state in reversed(gone):
            scheduler.add_waiting_request(state)
        scheduler.block_new_requests |= bool(gone)
        return bool(gone)

    def restore_scheduled_requests(self, requests_in_batch: list[Any]) -> None:
        """Mark requests as no longer offloaded; their copies are in the manager's batch."""
        for each in requests_in_batch:
            each.state.is_cpu_offloaded = False

    def free_request_cpu_cache(self, state: RequestState) -> None:
        """Give back the host blocks of a request."""
        if state.is_cpu_offloaded:
            self.cache.free_blocks(state.request_id)
            state.is_cpu_offloaded = False

    def reset(self) -> None:
        """Give back all host blocks."""
        self.free_all_waiting_cpu_caches()

    def _fit(self, starved: list[tuple[RequestState, int]]) -> bool:
        """Return whether all starved requests would get what they lacked."""
        missing = sum(self.cache.missing.get(state.request_id, 0) for state, _ in starved)
        return missing <= self.cache.manager.num_free_blocks

    def _put_aside(self, state: RequestState) -> RequestState:
        """Take an active request's blocks. Returns the state to queue in its place."""
        if self.cache.swap_out(state):
            state._status = RequestStatus.PENDING  # its lifetime goes on
            return state
        self.cache.free_blocks(state.request_id)
        anew = state.create_equivalent_initial_request()
        state._status = RequestStatus.FINISHED
        return anew
