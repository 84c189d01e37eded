# SPDX-License-Identifier: Apache-2.0
"""vLLM 0.8.5's V1 `KVCacheManager`, over the core's pool.

Rules: what can raise is asked first (`slot_plan.py`), the rest are the pool's own transitions: to
release, admit or take, publish. What does not fit is None, whatever else is wrong with it, and only
a window's trim stays of it; a call that raises has changed nothing. Tables and lists of hashes are
handed out and keep growing; hashes stay through a preemption. Blocks are freed tail first, with
caching and without. Source: S001-71 to 85, X-04. Twin: none.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

from msgspec.structs import replace as evolve

from kvcore.legacy.blocks.blocks import BackendName
from kvcore.legacy.v1_0_8.block_hashes import (
    BlockHashType,
    HashFunction,
    hash_request_tokens,
    keys_of,
    sha256,
)
from kvcore.legacy.v1_0_8.block_pool import BlockPool
from kvcore.legacy.v1_0_8.errors import NotOneGroup, NotRunningRequest
from kvcore.legacy.v1_0_8.live_blocks import KVCacheBlock
from kvcore.legacy.v1_0_8.slot_plan import (
    NO_HITS,
    Hits,
    check_hits,
    fits,
    hash_full,
    limit_new,
    read_counts,
)
from kvcore.legacy.v1_0_8.specialized_manager import get_specialized_manager
from kvcore.types.arguments import read_count
from kvcore.types.commands import Batch
from kvcore.types.errors import KvcoreError, UnknownBlock, WrongArgument, WrongKey
from kvcore.types.values import PrefixCacheStats, Refused

__all__ = ["BlockPool", "KVCacheManager"]

T = TypeVar("T")
NOTHING: Sequence[Any] = ()


class ListsByRequest(dict[str, list[T]]):
    """Lists by request; one that is not known has an empty one, and asking changes nothing."""

    def __missing__(self, request_id: str) -> list[T]:
        return []


class KVCacheManager:
    """Decides which block holds which tokens of an engine's requests; touches no tensor.

    kv_cache_config: of one group; its num_blocks are the pool's, the null block included.
    caching_hash_algo: "sha256"; whatever else it is, Python's `hash`. use_eagle: a hit leaves its
    last block to be computed. log_stats: whether `make_prefix_cache_stats` says anything.
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
            raise NotOneGroup(num_groups=len(groups))
        if not isinstance(caching_hash_algo, str):
            value = repr(caching_hash_algo)
            raise WrongArgument(name="caching_hash_algo", expected="a name", value=value)
        self.max_model_len = read_count("max_model_len", max_model_len, 1)
        self.num_gpu_blocks = kv_cache_config.num_blocks
        self.enable_caching = enable_caching
        self.caching_hash_fn: HashFunction = sha256 if caching_hash_algo == "sha256" else hash
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
        request_id = request.request_id
        if not self.req_to_block_hashes.get(request_id):
            found = hash_request_tokens(self.caching_hash_fn, self.block_size, request)
            keys_of(found, self.block_pool.backend)
            self._keep_hashes(request_id, found)
        if self._wants_prompt_logprobs(request):
            self._count(requests=1)
            return [], 0
        hashes = self.req_to_block_hashes[request_id]
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
        counted, ahead = request.num_computed_tokens, num_lookahead_tokens
        if not type(num_tokens) is type(counted) is type(ahead) is int or (
            num_tokens < 1 or counted < 0 or ahead < 0
        ):
            num_tokens, counted, ahead = read_counts(num_tokens, counted, ahead)
        request_id, size, brought = request.request_id, self.block_size, new_computed_blocks or ()
        hits = check_hits(self, request, brought) if brought else NO_HITS
        table, num_hits = self.req_to_blocks[request_id], len(brought)
        held = len(table) + num_hits
        end = counted + num_hits * size + num_tokens
        num_new = (end + ahead - 1) // size + 1 - held
        if num_new <= 0:
            num_new = 0
        elif held + num_new > self.max_num_blocks_per_req:
            num_new = limit_new(self, request, num_new, hits)
        first, made, keys = 0, NOTHING, NOTHING
        if self.enable_caching:
            first = self.num_cached_block.get(request_id, num_hits)
            if end // size > first:
                try:
                    made, keys = hash_full(self, request, first, end, held + num_new)
                except KvcoreError:
                    if fits(self, request, num_new, hits):
                        raise
        if self.specialized_manager.has_window:
            self._trim(request_id, counted)
        new_blocks: list[KVCacheBlock] = []
        if num_new or brought:
            taken = self._take(request, num_new, hits)
            if type(taken) is Refused:
                return None
            new_blocks = self.block_pool.blocks_at(taken)
            if not table:
                self.req_to_blocks[request_id] = table
                if self.enable_caching:
                    self.num_cached_block[request_id] = first
            table += brought
            table += new_blocks
        if keys:
            self._publish(request_id, first, made, keys)
        return new_blocks

    def free(self, request: Any) -> None:
        """Give back a request's blocks, tail first; one that holds nothing is left as it is."""
        blocks = self.req_to_blocks[request.request_id]
        self.block_pool.free_blocks(blocks[::-1])
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

    def _trim(self, request_id: str, counted: int) -> None:
        """Give back what no query of a request sees any more."""
        table = self.req_to_blocks[request_id]
        places = self.specialized_manager.skipped_places(table, counted)
        if places:
            self.block_pool.free_blocks([table[place] for place in places])
            self.specialized_manager.remove_skipped_blocks(table, counted)

    def _take(self, request: Any, num_new: int, hits: Hits) -> tuple[int, ...] | Refused:
        """Take so many new blocks, and touch hits that have their keys. Raises StaleHit."""
        ask = self.block_pool.backing.blocks
        if hits is NO_HITS:
            return ask.take(num_new, "device")
        try:
            return ask.admit(hits.places, num_new, hits.keys, "device")
        except (WrongKey, UnknownBlock) as error:
            block: Any = error.fields["block"]
            raise hits.stale(request, block) from None

    def _publish(
        self, request_id: str, first: int, made: Sequence[BlockHashType], keys: Sequence[bytes]
    ) -> None:
        """Make blocks of a request findable from a place on; new hashes join its list."""
        hashes, behind = self._keep_hashes(request_id, made), first + len(keys)
        blocks = self.req_to_blocks[request_id][first:behind]
        self.block_pool.publish(blocks, hashes[first:behind], keys)
        self.num_cached_block[request_id] = behind

    def _keep_hashes(self, request_id: str, found: Sequence[BlockHashType]) -> list[BlockHashType]:
        """Let hashes join the list of a request, which is handed out."""
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
