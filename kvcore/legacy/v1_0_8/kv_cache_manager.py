# SPDX-License-Identifier: Apache-2.0
"""vLLM 0.8.5's V1 `KVCacheManager`, over the core's pool.

A call first makes all checks that can raise; the rest are transitions of the pool: release, admit,
publish. If a request does not fit, the call returns None before any other check; the trim of its
window is kept. A call that raises changes nothing. Tables and lists of hashes are handed out and
keep growing; hashes stay through a preemption. Blocks are freed tail first, with and without
caching. Source: S001-71 to 85, X-04.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile
from typing import Any

from msgspec.structs import replace

from kvcore.legacy.blocks.blocks import BackendName
from kvcore.legacy.v1_0_8 import block_hashes, errors
from kvcore.legacy.v1_0_8.block_hashes import BlockHashType, HashFunction, sha256
from kvcore.legacy.v1_0_8.block_pool import BlockPool
from kvcore.legacy.v1_0_8.kv_cache_utils import hash_more_tokens, hash_request_tokens
from kvcore.legacy.v1_0_8.live_blocks import KVCacheBlock
from kvcore.legacy.v1_0_8.specialized_manager import get_specialized_manager
from kvcore.types.arguments import check_kind, read_count
from kvcore.types.commands import Batch
from kvcore.types.errors import UnknownBlock, WrongKey
from kvcore.types.groups import skipped_blocks
from kvcore.types.values import PrefixCacheStats, Refused

__all__ = ["BlockPool", "KVCacheManager"]


Blocks = Sequence[KVCacheBlock]
Records = list[BlockHashType]


class ListsByRequest(dict[str, list[Any]]):
    """Lists by request id; an unknown id reads as an empty list and adds no entry."""

    def __missing__(self, request_id: str) -> list[Any]:
        return []


class KVCacheManager:
    """Decides which block holds which tokens of an engine's requests; touches no tensor.

    kv_cache_config: must have one group; its num_blocks is the pool's size, null block included.
    caching_hash_algo: "sha256"; any other text means Python's `hash`. use_eagle: whether the last
    block of a hit is dropped and computed again. log_stats: whether look-ups are counted.
    Raises NotOneGroup, InvalidCount, InvalidConfig, WrongArgument.
    """

    def __init__(
        self,
        kv_cache_config: Any,
        max_model_len: int,
        enable_caching: bool = True,
        caching_hash_algo: str = "builtin",
        use_eagle: bool = False,
        log_stats: bool = False,
        *,
        backend: BackendName = "python",
    ) -> None:
        groups = kv_cache_config.kv_cache_groups
        if len(groups) != 1:
            raise errors.NotOneGroup(num_groups=len(groups))
        check_kind("caching_hash_algo", caching_hash_algo, str)
        self.max_model_len = read_count("max_model_len", max_model_len, 1)
        self.num_gpu_blocks = kv_cache_config.num_blocks
        self.enable_caching = enable_caching
        self.caching_hash_fn: HashFunction = sha256 if caching_hash_algo == "sha256" else hash
        self.use_eagle = use_eagle
        self.log_stats = log_stats
        self.block_pool = BlockPool(self.num_gpu_blocks, enable_caching, backend=backend)
        self.specialized_manager = get_specialized_manager(groups[0].kv_cache_spec, self.block_pool)
        self.block_size = self.specialized_manager.block_size
        self.max_num_blocks_per_req = -(-self.max_model_len // self.block_size)
        self.prefix_cache_stats = PrefixCacheStats() if log_stats else None
        self.req_to_blocks = ListsByRequest()
        self.req_to_block_hashes = ListsByRequest()
        self.num_cached_block: dict[str, int] = {}

    @property
    def usage(self) -> float:
        """The share of all blocks that are in use; the null block counts."""
        return self.block_pool.get_usage()

    def make_prefix_cache_stats(self) -> PrefixCacheStats | None:
        """Return the look-ups since the last call, in blocks; None if they are not logged."""
        stats = self.prefix_cache_stats
        self.prefix_cache_stats = PrefixCacheStats() if self.log_stats else None
        return stats

    def get_computed_blocks(self, request: Any) -> tuple[list[KVCacheBlock], int]:
        """Return the longest cached prefix that leaves a token to compute, and its token count.

        The call adds no owners. The hit is empty if caching is off, or if the request wants
        log-probabilities of its prompt.
        """
        if not self.enable_caching:
            return [], 0
        if not (hashes := self.req_to_block_hashes[request.request_id]):
            found = hash_request_tokens(self.caching_hash_fn, self.block_size, request)
            block_hashes.keys_of(found, self.block_pool.backend)
            hashes = self.req_to_block_hashes.setdefault(request.request_id, hashes)
            hashes += found
        sampling = getattr(request, "sampling_params", None)
        if getattr(sampling, "prompt_logprobs", None) is not None:
            self._count(0, 0)
            return [], 0
        num_queried = len(hashes)
        if num_queried and num_queried * self.block_size == request.num_tokens:
            num_queried -= 1
        find = self.specialized_manager.find_longest_cache_hit
        blocks = find(hashes[:num_queried], num_dropped=int(self.use_eagle))
        self._count(num_queried, len(blocks))
        return blocks, len(blocks) * self.block_size

    def allocate_slots(
        self,
        request: Any,
        num_tokens: int,
        new_computed_blocks: Sequence[KVCacheBlock] | None = None,
        num_lookahead_tokens: int = 0,
    ) -> list[KVCacheBlock] | None:
        """Schedule the next tokens of a request; returns the new blocks, or None.

        new_computed_blocks: from `get_computed_blocks`. num_tokens: includes speculative tokens.
        Blocks that no query sees any more are freed first, even if the request does not fit. Full
        blocks without a speculative token are published. Raises InvalidCount, ForeignBlock,
        HitsWithoutCaching, HitsWhileRunning, StaleHit, TooLong, TokensMissing.
        """
        counted, ahead = request.num_computed_tokens, num_lookahead_tokens
        if not type(num_tokens) is type(counted) is type(ahead) is int or (
            num_tokens < 1 or counted < 0 or ahead < 0
        ):
            num_tokens = read_count("num_tokens", num_tokens, 1)
            counted = read_count("num_computed_tokens", counted)
            ahead = read_count("num_lookahead_tokens", ahead)
        request_id, size, hits = request.request_id, self.block_size, new_computed_blocks or ()
        places, hit_keys = self._check_hits(request, hits) if hits else ((), ())
        table = self.req_to_blocks[request_id]
        held, first = len(table) + len(hits), self.num_cached_block.get(request_id, len(hits))
        end = counted + len(hits) * size + num_tokens
        lacking = (end + ahead - 1) // size + 1 - held
        seen = table.copy() if self.specialized_manager.group.is_windowed else []
        skipped = self.specialized_manager.remove_skipped_blocks(seen, counted) if seen else []
        records: Records = []
        num_new = self._grant(request, held, lacking, places, skipped) if lacking > 0 else 0
        if num_new is not None and self.enable_caching and end // size > first:
            num_drafts = len(getattr(request, "spec_token_ids", None) or ())
            num_full = min((end - num_drafts) // size, held + num_new)
            made, records = self._hash(request, first, num_full)
            keys = block_hashes.keys_of(records, self.block_pool.backend)
        if skipped:
            self.block_pool.free_blocks(skipped)
            table[:] = seen
        if num_new is None:
            return None
        new_blocks = self._take(request, held, num_new, places, hit_keys) if num_new else []
        if new_blocks and not table:
            self.req_to_blocks[request_id] = table
            if self.enable_caching:
                self.num_cached_block[request_id] = first
            table += hits
        table += new_blocks
        if records:
            self.req_to_block_hashes.setdefault(request_id, []).extend(made)
            self.num_cached_block[request_id] = behind = first + len(records)
            self.block_pool.publish(table[first:behind], records, keys)
        return new_blocks

    def free(self, request: Any) -> None:
        """Free a request's blocks, tail first; does nothing if it has none."""
        self.block_pool.free_blocks(self.req_to_blocks[request.request_id][::-1])
        self.req_to_blocks.pop(request.request_id, None)
        self.num_cached_block.pop(request.request_id, None)

    def reset_prefix_cache(self) -> bool:
        """Forget every hash; False, and nothing happens, while any block is used."""
        done = self.block_pool.reset_prefix_cache()
        if done and self.prefix_cache_stats is not None:
            self.prefix_cache_stats = replace(self.prefix_cache_stats, reset=True)
        return done

    def get_num_common_prefix_blocks(self, request: Any, num_running_requests: int) -> int:
        """Return how many leading blocks all running requests own. Raises NotRunningRequest."""
        status = getattr(request, "status", None)
        if getattr(status, "name", status) != "RUNNING":
            raise errors.NotRunningRequest(request=request.request_id, status=status)
        table = self.req_to_blocks[request.request_id]
        return len([*takewhile(lambda block: block.ref_cnt == num_running_requests, table)])

    def free_block_hashes(self, request: Any) -> None:
        """Forget the hashes of a finished request; a preempted one keeps them."""
        self.req_to_block_hashes.pop(request.request_id, None)

    def take_batch(self) -> Batch:
        """Close and number the open batch; it holds the commands since the previous one."""
        return self.block_pool.backing.take_batch()

    def check(self) -> None:
        """Raise InvariantViolation unless the pool is sound and its owners match the tables."""
        held = [block for table in self.req_to_blocks.values() for block in table]
        self.block_pool.backing.check(self.block_pool.places(held))

    def _check_hits(self, request: Any, hits: Blocks) -> tuple[list[int], list[bytes]]:
        """Return the ids of a request's hits after leading null blocks, and their expected keys.

        Raises HitsWithoutCaching, ForeignBlock, HitsWhileRunning, StaleHit.
        """
        name, count = request.request_id, len(hits)
        if not self.enable_caching:
            raise errors.HitsWithoutCaching(request=name, num_blocks=count)
        places = self.block_pool.check_own(hits)
        if self.req_to_blocks.get(request.request_id):
            raise errors.HitsWhileRunning(request=name, num_blocks=count)
        num_known = len(self.req_to_block_hashes[request.request_id])
        num_hashes = max(num_known, request.num_tokens // self.block_size)
        if num_hashes < count:
            raise errors.StaleHit(request=name, block=places[num_hashes], position=num_hashes)
        most_null = skipped_blocks(self.specialized_manager.group, count * self.block_size)
        num_null = len([*takewhile(lambda place: place == 0, places[:most_null])])
        records = self._hash(request, num_null, count)[1]
        return places[num_null:], block_hashes.keys_of(records, self.block_pool.backend)

    def _grant(
        self, request: Any, held: int, more: int, hits: Sequence[int], skipped: Blocks
    ) -> int | None:
        """Return how many new blocks to take within the model's length; None if too few are free.

        Counts as if the hits were touched and the skipped blocks freed. Raises TooLong.
        """
        core, most = self.block_pool.backing.blocks, self.max_num_blocks_per_req
        spare = core.num_free("device") - more
        if hits:
            spare -= core.ref_counts([place for place in hits if place], "device").count(0)
        if spare + [block.ref_cnt for block in skipped].count(1) < 0:
            return None
        if held >= most:
            fields = {"needed": more, "max_model_len": self.max_model_len, "most": most}
            raise errors.TooLong(request=request.request_id, held=held, **fields)
        return min(more, most - held)

    def _hash(self, request: Any, first: int, num_full: int) -> tuple[Records, Records]:
        """Return the missing hashes of a request's first num_full blocks, and those from first on.

        If the request has no hashes yet, all of its full blocks are hashed, as by a look-up.
        Raises TokensMissing.
        """
        known, size = self.req_to_block_hashes[request.request_id], self.block_size
        if num_full <= first:
            return [], []
        wanted = num_full if known else max(num_full, len(request.all_token_ids) // size)
        made = hash_more_tokens(self.caching_hash_fn, size, request, known, wanted)
        records = known[first:num_full] + made[max(0, first - len(known)) :]
        return made, records[: num_full - first]

    def _take(
        self, request: Any, held: int, count: int, hits: Sequence[int], keys: Sequence[bytes]
    ) -> list[KVCacheBlock]:
        """Take count blocks, and touch hits that have these keys. Raises StaleHit."""
        try:
            taken = self.block_pool.backing.blocks.admit(hits, count, keys, "device")
        except (WrongKey, UnknownBlock) as error:
            block: Any = error.fields["block"]
            fields = {"block": block, "position": held - len(hits) + hits.index(block)}
            raise errors.StaleHit(request=request.request_id, **fields) from None
        assert not isinstance(taken, Refused)
        return [self.block_pool.blocks[place] for place in taken]

    def _count(self, queries: int, hits: int) -> None:
        """Count a look-up and its queried and found blocks."""
        old = self.prefix_cache_stats
        if old is not None:
            requests, queries, hits = old.requests + 1, old.queries + queries, old.hits + hits
            self.prefix_cache_stats = PrefixCacheStats(requests, queries, hits, reset=old.reset)
