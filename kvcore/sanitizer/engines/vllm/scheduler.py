# SPDX-License-Identifier: Apache-2.0
"""The followed schedulers of vLLM 0.33.0: `AsyncScheduler`, and `Scheduler` for synchronous steps.

`--scheduler-cls kvcore.sanitizer.engines.vllm.scheduler.AsyncScheduler` attaches the sanitizer.

The sanitizer follows the outputs that the scheduler sends to the workers, in order; each is checked
before the scheduler takes its result, when its tokens are known. A step reads a recurrent state
from the block of its first position's predecessor, which the workers copy if the state moves on,
and writes it to that of its last position. Not followed: KV from a connector, states with drafts or
checkpoints in the middle of a step, and other kinds of groups.
"""

from __future__ import annotations

from typing import Any

import vllm
from vllm.v1.core.sched.async_scheduler import AsyncScheduler as VllmAsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler as VllmScheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec, SlidingWindowSpec

from kvcore.sanitizer.attached import Guard, check_version, every
from kvcore.sanitizer.chunks import CacheGroup
from kvcore.sanitizer.errors import UnsupportedEngine
from kvcore.sanitizer.findings import Finding
from kvcore.sanitizer.media import Item, MediaTokens
from kvcore.sanitizer.sanitizer import Sanitizer

TESTED = ("0.33.0",)
Work = tuple[list[str], list[int], list[int], dict[int, Any]]
"""Names of the requests of a step, their first positions and numbers of tokens, and the blocks that
are appended to the tables of some of them, by their place.
"""


def attach(scheduler: Any, **options: Any) -> Sanitizer:
    """Make a sanitizer for a scheduler's cache. Raises UnsupportedEngine."""
    check_version("vLLM", vllm.__version__, TESTED)
    groups = []
    for group in scheduler.kv_cache_config.kv_cache_groups:
        spec = group.kv_cache_spec
        if not _is_followed(spec) or scheduler.connector:
            found = f"with {spec} and connector {scheduler.connector}"
            needed = "attention, states without drafts, no connector"
            raise UnsupportedEngine(engine="vLLM", found=found, tested=needed)
        groups.append(cache_group(spec))
    num_blocks, engine = scheduler.kv_cache_config.num_blocks, f"vLLM {vllm.__version__}"
    return Sanitizer(groups, num_blocks, engine=engine, **options)


def _is_followed(spec: Any) -> bool:
    if type(spec) is MambaSpec:
        return not (spec.num_speculative_blocks or spec.num_prefill_checkpoint_blocks)
    return type(spec) in (FullAttentionSpec, SlidingWindowSpec)


def cache_group(spec: Any) -> CacheGroup:
    """Return what the sanitizer has to know of a group of layers."""
    return CacheGroup(
        block_size=spec.block_size,
        window=getattr(spec, "sliding_window", None),
        num_null=1,
        state=type(spec) is MambaSpec,
    )


def begin(sanitizer: Sanitizer, request: Any) -> None:
    """Follow a vLLM request."""
    lora, tokens = request.lora_request, request._all_token_ids
    items = [
        Item(each.mm_position.offset, each.mm_position.length, each.identifier.encode())
        for each in request.mm_features
    ]
    if request.prompt_embeds is not None:
        embeds = request.prompt_embeds
        items.append(Item(0, len(embeds), embeds.float().numpy().tobytes()))
    tokens = MediaTokens(tokens, items) if items else tokens
    namespace = (lora.lora_name if lora else None, request.cache_salt)
    sanitizer.begin(request.request_id, tokens, namespace)


def follow(
    sanitizer: Sanitizer, step: int, requests: dict[str, Any], planned: Any, result: Any
) -> list[Finding]:
    """Check the work that a scheduler's output gives to the workers. requests: new ones, by
    name.
    """
    names, starts, counts, tables = work_of(sanitizer, requests, planned)
    drafts = {}
    if planned.scheduled_spec_decode_tokens:
        for at, name in enumerate(names):
            given = planned.scheduled_spec_decode_tokens.get(name)
            if given:
                drafts[at] = _drafts(given, result.sampled_token_ids[result.req_id_to_index[name]])
    return sanitizer.step(step, names, starts, counts, drafts, tables)


def work_of(sanitizer: Sanitizer, requests: dict[str, Any], planned: Any) -> Work:
    """Report what a scheduler's output gives up, zeroes and copies; return the work of its step."""
    for name in planned.finished_req_ids:
        if name in sanitizer:
            sanitizer.end(name)
        elif name in requests and requests[name].is_finished():
            del requests[name]  # aborted while it waited
    for name in planned.preempted_req_ids or ():
        if name in sanitizer:  # it may have finished since
            sanitizer.drop(name)
    sanitizer.zero(planned.new_block_ids_to_zero or ())
    sanitizer.copy(planned.kv_cache_block_copies or ())
    names: list[str] = []
    starts: list[int] = []
    tables: dict[int, Any] = {}
    for new in planned.scheduled_new_reqs:
        if new.req_id not in sanitizer:
            begin(sanitizer, requests.pop(new.req_id))
        else:  # the next part of a streamed prompt
            sanitizer.drop(new.req_id)
        tables[len(names)] = new.block_ids
        names.append(new.req_id)
        starts.append(new.num_computed_tokens)
    cached = planned.scheduled_cached_reqs
    given = enumerate(cached.new_block_ids, len(names))
    tables |= {at: lists for at, lists in given if lists is not None}
    for name in cached.resumed_req_ids:
        sanitizer.drop(name)
    names += cached.req_ids
    starts += cached.num_computed_tokens
    counts = list(map(planned.num_scheduled_tokens.__getitem__, names))
    return names, starts, counts, tables


def _drafts(given: list[int], sampled: list[int]) -> list[int]:
    """Return the drafts that ran. An asynchronous scheduler knows them only if they were
    accepted.
    """
    if min(given) >= 0:
        return given
    accepted = sampled[:-1]
    return [*accepted, *[-1] * (len(given) - len(accepted))]


class _Watched:
    """The calls of both schedulers to their sanitizer."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._guard = Guard(lambda: attach(self, every=every()))
        self._arrived: dict[str, Any] = {}
        self._num_followed = 0

    def add_request(self, request: Any) -> None:
        """Add a request as vLLM does, and keep it until it is followed.

        The next part of a streamed prompt is not kept: vLLM puts it into the request that it has.
        """
        is_new = request.request_id not in self.requests  # type: ignore[attr-defined] # vLLM's
        super().add_request(request)  # type: ignore[misc] # vLLM's scheduler has it
        if is_new and self._guard.sanitizer is not None:
            self._arrived[request.request_id] = request

    def update_from_output(self, planned: Any, result: Any) -> Any:
        """Check what ran, then update as vLLM does. Raises WrongKv afterwards."""
        step, self._num_followed = self._num_followed, self._num_followed + 1
        found = self._guard.observe(
            lambda sanitizer: follow(sanitizer, step, self._arrived, planned, result)
        )
        if self._guard.sanitizer is None:
            self._arrived.clear()
        outputs = super().update_from_output(planned, result)  # type: ignore[misc] # the same
        self._guard.report(found)
        return outputs


class Scheduler(_Watched, VllmScheduler):  # type: ignore[misc] # vLLM has no types here
    """vLLM's scheduler with a sanitizer."""


class AsyncScheduler(_Watched, VllmAsyncScheduler):  # type: ignore[misc] # the same
    """vLLM's asynchronous scheduler with a sanitizer."""
