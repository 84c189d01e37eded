# SPDX-License-Identifier: Apache-2.0
"""Calls for running and finished requests that vLLM's manager answers at once, and kvcore later in
one go.

Nothing that these calls read changes before the manager's next call of another kind. In a row they
cost half of what they cost when they alternate with vLLM's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

from kvcore_vllm.blocks import Blocks
from kvcore_vllm.short_ways import KVCacheManager

FREED = object()
"""Stands for the answer of a noted `free`, which has none."""


class LaterCalls:
    """Notes the calls that vLLM's manager gets.

    own_nothing: its answer if it gives no block. block_size: a number of tokens that divides the
    block size of every group. decoded: requests of calls for one token that took no block. others:
    any other call, as the number of those before it, the request, the tokens, the lookahead (None
    if blocks are to be published or given back) and vLLM's answer.
    """

    def __init__(self, own_nothing: Any, block_size: int) -> None:
        self.decoded: list[Any] = []
        self.others: list[tuple[int, Any, int, int | None, Any]] = []
        self._own_nothing = own_nothing
        self._block_size = block_size
        self._publishes_from: dict[str, int] = {}  # a smaller count fills no block

    def __len__(self) -> int:
        return len(self.decoded) + len(self.others)

    def forget(self, request_id: str) -> None:
        """Note a request's next call that publishes, since another call may have changed it."""
        self._publishes_from.pop(request_id, None)

    def compare(self, kvcore: KVCacheManager) -> Iterator[tuple[str, Any, Any, Any]]:
        """Make the noted calls to kvcore. Yields those that gave blocks, unless both gave the same
        one, or None.

        Each is its name, the request, vLLM's answer and kvcore's. An error of kvcore counts as its
        answer; no call may follow it.
        """
        decoded, others = iter(self.decoded[:]), self.others[:]
        self.decoded.clear()
        self.others.clear()
        is_short, nothing = kvcore.is_short, kvcore.empty_kv_cache_blocks
        take, start = kvcore.compat.append_within_blocks if is_short else next_or_none, 0
        for place, request, count, num_lookahead, answer in others:
            before, start = islice(decoded, place - start), place
            if (first := take(before)) is not None:
                yield from self._append(kvcore, first, before, take)
            name = "allocate_slots"
            other: Any = nothing
            try:
                if answer is FREED:
                    name, answer = "free", None
                    kvcore.free(request)
                    continue
                if num_lookahead is None:
                    name = "cache_blocks"
                    kvcore.cache_blocks(request, count)
                    continue
                other = kvcore.allocate_slots(request, count, 0, None, num_lookahead)
                if is_same_block(answer, other):
                    continue
            except Exception as error:  # whatever it is, vLLM's answers stand
                other = error
            if other is not nothing or answer is not self._own_nothing:
                yield name, request, answer, other
        yield from self._append(kvcore, take(decoded), decoded, take)

    def _append(
        self,
        kvcore: KVCacheManager,
        request: Any,
        requests: Iterator[Any],
        take: Callable[[Iterator[Any]], Any],
    ) -> Iterator[tuple[str, Any, Any, Any]]:
        """Give a request, and those behind it, a slot for one token each. Yields those that got
        blocks.

        take: returns the next request that `append` has to be called for, None at the end.
        """
        compat, is_short = kvcore.compat, kvcore.is_short
        while request is not None:
            other: Any = kvcore.empty_kv_cache_blocks
            try:
                grown = compat.append(request) if is_short else None
                if grown is None:
                    other = kvcore.allocate_slots(request, 1)
                elif grown is not compat.empty_kv_cache_blocks:
                    other = Blocks(grown.blocks, kvcore.block_pool.block)
            except Exception as error:  # whatever it is, vLLM's answers stand
                other = error
            if other is not kvcore.empty_kv_cache_blocks:
                yield "allocate_slots", request, self._own_nothing, other
            request = take(requests)

    def noting(
        self,
        allocate: Callable[..., Any],
        publish: Callable[..., Any],
        give_back: Callable[..., Any],
        at_once: Any,
    ) -> dict[str, Callable[..., Any]]:
        """Return the three calls that vLLM's manager answers and this notes, by name.

        at_once: makes those that are not noted, in both managers; its `frees_later` tells whether a
        request's blocks may be given back later.
        """
        whole, free_at_once, frees_later = at_once.allocate_slots, at_once.free, at_once.frees_later
        decoded, note, nothing = self.decoded, self.others.append, self._own_nothing
        note_decoded = decoded.append
        publishes_from, size = self._publishes_from, self._block_size

        def allocate_slots(
            request: Any,
            count: int,
            *args: Any,
            num_lookahead_tokens: int = 0,
            **options: Any,
        ) -> Any:
            if args or options:
                given = options | {"num_lookahead_tokens": num_lookahead_tokens}
                return whole(request, count, *args, **given)
            answer = allocate(request, count, 0, None, num_lookahead_tokens)
            if answer is nothing and count == 1 and not num_lookahead_tokens:
                note_decoded(request)
            else:
                note((len(decoded), request, count, num_lookahead_tokens, answer))
            return answer

        def cache_blocks(request: Any, num_computed_tokens: int) -> None:
            publish(request, num_computed_tokens)
            if num_computed_tokens >= publishes_from.get(request.request_id, 0):
                end = num_computed_tokens - num_computed_tokens % size + size
                publishes_from[request.request_id] = end
                note((len(decoded), request, num_computed_tokens, None, None))

        def free(request: Any) -> None:
            if not frees_later(request):
                free_at_once(request)
                return
            give_back(request)
            publishes_from.pop(request.request_id, None)
            note((len(decoded), request, 0, None, FREED))

        return {"allocate_slots": allocate_slots, "cache_blocks": cache_blocks, "free": free}


def is_same_block(mine: Any, theirs: Blocks | None) -> bool:
    """Return whether both answers are one block of the only group, at the same place."""
    if mine is None or theirs is None or len(theirs.ids) != 1:
        return False
    (blocks,), (ids,) = mine.blocks, theirs.ids
    return len(blocks) == len(ids) == 1 and blocks[0].block_id == ids[0]


def next_or_none(requests: Iterator[Any]) -> Any:
    """Return the next request, None if there is none."""
    return next(requests, None)
