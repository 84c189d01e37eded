# SPDX-License-Identifier: Apache-2.0
"""The first manager with prefix caching over one queue, as vLLM's PR 9972 introduced it.

A request gets its first blocks from `allocate_slots`, once, and more from `append_slots`. Both may
preallocate empty blocks, but refuse no request for lack of them. There is no null block and no
window. Tables only grow, so two blocks may have the same content; a look-up finds the older one. A
block can be found as soon as it is full. As in the original, keys cover tokens alone; requests with
media, an adapter, embeddings or a salt are refused while caching is on. A look-up changes nothing
and may find a whole prompt; the engine then shortens the hit.

Invariants: a call that raises or returns None changes nothing.

Why: it uses the pool and not the core's requests, since these leave a token to compute, keep rows,
and show no owners (docs/differences.md). Source: S004-03 to S004-19; X-04, 12, 14.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from kvcore import _twin
from kvcore.hashing.block_hash import hash_blocks, root_hash
from kvcore.legacy.blocks.blocks import BackendName, Backing
from kvcore.legacy.blocks.tiers import Tiers
from kvcore.legacy.blocks.views import PoolQueue
from kvcore.legacy.v1_first.blocks import CachedBlocks, FreeBlockQueue, KVCacheBlock, Tail
from kvcore.legacy.v1_first.errors import (
    AlreadyAllocated,
    HitsWithoutCaching,
    InputsNotInKeys,
    NoTokensLeft,
    TooFewTokens,
    UnallocatedRequest,
)
from kvcore.legacy.v1_first.hashes import (
    BlockHashType,
    hash_any_blocks,
    hash_block_tokens,
    hash_request_tokens,
)
from kvcore.types.arguments import read_count
from kvcore.types.commands import Batch
from kvcore.types.errors import InvalidConfig, InvalidToken, StaleHits, UnknownBlock, WrongKey
from kvcore.types.keys import HASH_SIZE, HASHINGS, Hashing, make_key
from kvcore.types.tokens import read_tokens
from kvcore.types.values import Refused

__all__ = [
    "BlockHashType",
    "FreeBlockQueue",
    "KVCacheBlock",
    "KVCacheManager",
    "Request",
    "hash_block_tokens",
    "hash_request_tokens",
]

NOT_IN_KEYS = (
    *("lora_request", "lora_id", "lora_int_id", "prompt_embeds", "cache_salt"),
    *("mm_data", "mm_features", "mm_hashes", "mm_inputs", "mm_kwargs", "mm_positions"),
    *("mm_placeholders", "multi_modal_data", "multi_modal_hashes", "multi_modal_inputs"),
    *("multi_modal_placeholders", "prompt_adapter_request"),
)
"""Names, in requests or their dict `inputs`, of inputs that no key of this manager covers; a value
of None, 0 or an empty container means that the request has no such input.
"""
_PROCESS_SEED = os.urandom(32).hex().encode()


class Request:
    """A request as this manager reads it, for engines without a class of their own.

    all_token_ids: the tokens of prompt and answer. num_computed_tokens: the number of tokens before
    those to which `append_slots` gives slots.
    """

    def __init__(self, request_id: str, prompt_token_ids: Sequence[int]) -> None:
        self.request_id = request_id
        self.num_computed_tokens = 0
        self._token_ids = list(prompt_token_ids)

    @property
    def all_token_ids(self) -> Sequence[int]:
        """Tokens of prompt and answer."""
        return self._token_ids

    def append_output_token_ids(self, token_ids: int | Sequence[int]) -> None:
        """Append tokens of the answer."""
        self._token_ids += [token_ids] if isinstance(token_ids, int) else token_ids


class KVCacheManager:
    """Decides which block holds which tokens of a request; touches no tensor.

    sliding_window: ignored, as in the original: blocks that leave a window are kept.
    enable_caching: whether full blocks can be found. num_preallocate_tokens: slots to preallocate
    for a growing request, if blocks are free. max_model_len: the limit of that preallocation, as in
    a later release. hashing, hash_seed: the hash function of keys, and the seed of their root,
    random per process unless given. If one of them is given, the hashes of blocks are the core's
    keys; otherwise they are made as in the original, from any ints. Blocks are found by keys in
    either case. Raises InvalidCount, InvalidConfig, BackendMissing.
    """

    def __init__(
        self,
        block_size: int,
        num_gpu_blocks: int,
        sliding_window: int | None = None,
        enable_caching: bool = True,
        num_preallocate_tokens: int = 64,
        *,
        max_model_len: int | None = None,
        hashing: Hashing | None = None,
        hash_seed: bytes | None = None,
        backend: BackendName = "python",
    ) -> None:
        self.block_size = read_count("block_size", block_size, 1)
        self.num_gpu_blocks = read_count("num_gpu_blocks", num_gpu_blocks)
        self.sliding_window = sliding_window
        self.enable_caching = enable_caching
        self.num_preallocate_tokens = read_count("num_preallocate_tokens", num_preallocate_tokens)
        self.num_preallocate_blocks = -(-num_preallocate_tokens // block_size)
        self.max_model_len = max_model_len
        if max_model_len is not None:
            read_count("max_model_len", max_model_len, 1)
        self._shows_keys = hashing is not None or hash_seed is not None
        hashing = "sha256" if hashing is None else hashing
        if hashing not in HASHINGS:
            raise InvalidConfig(field="hashing", value=hashing, reason=f"one of {HASHINGS}")
        if not isinstance(hash_seed, bytes | None):
            raise InvalidConfig(field="hash_seed", value=hash_seed, reason="must be bytes")
        self._backend = backend
        self._hashing: Hashing = hashing
        self._root = root_hash(_PROCESS_SEED if hash_seed is None else hash_seed, hashing)
        self._backing = Backing(num_gpu_blocks, backend=backend)
        calls, kinds = "allocate_slots, append_slots and free", [KVCacheBlock] * num_gpu_blocks
        self.free_block_queue = PoolQueue(self._backing, kinds, calls)
        self.block_pool = self.free_block_queue.blocks
        self.cached_block_hash_to_block = CachedBlocks(self._backing, self.block_pool)
        self.req_to_blocks: dict[str, list[KVCacheBlock]] = {}

    def __repr__(self) -> str:
        free = self.free_block_queue.num_free_blocks
        return f"<early KVCacheManager: {free} of {self.num_gpu_blocks} blocks free>"

    def get_computed_blocks(self, request: Any) -> list[KVCacheBlock]:
        """Return the longest cached prefix of a request, even if it is the whole prompt.

        Changes nothing. If the whole prompt is found, nothing is left to compute: the caller then
        drops the last block.
        Raises InvalidToken, InputsNotInKeys.
        """
        if not self.enable_caching:
            return []
        _check_inputs(request)
        keys, pool = self._keys(self._root, request.all_token_ids), self.block_pool
        return [pool[number] for number in self._backing.blocks.lookup_prefix(keys, "device")]

    def get_computed_block_ids(self, request: Any) -> list[int]:
        """Return the ids of the computed blocks; `allocate_slots` takes ids as well."""
        return [block.block_id for block in self.get_computed_blocks(request)]

    def allocate_slots(
        self, request: Any, num_tokens: int, computed_blocks: Sequence[KVCacheBlock | int]
    ) -> list[KVCacheBlock] | None:
        """Give a request its first blocks: the computed ones, and new ones for num_tokens tokens.

        computed_blocks: from `get_computed_blocks`, or their ids. Returns the new blocks,
        preallocated ones included, or None if they do not fit. Raises InvalidCount,
        AlreadyAllocated, HitsWithoutCaching, StaleHits, NoTokensLeft, InvalidToken,
        InputsNotInKeys.
        """
        num_tokens = read_count("num_tokens", num_tokens, 1)
        name = request.request_id
        if name in self.req_to_blocks:
            raise AlreadyAllocated(request=name, num_blocks=len(self.req_to_blocks[name]))
        keys = self._keys_of_prompt(request, len(computed_blocks), num_tokens)
        numbers, needed = [*map(self._number, computed_blocks)], -(-num_tokens // self.block_size)
        taken = self._admit(request, computed_blocks, numbers, keys[: len(numbers)], needed)
        if taken is None:
            return None
        hits = [self.block_pool[number] for number in numbers]
        fresh = [self.block_pool[number] for number in taken]
        if self.enable_caching:
            first = len(hits) * self.block_size
            tokens = list(request.all_token_ids[first : first + num_tokens])
            before, end = hits[-1].content if hits else None, first + len(tokens)
            text = Tail(self.block_size, first, before, tokens, self._shows_keys, end)
            text.hold(fresh)
            self._publish(fresh, keys[len(hits) :])
        self.req_to_blocks[name] = hits + fresh
        return list(fresh)

    def append_slots(self, request: Any, num_tokens: int) -> list[KVCacheBlock] | None:
        """Give a request slots for num_tokens tokens after those that it counts as computed.

        Blocks that these tokens fill are cached, unless an earlier token got no slot. Returns the
        new blocks, preallocated ones included: an empty list if the present blocks have room, None
        if the new ones do not fit. Raises InvalidCount, UnallocatedRequest, TooFewTokens,
        InvalidToken.
        """
        num_tokens = read_count("num_tokens", num_tokens)
        name = request.request_id
        blocks = self.req_to_blocks.get(name)
        if blocks is None:
            raise UnallocatedRequest(request=name, num_requests=len(self.req_to_blocks))
        size = self.block_size
        start = read_count("num_computed_tokens", request.num_computed_tokens)
        end = start + num_tokens
        needed = -(-end // size) - len(blocks)
        num_free = self._backing.blocks.num_free("device") if needed > 0 else 0
        first, keys, text = 0, list[bytes](), None
        if self.enable_caching:
            tokens, content = request.all_token_ids, blocks[-1].content
            text = content and content[0]
            if end > len(tokens):
                raise TooFewTokens(request=name, num_tokens=len(tokens), requested=end)
            if end // size > start // size and (text is None or text.reaches(start)):
                first, keys = self._keys_of_filled(tokens, blocks, end // size)
        if needed > 0 and needed > num_free:
            return None
        if text is not None:
            text.grow(tokens, start, end)
        if needed <= 0:
            self._publish(blocks[first:] if keys else [], keys)
            return []
        taken = self._backing.blocks.take(self._count(needed, num_free, len(blocks)), "device")
        assert not isinstance(taken, Refused)
        fresh = [self.block_pool[number] for number in taken]
        if text is not None:
            text.hold(fresh, len(blocks))
        blocks += fresh
        self._publish(blocks[first:], keys)
        return fresh

    def free(self, request: Any) -> None:
        """Free a request's blocks, tail first; does nothing if it has none."""
        blocks = self.req_to_blocks.pop(request.request_id, [])
        self._backing.blocks.release([block.block_id for block in reversed(blocks)], "device")

    def take_batch(self) -> Batch:
        """Close the open batch: the commands since the last one, for a runtime."""
        return self._backing.take_batch()

    def state(self) -> Tiers:
        """Return the state of the pool as a value. Cost: O(pool) with the twin."""
        return self._backing.state()

    def check(self) -> None:
        """Raise InvariantViolation unless each block has one owner per table that contains it."""
        tables = self.req_to_blocks.values()
        self._backing.check(block.block_id for table in tables for block in table)

    def _keys(self, parent: bytes, tokens: Sequence[int]) -> list[bytes]:
        """Return the keys of the full blocks of tokens after a parent. Raises InvalidToken."""
        size, hashing = self.block_size, self._hashing
        hashes: Iterable[bytes]
        try:
            if self._backend == "rust":
                hashes = _twin.hash_blocks(tokens, parent, size, hashing)
            else:
                hashes = hash_blocks(parent, read_tokens(tokens), size, hashing=hashing)
        except InvalidToken:
            if self._shows_keys or not all(isinstance(each, int) for each in tokens):
                raise
            hashes = hash_any_blocks(parent, tokens, size)
        return [make_key(each, 0) for each in hashes]

    def _keys_of_prompt(self, request: Any, num_hits: int, num_tokens: int) -> list[bytes]:
        """Return the keys of the hits, then of the blocks that the next num_tokens tokens fill."""
        name = request.request_id
        if not self.enable_caching:
            if num_hits:
                raise HitsWithoutCaching(request=name, num_blocks=num_hits)
            return []
        _check_inputs(request)
        tokens, num_computed = request.all_token_ids, num_hits * self.block_size
        if len(tokens) <= num_computed:
            raise NoTokensLeft(request=name, num_tokens=len(tokens), num_computed=num_computed)
        return self._keys(self._root, tokens[: num_computed + num_tokens])

    def _admit(
        self, request: Any, hits: Sequence[Any], numbers: list[int], keys: list[bytes], needed: int
    ) -> tuple[int, ...] | None:
        """Touch the hits, which must have these keys, and take needed and preallocated blocks."""
        backing = self._backing.blocks
        num_free = backing.num_free("device")
        if hits and min(numbers) >= 0:
            num_free -= backing.ref_counts(numbers, "device").count(0)
        count = max(needed, self._count(needed, num_free, len(hits)))
        try:
            taken = backing.admit(numbers, count, keys, "device")
        except (UnknownBlock, WrongKey) as error:
            place: Any = error.fields.get("position")
            place = numbers.index(-1) if place is None else place
            number = getattr(hits[place], "block_id", hits[place])
            raise StaleHits(request=request.request_id, block=number, position=place) from None
        return None if type(taken) is Refused else taken

    def _keys_of_filled(
        self, tokens: Sequence[int], blocks: list[KVCacheBlock], full: int
    ) -> tuple[int, list[bytes]]:
        """Return the index of the first block without a key, and the keys of full blocks there."""
        first, key = min(full, len(blocks)), None
        key_of = self._backing.blocks.key_of
        while first and (key := key_of(blocks[first - 1].block_id, "device")) is None:
            first -= 1
        filled = tokens[first * self.block_size : full * self.block_size]
        return first, self._keys(self._root if key is None else key[:HASH_SIZE], filled)

    def _number(self, hit: Any) -> int:
        """Return the id of a hit, given as a block or id; -1 if it is not of this pool."""
        number = getattr(hit, "block_id", hit)
        known = isinstance(number, int) and 0 <= number < self.num_gpu_blocks
        return number if known and hit in (number, self.block_pool[number]) else -1

    def _count(self, needed: int, num_free: int, num_held: int) -> int:
        """Return how many blocks to take: the needed ones and free ones to preallocate."""
        ahead = self.num_preallocate_blocks
        if self.max_model_len is not None:
            most = -(-self.max_model_len // self.block_size) - num_held - needed
            ahead = min(ahead, max(0, most))
        return min(needed + ahead, num_free)

    def _publish(self, blocks: Sequence[KVCacheBlock], keys: Sequence[bytes]) -> None:
        """Publish the first len(keys) blocks, each under its key."""
        if keys:
            numbers = [block.block_id for block in blocks[: len(keys)]]
            self._backing.blocks.publish_all(numbers, keys, "device")


def _check_inputs(request: Any) -> None:
    """Raise InputsNotInKeys if a request has inputs other than tokens."""
    inputs = getattr(request, "inputs", None)
    inside = inputs if isinstance(inputs, Mapping) else {}
    for field in NOT_IN_KEYS:
        for value in (getattr(request, field, None), inside.get(field)):
            if value is not None and (len(value) if hasattr(value, "__len__") else value != 0):
                raise InputsNotInKeys(request=request.request_id, field=field)
