# SPDX-License-Identifier: Apache-2.0
"""The fast path for the next token of a decoding request, which reads only that token.

Invariants: a token whose slot is in a block that the request already has takes no block, and at
most makes that block findable. So it waits until the step is over or the core is queried, and all
such tokens of a step reach the core in one call. A token that begins a block is passed on at once.
Windows can give blocks back at any token, so with them no token waits. Everything else goes through
`allocate_slots`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import gcd
from struct import Struct
from typing import Any

from kvcore.compat.blocks import KVCacheBlocks
from kvcore.compat.engine_request import read_hashes
from kvcore.compat.registered_request import RegisteredRequest
from kvcore.compat.steps import Steps
from kvcore.manager import KVCacheManager as Core
from kvcore.types.engine_counts import RequestCounts
from kvcore.types.keys import HASH_SIZE
from kvcore.types.values import Appended, Refused

read_block = Struct("12xi").unpack
"""The block of a place of one table that an `append` set, from the columns of that place."""


class DecodedTokens:
    """The decoding part of a manager. known: the registry's requests, by id."""

    def __init__(
        self,
        core: Core,
        steps: Steps,
        known: Mapping[str, RegisteredRequest],
        empty: KVCacheBlocks,
    ) -> None:
        config = core.config
        sizes = [group.block_size for group in config.groups]
        self.last_refusal: Refused | None = None
        self._core, self._steps, self.empty_kv_cache_blocks = core, steps, empty
        self._known, self._has_key = known, steps.has_key
        self._block_divisor = config.hash_block_size if config.has_tails else gcd(*sizes)
        # With tail keys a block may have to be replaced, so no token takes the fast path.
        self._length_limit = 0 if config.has_tails else config.length_limit
        self._num_groups, self._is_one = len(sizes), len(sizes) == 1
        self._publishes = config.publish == "scheduled"
        self._keeps_all = not any(each.is_windowed or each.is_cross for each in config.groups)
        # Then a token that begins a block takes one more in each group, and no more happens.
        keeps_same = self._keeps_all and config.duplicates == "keep"
        self._grows_by_one = keeps_same and len({*sizes}) == 1
        self._fills_later = keeps_same and not config.enable_events  # those have an order

    def append(self, request: Any) -> KVCacheBlocks | None:
        """Schedule a decoding request's next token; None, without it, if there is more to do."""
        try:
            known, num_tokens = self._known[name := request.request_id], request.num_tokens
            start, num_ahead, token = known.num_computed, known.num_ahead, 0
            num_new = num_tokens - start + num_ahead
            is_same = known.request is request and request.num_computed_tokens == start
            if is_same and known.is_read:
                tokens = request.all_token_ids
                token = tokens[num_tokens - 1]
                if tokens[num_tokens - 1 - num_new] != known.last_token:
                    return None
        except (AttributeError, IndexError, KeyError, TypeError):
            return None
        if not is_same or not 0 <= num_new <= 1 or num_ahead < 0 or start >= self._length_limit:
            return None
        steps, size, new = self._steps, self._block_divisor, b""
        if (
            steps.first is not None
            and (known.batch is steps.mark or (not steps.are_reported and steps.is_over))
            and steps.notice(RequestCounts(name, num_tokens, start))
        ):
            return None
        offset, fills = start % size, num_new and num_tokens % size == 0
        own = fills and known.num_hashes is not None
        if own and not (new := self._read_hash(known, num_tokens // size)):
            return None
        blocks = self.empty_kv_cache_blocks
        if offset and (self._fills_later if fills else self._keeps_all):
            if steps.waiting and num_new == (not steps.tokens):  # all have a token, or none
                steps.settle()
            if num_new:
                try:
                    steps.tokens.append(token)
                except (TypeError, OverflowError):
                    return None
            steps.waiting.append(known)
            if new:
                steps.hashes[known] = new
        elif offset or (start and self._grows_by_one):
            done = self._core.append((name,), (token,) if num_new else None)
            if not done.done:
                return None
            if new:
                steps.publish(known, new)
            if not offset:
                ids = (read_block(done.columns),) if self._is_one else self._read_grown(done)
                blocks = KVCacheBlocks(ids, self._has_key)
            steps.noted_later.append(known)
        else:
            return None
        if steps.first is None:
            steps.begin((request, num_tokens, start, start))
        known.batch, known.num_computed, known.decodes = steps.mark, start + 1, True
        if num_new:
            known.last_token = token if known.is_read else None
        else:
            known.num_ahead = num_ahead + 1
        self.last_refusal = None
        return blocks

    def append_within_blocks(self, requests: Iterator[Any]) -> Any:
        """Schedule the next token of one request after another, while it begins and fills no block.

        Returns the first request that needs `append` instead, None if none does. The outcome is
        that of `append`, in fewer instructions.
        """
        waiting = self._steps.waiting
        num_waiting = len(waiting)
        rest = self._append_plain(requests)
        if len(waiting) > num_waiting:
            self.last_refusal = None
        return rest

    def _append_plain(self, requests: Iterator[Any]) -> Any:
        """Do the work of `append_within_blocks`."""
        steps, size, limit = self._steps, self._block_divisor, self._length_limit
        late = steps.waiting and not steps.tokens  # those have tokens to come
        if steps.first is None or late or not (steps.are_reported and self._keeps_all):
            return next(requests, None)
        all_known, mark = self._known, steps.mark
        wait, add_token = steps.waiting.append, steps.tokens.append
        for request in requests:
            try:
                known, num_tokens = all_known[request.request_id], request.num_tokens
                start, num_ahead = known.num_computed, known.num_ahead
                if (
                    request.num_computed_tokens != start
                    or num_tokens - start + num_ahead != 1
                    or not (start % size and num_tokens % size)  # begins or fills a block
                    or num_ahead < 0
                    or start >= limit
                    or known.request is not request
                    or known.batch is mark
                    or known.is_read
                ):
                    return request
            except (AttributeError, KeyError, TypeError):
                return request
            wait(known)
            add_token(0)
            known.batch, known.num_computed, known.decodes = mark, start + 1, True
            known.last_token = None
        return None

    def _read_hash(self, known: RegisteredRequest, num_full: int) -> bytes:
        """Return the request's own hash of its next full block; empty if the fast path does not
        apply.
        """
        new = list((read_hashes(known.request) or ())[known.num_hashes : num_full])
        is_one = len(new) == 1 and type(new[0]) is bytes and len(new[0]) == HASH_SIZE
        return new[0] if is_one and self._publishes else b""

    def _is_in_block(self, request: Any, count: Any) -> bool:
        """Return whether the core has all full blocks of a decoding request up to `count`."""
        try:
            known = self._known[request.request_id]
        except (AttributeError, KeyError, TypeError):
            return False
        scheduled, size = known.num_computed, self._block_divisor
        if known.request is not request or not scheduled or type(count) is not int:
            return False
        num_known = scheduled - known.num_ahead
        return 0 <= count <= scheduled and count < num_known - num_known % size + size

    def _read_grown(self, done: Appended) -> tuple[tuple[int, ...], ...]:
        """Return the block that an append of one request began in each group."""
        _, groups, _, blocks = done.grown
        grown: list[tuple[int, ...]] = [()] * self._num_groups
        for group, block in zip(groups, blocks, strict=True):
            grown[group] = (block,)
        return tuple(grown)
