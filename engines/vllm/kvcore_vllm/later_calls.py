# SPDX-License-Identifier: Apache-2.0
"""Calls for running requests that vLLM's manager answers at once, and kvcore later in one go.

Nothing that these calls read changes before the manager's next call of another kind. In a row they
cost half of what they cost when they alternate with vLLM's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from kvcore_vllm.blocks import Blocks
from kvcore_vllm.short_ways import KVCacheManager


class LaterCalls:
    """Notes the calls that vLLM's manager gets.

    own_nothing: its answer if it gives no block. block_size: a number of tokens that divides the
    block size of every group. For a call for one token that took no block, the request is noted;
    for any other call the request, the tokens, the lookahead (None if blocks are to be published)
    and vLLM's answer.
    """

    def __init__(self, own_nothing: Any, block_size: int) -> None:
        self.noted: list[Any] = []
        self._own_nothing = own_nothing
        self._block_size = block_size
        self._publishes_from: dict[str, int] = {}  # a smaller count fills no block

    def __len__(self) -> int:
        return len(self.noted)

    def forget(self, request_id: str) -> None:
        """Note a request's next call that publishes, since another call may have changed it."""
        self._publishes_from.pop(request_id, None)

    def compare(self, kvcore: KVCacheManager) -> Iterator[tuple[str, Any, Any, Any]]:
        """Make the noted calls to kvcore. Yields those that gave blocks, unless both gave the same
        one, or None.

        Each is its name, the request, vLLM's answer and kvcore's. An error of kvcore counts as its
        answer, and ends the calls.
        """
        calls = self.noted[:]
        self.noted.clear()
        append, nothing = kvcore.compat.append, kvcore.compat.empty_kv_cache_blocks
        is_short = kvcore.is_short
        for call in calls:
            name, answer, request = "allocate_slots", self._own_nothing, call
            try:
                if type(call) is not tuple:
                    grown = append(call) if is_short else None
                    if grown is nothing:
                        continue
                    if grown is None:
                        other = kvcore.allocate_slots(call, 1)
                    else:
                        other = Blocks(grown.blocks, kvcore.block_pool.block)
                else:
                    request, count, num_lookahead, answer = call
                    if num_lookahead is None:
                        name = "cache_blocks"
                        kvcore.cache_blocks(request, count)
                        continue
                    other = kvcore.allocate_slots(request, count, 0, None, num_lookahead)
                    if is_same_block(answer, other):
                        continue
            except Exception as error:  # whatever it is, vLLM's answers stand
                yield name, request, answer, error
                return
            if other is not kvcore.empty_kv_cache_blocks or answer is not self._own_nothing:
                yield name, request, answer, other

    def noting(
        self, allocate: Callable[..., Any], publish: Callable[..., Any], whole: Callable[..., Any]
    ) -> dict[str, Callable[..., Any]]:
        """Return the two calls that vLLM's manager answers and this notes, by name.

        whole: `allocate_slots` for calls that are not noted.
        """
        note, nothing = self.noted.append, self._own_nothing
        publishes_from, size = self._publishes_from, self._block_size

        def allocate_slots(
            request: Any, count: int, *args: Any, num_lookahead_tokens: int = 0, **options: Any
        ) -> Any:
            if args or options:
                given = options | {"num_lookahead_tokens": num_lookahead_tokens}
                return whole(request, count, *args, **given)
            answer = allocate(request, count, 0, None, num_lookahead_tokens)
            if answer is nothing and count == 1 and not num_lookahead_tokens:
                note(request)
            else:
                note((request, count, num_lookahead_tokens, answer))
            return answer

        def cache_blocks(request: Any, num_computed_tokens: int) -> None:
            publish(request, num_computed_tokens)
            if num_computed_tokens >= publishes_from.get(request.request_id, 0):
                end = num_computed_tokens - num_computed_tokens % size + size
                publishes_from[request.request_id] = end
                note((request, num_computed_tokens, None, None))

        return {"allocate_slots": allocate_slots, "cache_blocks": cache_blocks}


def is_same_block(mine: Any, theirs: Blocks | None) -> bool:
    """Return whether both answers are one block of the only group, at the same place."""
    if mine is None or theirs is None or len(theirs.ids) != 1:
        return False
    (blocks,), (ids,) = mine.blocks, theirs.ids
    return len(blocks) == len(ids) == 1 and blocks[0].block_id == ids[0]
