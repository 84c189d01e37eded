# SPDX-License-Identifier: Apache-2.0
"""vLLM 0.8.5's V1 `KVCacheManager`, over the core's pool.

Rules: a call is planned on what is there (`slot_plan.py`), then done in the pool's own transitions:
trim, touch, take, publish. What does not fit is None, and only a window's trim stays of it; a call
that raises has changed nothing. Tables and lists of hashes are handed out and keep growing; hashes
stay through a preemption. Blocks are freed tail first, with caching and without. Source: S001-71 to
85, X-04. Twin: none.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, TypeVar

from msgspec.structs import replace as evolve

from kvcore.arguments import read_count
from kvcore.commands import Batch
from kvcore.errors import WrongArgument
from kvcore.legacy.backing import BackendName
from kvcore.legacy.block_hashes import (
    BlockHashType,
    HashFunction,
    hash_request_tokens,
    sha256,
    with_keys,
)
from kvcore.legacy.kv_block_pool import BlockPool
from kvcore.legacy.kv_cache_errors import NotOneGroup, NotRunningRequest
from kvcore.legacy.live_blocks import KVCacheBlock
from kvcore.legacy.slot_plan import SlotPlan, plan_slots
from kvcore.legacy.specialized_manager import get_specialized_manager
from kvcore.values import PrefixCacheStats

__all__ = ["BlockPool", "KVCacheManager"]

T = TypeVar("T")
HASH_FUNCTIONS: dict[str, HashFunction] = {"builtin": hash, "sha256": sha256}


class ListsByRequest(dict[str, list[T]]):
    """Lists by request; one that is not known has an empty one, and asking changes nothing."""

    def __missing__(self, request_id: str) -> list[T]:
        return []


class KVCacheManager:
    """Decides which block holds which tokens of an engine's requests; touches no tensor.

    kv_cache_config: of one group; its num_blocks are the pool's, the null block included.
    use_eagle: a hit leaves its last block to be computed. log_stats: whether
    `make_prefix_cache_stats` says anything. backend: of the pool.
    Raises NotOneGroup, InvalidCount, InvalidConfig, WrongArgument.
    """

    def __init__(
        self,
        kv_cache_config: Any,
        max_model_len: int,
        enable_caching: bool = True,
        caching_hash_algo: Literal["builtin", "sha256"] = "builtin",
        use_eagle: bool = False,
        log_stats: bool = False,
        *,
        backend: BackendName = "python",
    ) -> None:
        groups = kv_cache_config.kv_cache_groups
        if len(groups) != 1:
            raise NotOneGroup(num_groups=len(groups))
        if caching_hash_algo not in HASH_FUNCTIONS:
            expected = f"one of {', '.join(HASH_FUNCTIONS)}"
            value = repr(caching_hash_algo)
            raise WrongArgument(name="caching_hash_algo", expected=expected, value=value)
        self.max_model_len = read_count("max_model_len", max_model_len, 1)
        self.num_gpu_blocks = kv_cache_config.num_blocks
        self.enable_caching = enable_caching
        self.caching_hash_fn = HASH_FUNCTIONS[caching_hash_algo]
        self.use_eagle = use_eagle
        self.log_stats = log_stats
        self.block_pool = BlockPool(self.num_gpu_blocks, enable_caching, backend=backend)
        spec = groups[0].kv_cache_spec
        self.specialized_manager = get_specialized_manager(spec, self.block_pool)
        self.block_size = self.specialized_manager.block_size
        self.max_num_blocks_per_req = -(-self.max_model_len // self.block_size)
        self.prefix_cache_stats = PrefixCacheStats() if log_stats else None
        self.req_to_blocks: ListsByRequest[KVCacheBlock] = ListsByRequest()
        self.req_to_block_hashes: ListsByRequest[BlockHashType] = ListsByRequest()
        self.num_cached_block: dict[str, int] = {}

    def __repr__(self) -> str:
        free, usable = self.block_pool.get_num_free_blocks(), self.num_gpu_blocks - 1
        return f"<KVCacheManager of 0.8.5: {free} of {usable} blocks free>"

    @property
    def usage(self) -> float:
        """Share of all blocks that are in use; the null block is."""
        return self.block_pool.get_usage()

    def make_prefix_cache_stats(self) -> PrefixCacheStats | None:
        """The look-ups since the last call, counted in blocks; None where they are not logged."""
        stats = self.prefix_cache_stats
        if stats is not None:
            self.prefix_cache_stats = PrefixCacheStats()
        return stats

    def get_computed_blocks(self, request: Any) -> tuple[list[KVCacheBlock], int]:
        """The longest cached prefix that leaves a token to compute, and its tokens.

        Nobody owns the blocks yet. Nothing where caching is off, or where the request wants
        log-probabilities of its prompt.
        """
        if not self.enable_caching:
            return [], 0
        hashes = self.req_to_block_hashes.get(request.request_id)
        if not hashes:
            found = hash_request_tokens(self.caching_hash_fn, self.block_size, request)
            hashes = self._keep_hashes(request.request_id, with_keys(found))
        if self._wants_prompt_logprobs(request):
            self._count(requests=1)
            return [], 0
        asked = len(hashes)
        if asked and asked * self.block_size == request.num_tokens:
            asked -= 1
        blocks = self.specialized_manager.find_longest_cache_hit(
            hashes[:asked], num_dropped=int(self.use_eagle)
        )
        self._count(requests=1, queries=asked, hits=len(blocks))
        return blocks, len(blocks) * self.block_size

    def allocate_slots(
        self,
        request: Any,
        num_tokens: int,
        new_computed_blocks: Sequence[KVCacheBlock] | None = None,
        num_lookahead_tokens: int = 0,
    ) -> list[KVCacheBlock] | None:
        """Schedule the next tokens of a request; the blocks that are new, or None.

        new_computed_blocks: of `get_computed_blocks`. num_tokens: with the drafts. What no query
        sees any more is given back first, also where the rest does not fit. Full blocks without a
        draft token are published. Raises InvalidCount, ForeignBlock, HitsWithoutCaching,
        HitsWhileRunning, StaleHit, TooLong, TokensMissing.
        """
        plan = plan_slots(self, request, num_tokens, new_computed_blocks, num_lookahead_tokens)
        self._trim(request)
        if not plan.fits:
            return None
        return self._carry_out(request.request_id, plan)

    def free(self, request: Any) -> None:
        """Give back a request's blocks, tail first; one that holds nothing is left as it is."""
        blocks = self.req_to_blocks[request.request_id]
        self.block_pool.free_blocks(reversed(blocks))
        self.req_to_blocks.pop(request.request_id, None)
        self.num_cached_block.pop(request.request_id, None)

    def reset_prefix_cache(self) -> bool:
        """Forget every hash; False, and nothing happens, while any block is used."""
        if not self.block_pool.reset_prefix_cache():
            return False
        if self.prefix_cache_stats is not None:
            self.prefix_cache_stats = evolve(self.prefix_cache_stats, reset=True)
        return True

    def get_num_common_prefix_blocks(self, request: Any, num_running_requests: int) -> int:
        """Leading blocks of a running request that so many own. Raises NotRunningRequest."""
        status = getattr(request, "status", None)
        if getattr(status, "name", status) != "RUNNING":
            raise NotRunningRequest(request=repr(request.request_id), status=status)
        count = 0
        for block in self.req_to_blocks[request.request_id]:
            if block.ref_cnt != num_running_requests:
                break
            count += 1
        return count

    def free_block_hashes(self, request: Any) -> None:
        """Forget the hashes of a finished request; a preempted one keeps them."""
        self.req_to_block_hashes.pop(request.request_id, None)

    def take_batch(self) -> Batch:
        """Close and number the open batch: the commands since the last one."""
        return self.block_pool.backing.take_batch()

    def check(self) -> None:
        """Raise InvariantViolation unless the pool is sound and its owners are these tables."""
        held = [block for table in self.req_to_blocks.values() for block in table]
        self.block_pool.backing.check(self.block_pool.places(held))

    def _trim(self, request: Any) -> None:
        """Give back what no query of a request sees any more."""
        table, counted = self.req_to_blocks[request.request_id], request.num_computed_tokens
        places = self.specialized_manager.skipped_places(table, counted)
        if places:
            self.block_pool.free_blocks([table[place] for place in places])
            self.specialized_manager.remove_skipped_blocks(table, counted)

    def _carry_out(self, request_id: str, plan: SlotPlan) -> list[KVCacheBlock]:
        pool = self.block_pool
        if plan.hits:
            null = pool.null_block
            pool.backing.touch([block.block_id for block in plan.hits if block is not null])
        new_blocks = pool.get_new_blocks(plan.num_new) if plan.num_new else []
        table = self.req_to_blocks.setdefault(request_id, [])
        table += plan.hits
        table += new_blocks
        if self.enable_caching:
            num_full = plan.first_uncached + len(plan.full)
            if plan.full:
                full = table[plan.first_uncached : num_full]
                num_fresh = num_full - max(plan.first_uncached, len(table) - plan.num_new)
                pool.publish(full, plan.full, max(0, num_fresh))
            if plan.new_hashes:
                self._keep_hashes(request_id, list(plan.new_hashes))
            self.num_cached_block[request_id] = num_full
        return new_blocks

    def _keep_hashes(self, request_id: str, found: list[BlockHashType]) -> list[BlockHashType]:
        hashes = self.req_to_block_hashes.setdefault(request_id, [])
        hashes += found
        return hashes

    def _count(self, *, requests: int, queries: int = 0, hits: int = 0) -> None:
        stats = self.prefix_cache_stats
        if stats is not None:
            self.prefix_cache_stats = evolve(
                stats,
                requests=stats.requests + requests,
                queries=stats.queries + queries,
                hits=stats.hits + hits,
            )

    @staticmethod
    def _wants_prompt_logprobs(request: Any) -> bool:
        sampling = getattr(request, "sampling_params", None)
        return getattr(sampling, "prompt_logprobs", None) is not None
