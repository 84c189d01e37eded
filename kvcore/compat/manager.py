# SPDX-License-Identifier: Apache-2.0
"""vLLM's KVCacheManager by name, order of parameters and meaning, over the core's.

If a request does not fit, the call returns None; misuse is a `KvcoreError`. Each call first
synchronises the core with the request object (`request_registry.py`) and closes a finished batch
(`steps.py`); a call that raises or refuses does only that. Empty results are always the same empty
object. Source: S000-01 to S000-61; X-06, X-14.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Literal

from kvcore.compat.allocation_span import (
    find_span,
    new_blocks,
    withdraw,
)
from kvcore.compat.blocks import KVCacheBlocks, read_hit
from kvcore.compat.decoded_tokens import DecodedTokens
from kvcore.compat.engine_request import EngineRequest, see, skips_reading
from kvcore.compat.registered_request import RegisteredRequest
from kvcore.compat.request_registry import RequestRegistry
from kvcore.compat.steps import Steps
from kvcore.manager import KVCacheManager as Core
from kvcore.types.arguments import read_count, read_ints, read_list
from kvcore.types.commands import Batch
from kvcore.types.config import Config
from kvcore.types.engine_counts import AllocationSpan, RequestCounts, TokenCounts
from kvcore.types.errors import InvalidConfig
from kvcore.types.events import Event
from kvcore.types.values import Hit, PrefixCacheStats, Refused, Verdict
from kvcore.types.values import KVCacheBlocks as CoreBlocks

ZERO: int = 0  # compared by identity, for speed: another 0 takes the long path


class KVCacheManager(DecodedTokens):
    """Decides which block holds which tokens of an engine's requests; never touches a tensor.

    log_stats: whether look-ups are counted. own_hashes: whether to use a request's block_hashes if
    it has them; 32 bytes each, one per `hash_block_size` tokens of the config. keep_tokens: if
    False, the core has zeros for the tokens of a request with hashes, unless there are events: no
    decision depends on them, and a long prompt need not be read. keep_commands: whether
    `take_commands` returns the batches. ends_steps: whether the engine calls `step_ends` or
    `new_step_starts` between any two schedules, so that no call reads counts to find out.
    reads_tables: whether the engine reads `get_block_ids` again after `allocate_slots`, and clears
    and copies blocks itself. last_refusal: why the last `allocate_slots` returned None. last_hit:
    the hit of the last look-up that read the cache. Raises InvalidConfig if blocks would be
    replaced in tables and the engine neither gets the commands nor, where that is enough, reads the
    tables again.
    """

    def __init__(
        self,
        config: Config,
        *,
        backend: Literal["rust", "python"] | None = None,
        log_stats: bool = True,
        own_hashes: bool = True,
        keep_tokens: bool = True,
        keep_commands: bool = False,
        ends_steps: bool = False,
        reads_tables: bool = False,
    ) -> None:
        if not keep_commands:
            _check_followed(config, reads_tables=reads_tables)
        core = Core(config, backend)
        steps = Steps(core, keep_commands=keep_commands, are_reported=ends_steps)
        self._registry = RequestRegistry(
            core, steps, own_hashes=own_hashes, keep_tokens=keep_tokens
        )
        no_blocks = KVCacheBlocks(((),) * len(config.groups), steps.has_key)
        super().__init__(core, steps, self._registry.known, no_blocks)
        self.config = config
        self.enable_caching = config.enable_caching
        self.max_model_len = config.max_model_len
        self.log_stats = log_stats
        self.last_hit: Hit | None = None

    def __repr__(self) -> str:
        return f"<compat of {self._core!r}>"

    @property
    def core(self) -> Core:
        """The underlying manager, after all calls so far; get it again after further calls."""
        self._steps.settle()
        return self._core

    @property
    def usage(self) -> float:
        """Share of the usable blocks that have an owner, 0.0 to 1.0."""
        return self._core.usage

    @property
    def is_step_over(self) -> bool:
        """Whether the counts of the first request of the open step show that it is over."""
        return self._steps.is_over

    def make_prefix_cache_stats(self) -> PrefixCacheStats | None:
        """Return the look-up statistics since the last call; None if they are not logged."""
        return self._core.take_stats() if self.log_stats else None

    def get_computed_blocks(self, request: EngineRequest) -> tuple[KVCacheBlocks, int]:
        """Return the longest cached prefix that leaves a token to compute, and its tokens.

        Empty if caching is off, the request declines hits, or it has no tokens. The blocks do not
        get an owner yet.
        """
        if not self.enable_caching or skips_reading(request):
            return self.empty_kv_cache_blocks, 0
        seen = see(request)
        if not seen.num_tokens:
            return self.empty_kv_cache_blocks, 0
        self._steps.notice(seen)
        self._registry.bring(request, seen)
        self.last_hit = hit = self._core.get_computed_blocks(seen.name)
        return self.create_kv_cache_blocks(hit.blocks.blocks), hit.num_tokens

    def allocate_slots(
        self,
        request: EngineRequest,
        num_new_tokens: int,
        num_new_computed_tokens: int = 0,
        new_computed_blocks: KVCacheBlocks | None = None,
        num_lookahead_tokens: int = 0,
        num_external_computed_tokens: int = 0,
        delay_cache_blocks: bool = False,
        num_encoder_tokens: int = 0,
        full_sequence_must_fit: bool = False,
        *,
        reserved_blocks: int = 0,
        checkpoint: bool | None = None,
    ) -> KVCacheBlocks | None:
        """Schedule the next tokens of a request; return the new blocks of its tables, or None.

        num_new_computed_tokens, new_computed_blocks: of `get_computed_blocks`. New tokens past
        num_tokens are drafts if `spec_token_ids` has them, else to come. checkpoint: no longer None
        once it was True. The rest, and errors: the core's, plus BehindWindow and TokensChanged.
        """
        if (
            num_new_tokens == 1
            and checkpoint is None is new_computed_blocks
            and num_new_computed_tokens is num_lookahead_tokens is num_external_computed_tokens
            and num_external_computed_tokens is num_encoder_tokens is reserved_blocks is ZERO
            and delay_cache_blocks is full_sequence_must_fit is False
            and (grown := self.append(request))
        ):
            return grown
        counts = TokenCounts(
            num_new=read_count("num_new_tokens", num_new_tokens),
            num_hit=read_count("num_new_computed_tokens", num_new_computed_tokens),
            num_external=read_count("num_external_computed_tokens", num_external_computed_tokens),
            num_lookahead=read_count("num_lookahead_tokens", num_lookahead_tokens),
        )
        looked_up = self.enable_caching and not skips_reading(request)
        hit = read_hit(new_computed_blocks, counts.num_hit, looked_up=looked_up)
        self._steps.notice(seen := see(request))
        known = self._registry.bring(request, seen)
        span = find_span(self._core, self._steps, known, seen, counts)
        got = self._allocate(
            *(known, seen, span, hit),
            delay_cache_blocks=delay_cache_blocks or span.again,
            num_encoder_tokens=num_encoder_tokens,
            full_sequence_must_fit=full_sequence_must_fit,
            reserved_blocks=reserved_blocks,
            checkpoint=bool(checkpoint),
        )
        self.last_refusal = got if isinstance(got, Refused) else None
        if isinstance(got, Refused):
            return None
        self._steps.schedule(seen.name, (request, seen.num_tokens, seen.num_computed, span.start))
        counted = span.start if counts.num_new else seen.num_computed
        self._registry.hold(known, seen, counted, span.end)
        if not (span.again or delay_cache_blocks):
            self._registry.note_counts(known, seen.name)
        elif not delay_cache_blocks:
            self._steps.publish_later(seen.name, span.end)
        return self.create_kv_cache_blocks(new_blocks(self._core, span, got))

    def free(self, request: EngineRequest) -> None:
        """Give back a request's blocks, tail first; a request that holds nothing is unchanged.

        A finished request is forgotten. If it is freed in the step that scheduled it, that step
        does not compute it. Nothing past a lowered num_computed_tokens stays findable, so reset
        that after this call. Raises HitInOpenBatch.
        """
        steps, known = self._steps, self._known.get(getattr(request, "request_id", ""))
        if known is None or steps.first is not None or known.request is not request:
            seen = see(request)
            if known is None:
                return
            steps.notice(seen)
        if request.num_computed_tokens < known.least_computed:
            withdraw(self._core, steps, see(request))
        name = request.request_id
        self._core.free(name)
        steps.leave(name)
        self._registry.leave(known, request, name)

    def remove_skipped_blocks(self, request_id: str, total_computed_tokens: int) -> None:
        """Give back the blocks that no query at num_computed_tokens or later sees.

        A count above the scheduled tokens is limited to them.
        """
        count = read_count("total_computed_tokens", total_computed_tokens)
        if request_id not in self._registry:
            return
        self._steps.notice_known(request_id)
        count = min(count, self._core.num_computed_tokens(request_id))
        if count > self._core.num_tokens(request_id):  # some tokens may have arrived since
            request = self._known[request_id].request
            self._registry.bring(request, see(request), count)
            count = min(count, self._core.num_tokens(request_id))
        self._core.remove_skipped_blocks(request_id, count)
        self._steps.change()

    def evict_blocks(self, block_ids: Iterable[int]) -> None:
        """Forget the keys of blocks, which keep their owners; the null block has no key."""
        blocks = read_ints(read_list("block_ids", block_ids))
        self.core.evict_blocks([b for b in blocks if b != 0 or not self.config.null_block])
        self._steps.change()

    def reset_prefix_cache(self) -> bool:
        """Forget every key; False, without any change, while a block has an owner."""
        self._steps.change()
        return self.core.reset_prefix_cache()

    def get_num_common_prefix_blocks(self, running_request_id: str) -> list[int]:
        """Count, per group, the leading blocks that all requests with blocks hold."""
        if running_request_id not in self._registry:
            return [0] * len(self.config.groups)
        return self._core.get_num_common_prefix_blocks(running_request_id)

    def take_events(self) -> list[Event]:
        """Return the events since the last call."""
        return list(self.core.take_events())

    def get_blocks(self, request_id: str) -> KVCacheBlocks:
        """Return the blocks of a request; empty if it holds none or is unknown."""
        if request_id not in self._known:
            return self.empty_kv_cache_blocks
        return self.create_kv_cache_blocks(self._core.get_blocks(request_id).blocks)

    def get_block_ids(self, request_id: str) -> tuple[list[int], ...]:
        """Return the same as one list per group."""
        if request_id not in self._known:
            return self.empty_kv_cache_blocks.get_block_ids()
        return self._core.get_block_ids(request_id)

    def cache_blocks(self, request: EngineRequest, num_computed_tokens: int) -> None:
        """Publish a request's full blocks up to a token count, after delayed caching.

        Its tokens are read up to there.
        """
        if not self.enable_caching or self._is_in_block(request, num_computed_tokens):
            return
        decoding = self._registry.decoding(request)
        count = read_count("num_computed_tokens", num_computed_tokens)
        seen = see(request)
        self._steps.notice(seen)
        known = self._registry.bring(request, seen, count)
        counted = self._core.num_computed_tokens(seen.name)
        self._core.cache_blocks(seen.name, counted if counted < count <= known.end else count)
        if decoding is not None:
            self._registry.note_counts(known, seen.name)

    def create_kv_cache_blocks(self, blocks: Sequence[Iterable[int]]) -> KVCacheBlocks:
        """Return blocks as a result; the shared empty object if no group has any."""
        groups = tuple(map(tuple, blocks))
        return KVCacheBlocks(groups, self._has_key) if any(groups) else self.empty_kv_cache_blocks

    def take_new_block_ids(self) -> list[int]:
        """Return the blocks that full-attention groups got since the last call, for zeroing.

        Recorded with `Config.record_new_blocks`.
        """
        return self._core.take_new_block_ids()

    def new_step_starts(self) -> None:
        """Report that a step begins, so that everything scheduled before is computed. Raises
        UnreadCommands.
        """
        self._steps.close()

    def step_ends(self) -> None:
        """Report that a step is scheduled, so that a request freed from now on is computed in it.

        For engines that know this before their counts show it. Raises UnreadCommands.
        """
        self._steps.close()

    def take_commands(self) -> list[Batch]:
        """Close the open batch and return, in order, all batches not returned yet.

        For a runtime that applies them; rows are those of `core.get_row`. Raises CommandsNotKept.
        """
        return self._steps.take()

    def _allocate(
        self,
        known: RegisteredRequest,
        seen: RequestCounts,
        span: AllocationSpan,
        hit: Hit | None,
        **options: Any,
    ) -> CoreBlocks | Refused:
        """Allocate in the core, with drafts for positions past the tokens; on failure the drafts
        are dropped.

        reserved_blocks apply only to this call's blocks, as in vLLM, not to the full-sequence gate.
        """
        if not (span.num_new or span.num_external):
            return self._grant(seen, full_sequence_must_fit=options["full_sequence_must_fit"])
        to_come = self._registry.put_drafts(known, seen, span.end - seen.num_tokens)
        options["num_lookahead_tokens"] = span.num_lookahead
        options["num_external_computed_tokens"] = span.num_external
        options["num_output_placeholders"] = to_come
        call = (seen.name, span.num_new, hit)
        got = None
        try:
            if options["full_sequence_must_fit"] and options["reserved_blocks"]:
                gate = options | {"reserved_blocks": 0}
                is_open = self._core.can_allocate(*call, **gate) is Verdict.OK
                options = options | {"full_sequence_must_fit": False} if is_open else gate
            got = self._core.allocate_slots(*call, **options)
        finally:
            if not isinstance(got, CoreBlocks):
                self._steps.change()
                self._registry.put_drafts(known, seen, 0)
        return got

    def _grant(self, seen: RequestCounts, *, full_sequence_must_fit: bool) -> CoreBlocks | Refused:
        """Return no blocks for tokens that have slots, unless the gate refuses the
        remaining ones.
        """
        end = min(seen.num_tokens, self.config.length_limit)
        num_rest = end - self._core.num_computed_tokens(seen.name)
        if full_sequence_must_fit and num_rest > 0:
            whole = self._core.can_allocate(seen.name, num_rest, full_sequence_must_fit=True)
            if whole is not Verdict.OK:
                return self._core.allocate_slots(seen.name, num_rest, full_sequence_must_fit=True)
        return CoreBlocks(())


def _check_followed(config: Config, *, reads_tables: bool) -> None:
    """Raise InvalidConfig if an engine without the commands cannot know its tables."""
    if config.duplicates == "merge":
        reason = "tables change in place, so the commands must be kept and applied"
        raise InvalidConfig(field="duplicates", value="merge", reason=reason)
    if reads_tables or not (config.has_tails or config.has_states):
        return
    what = "hits that end inside blocks" if config.has_tails else "state groups"
    reason = (
        f"with {what} blocks are copied and replaced in tables, so the commands must be kept and "
        "applied (keep_commands=True), or the tables read again (reads_tables=True)"
    )
    if config.has_tails:
        raise InvalidConfig(field="hash_block_size", value=config.hash_block_size, reason=reason)
    kinds = [group.kind for group in config.groups]
    raise InvalidConfig(field="groups", value=kinds, reason=reason)
