# SPDX-License-Identifier: Apache-2.0
"""KVCacheManager: the newest state, with the transitions as methods, in either language."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Literal, Unpack

from kvcore.backend import HANDED_ON, Recordable, Timed, default_backend, make_backend
from kvcore.explain import Questions
from kvcore.transitions import TRANSITIONS
from kvcore.transitions.slot_request import check_hit_kind
from kvcore.types.arguments import check_kind, check_request, read_flag, read_list, read_once
from kvcore.types.commands import Batch
from kvcore.types.config import Config
from kvcore.types.event_log import Events
from kvcore.types.slot_request import DEFAULTS, SlotOptions
from kvcore.types.values import (
    Appended,
    Hit,
    KVCacheBlocks,
    PrefixCacheStats,
    Refused,
    Request,
    Status,
    Swapped,
    Verdict,
)

OWN = {"config", "backend", "_core", "_live", *HANDED_ON, *TRANSITIONS}  # others: of a subclass


class KVCacheManager(Recordable, Questions, Timed):
    """Decides which block holds which tokens; never touches a tensor.

    backend: "rust", "python", or None: the twin, else Python with a warning. explain_entries:
    number of removed keys to remember for `explain_miss`. Raises BackendMissing, InvalidConfig,
    PoolTooLarge, InvalidCount.

    A method changes the state unless its description ends with "Changes nothing."; one that raises
    has changed nothing. Tokens are ints in [0, 2**32), in a list or a buffer of integers; they may
    raise EmptyTokens, InvalidToken, UnsupportedBuffer. Any argument may raise WrongArgument, a
    request id UnknownRequest, a block id UnknownBlock, a count InvalidCount; a request whose blocks
    are in the host tier SwappedOut, or are being loaded LoadUnfinished. Methods name other errors.
    """

    def __init__(
        self,
        config: Config,
        backend: Literal["rust", "python"] | None = None,
        *,
        explain_entries: int = 0,
    ) -> None:
        check_kind("config", config, Config)
        self.config = config
        self.backend = backend or default_backend()
        self._core = make_backend(config, self.backend)
        # Saves a Python frame, a third of each call; overrides of a subclass are kept.
        for name in HANDED_ON if self.backend == "rust" else ():
            if getattr(type(self), name) is getattr(KVCacheManager, name):
                self.__dict__[name] = getattr(self._core, name)
        if explain_entries != 0:
            self._remember(explain_entries)

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy by canonical bytes, so that every copy has its own state."""
        others = {name: value for name, value in self.__dict__.items() if name not in OWN}
        entries = 0 if self._live is None else self._live.num_entries
        return _rebuild, (type(self), self.backend, self.encode(), entries), others or None

    def __repr__(self) -> str:
        of_all = f"{self.num_free_blocks} of {self.config.num_usable_blocks}"
        return f"<KVCacheManager {self.backend}: {of_all} blocks free>"

    def add_request(self, request: Request) -> int:
        """Add a request; return its row, an int that it keeps until `remove_request`.

        Raises EmptyRequestId, RepeatedRequest, and the errors of extra keys and supplied hashes.
        """
        check_request(request)
        return self._core.add_request(request)

    def add_tokens(
        self, request_id: str, tokens: Any, *, num_rejected: int = 0, batch: int | None = None
    ) -> None:
        """Append tokens to a request; they fill its positions to come first.

        num_rejected: the last positions to come, dropped first. batch: the one that sampled them.
        Raises DraftsPending, InOpenBatch, BatchNotTaken, StaleOutput, OutputOutOfOrder,
        HitInOpenBatch, BeforeOpenBatch.
        """
        self._core.add_tokens(request_id, tokens, num_rejected=num_rejected, batch=batch)

    def add_block_hashes(self, request_id: str, hashes: Sequence[bytes]) -> None:
        """Add the engine's 32-byte hashes of the next full blocks. Raises WrongBlockHashes."""
        self._core.add_block_hashes(request_id, read_list("hashes", hashes, "a list of hashes"))

    def add_drafts(self, request_id: str, tokens: Any) -> None:
        """Set the drafts after the tokens. Raises DraftsPending, PlaceholdersPending."""
        self._core.add_drafts(request_id, tokens)

    def accept(self, request_id: str, num_accepted: int) -> None:
        """Keep the first drafts. Raises InOpenBatch, BeyondDrafts, PlaceholdersPending."""
        self._core.accept(request_id, num_accepted)

    def remove_request(self, request_id: str) -> None:
        """Forget a request that holds no blocks. Raises StillHoldsBlocks."""
        self._core.remove_request(request_id)

    def get_computed_blocks(self, request_id: str) -> Hit:
        """Return the longest cached prefix that leaves a token to compute. Changes nothing."""
        return self._core.get_computed_blocks(request_id)

    def allocate_slots(
        self,
        request_id: str,
        num_new_tokens: int,
        hit: Hit | None = None,
        *,
        num_lookahead_tokens: int = 0,
        num_external_computed_tokens: int = 0,
        delay_cache_blocks: bool = False,
        num_encoder_tokens: int = 0,
        full_sequence_must_fit: bool = False,
        reserved_blocks: int = 0,
        num_output_placeholders: int = 0,
        checkpoint: bool = False,
    ) -> KVCacheBlocks | Refused:
        """Schedule the next tokens of a request; returns the new blocks, one tuple per group.

        hit: from `get_computed_blocks`, for a request without blocks; 0 tokens take only the hit.
        num_lookahead_tokens: slots after the new tokens. num_external_computed_tokens: from a
        connector; their blocks are not returned. num_output_placeholders: positions whose tokens
        come later, by `add_tokens`. delay_cache_blocks: publish later, by `cache_blocks`.
        num_encoder_tokens: for cross-attention groups. full_sequence_must_fit: refuse unless the
        whole request fits. reserved_blocks: device blocks to leave free. checkpoint: let others
        start from the states after these tokens. A refusal keeps the trim of windows. Raises
        TooManyTokens, BeyondModelLength, DraftsPending, TooManyDrafts, InOpenBatch, NoEncoderGroup,
        NoStateGroup, UnalignedCheckpoint, WrongHit, StaleHits, HitsOnRunningRequest,
        CachingDisabled.
        """
        check_hit_kind(hit)
        return self._core.allocate_slots(
            request_id,
            num_new_tokens,
            hit,
            num_lookahead_tokens=num_lookahead_tokens,
            num_external_computed_tokens=num_external_computed_tokens,
            num_encoder_tokens=num_encoder_tokens,
            reserved_blocks=reserved_blocks,
            num_output_placeholders=num_output_placeholders,
            delay_cache_blocks=delay_cache_blocks,
            full_sequence_must_fit=full_sequence_must_fit,
            checkpoint=checkpoint,
        )

    def can_allocate(
        self,
        request_id: str,
        num_new_tokens: int,
        hit: Hit | None = None,
        **options: Unpack[SlotOptions],
    ) -> Verdict:
        """Return how `allocate_slots` would answer; raises what it raises. Changes nothing."""
        check_hit_kind(hit)
        given: Any = DEFAULTS | options
        return self._core.can_allocate(request_id, num_new_tokens, hit, **given)

    def append(
        self, requests: Iterable[str] | Any, tokens: Any = None, *, batch: int | None = None
    ) -> Appended:
        """Add one token and one slot to each request, in order, up to the first refused one.

        requests: ids in their order, or a buffer of rows. tokens: one each; None: tokens to come.
        batch: the one that sampled them. Raises, before any change, LengthMismatch,
        RepeatedRequest, NotRunning, DraftsPending, InOpenBatch, NotComputed, BatchNotTaken,
        StaleOutput, OutputOutOfOrder, BeyondModelLength.
        """
        return self._core.append(read_once(requests), read_once(tokens), batch=batch)

    def cache_blocks(self, request_id: str, num_computed_tokens: int) -> None:
        """Publish full blocks of a request's first tokens, if delayed. Raises BeyondComputed."""
        self._core.cache_blocks(request_id, num_computed_tokens)

    def free(self, request_id: str) -> None:
        """Give back a request's blocks, if any, tail first; tokens stay. Raises HitInOpenBatch."""
        self._core.free(request_id)

    def fork(self, parent_id: str, child_id: str) -> int:
        """Add a child that shares its parent's computed blocks; returns its row. Raises
        EmptyRequestId, RepeatedRequest, DraftsPending.
        """
        return self._core.fork(parent_id, child_id)

    def unschedule(self, request_id: str, num_tokens: int) -> None:
        """Let the open batch compute a request only up to num_tokens; its blocks stay.

        Raises DraftsPending, BeyondComputed, BeforeOpenBatch, HitInOpenBatch.
        """
        self._core.unschedule(request_id, num_tokens)

    def truncate(self, request_id: str, num_tokens: int) -> None:
        """Keep the first num_tokens of a request's tokens. Raises BeyondRequest, HitInOpenBatch."""
        self._core.truncate(request_id, num_tokens)

    def rewind(self, request_ids: Iterable[str], num_computed_tokens: int) -> tuple[str, ...]:
        """Let requests count at most num_computed_tokens: a load failed, or came in part.

        Returns the ids of the requests whose count fell; if the load is still unconfirmed, of all
        that depend on it. Raises RepeatedRequest, BeyondComputed, HitInOpenBatch, HeldByOthers.
        """
        return self._core.rewind(read_list("request_ids", request_ids), num_computed_tokens)

    def remove_skipped_blocks(self, request_id: str, total_computed_tokens: int) -> None:
        """Give back blocks that no query at this count or later sees. Raises BeyondComputed."""
        self._core.remove_skipped_blocks(request_id, total_computed_tokens)

    def swap_out(self, request_ids: Iterable[str]) -> Swapped | Refused:
        """Move requests' blocks to the host tier, each once; returns how many moved.

        Raises NoHostTier, RepeatedRequest, NotRunning, HitInOpenBatch.
        """
        return self._core.swap_out(read_list("request_ids", request_ids))

    def swap_in(self, request_ids: Iterable[str]) -> Swapped | Refused:
        """Undo `swap_out`; returns the same. Raises NoHostTier, RepeatedRequest, NotSwapped."""
        return self._core.swap_in(read_list("request_ids", request_ids))

    def pin(self, block_ids: Iterable[int]) -> None:
        """Hold device blocks, once per occurrence, to keep their content. Raises UnusedBlock."""
        self._core.pin(read_list("block_ids", block_ids))

    def unpin(self, block_ids: Iterable[int]) -> None:
        """Undo `pin`, once per occurrence. Raises NotPinned."""
        self._core.unpin(read_list("block_ids", block_ids))

    def evict_blocks(self, block_ids: Iterable[int]) -> None:
        """Withdraw the keys of device blocks, which keep their owners."""
        self._core.evict_blocks(read_list("block_ids", block_ids))

    def reset_prefix_cache(self) -> bool:
        """Withdraw every key; False, without any change, while a block of any tier has an owner."""
        return self._core.reset_prefix_cache()

    def advance_epoch(self, epoch: int | None = None) -> int:
        """Begin an epoch of new weights; returns its number. Raises EpochWentBack, InOpenBatch."""
        return self._core.advance_epoch(epoch)

    def stale_requests(self) -> list[str]:
        """Return the requests that count tokens of older epochs, in row order. Changes nothing."""
        return self._core.stale_requests()

    def store(self, block_ids: Iterable[int]) -> tuple[int, ...]:
        """Copy device blocks to the external store by key; return one operation per block.

        Raises UnknownBlock, NotPublished, InOpenBatch, LoadUnconfirmed.
        """
        return self._core.store(read_list("block_ids", block_ids))

    def load(
        self,
        request_id: str,
        num_tokens: int,
        hit: Hit | None = None,
        *,
        reserved_blocks: int = 0,
        full_sequence_must_fit: bool = False,
    ) -> tuple[int, ...] | Refused:
        """Load the next num_tokens of a request: whole blocks, at most all tokens but one. Returns
        one operation per block. Raises as `allocate_slots`, StaleRequest, WrongLoad.
        """
        check_hit_kind(hit)
        return self._core.load(
            request_id,
            num_tokens,
            hit,
            full_sequence_must_fit=full_sequence_must_fit,
            reserved_blocks=reserved_blocks,
        )

    def complete_operation(self, operation: int, done: bool) -> None:
        """Finish a store or load, done or failed. Raises UnknownOperation, InOpenBatch."""
        self._core.complete_operation(operation, read_flag("done", done))

    def take_batch(self) -> Batch:
        """Close and number the open batch: it is in flight, or done. Raises TooManyInFlight."""
        return self._core.take_batch()

    def complete(self, batch: int) -> None:
        """Finish the oldest batch in flight, by number. Raises NotInFlight, BatchOutOfOrder."""
        self._core.complete(batch)

    def cancel(self, batch: int) -> None:
        """Undo a batch in flight, all later ones and the open one. Raises NotInFlight."""
        self._core.cancel(batch)

    def take_events(self) -> Events:
        """Return and drop the events so far, in order; their objects are made on access."""
        return self._core.take_events()

    def take_stats(self) -> PrefixCacheStats:
        """Return and drop the statistics of look-ups so far, in tokens."""
        return self._core.take_stats()

    def take_new_block_ids(self) -> list[int]:
        """Return and drop the device blocks that full-attention groups got so far, for zeroing."""
        return self._core.take_new_block_ids()

    def get_blocks(self, request_id: str) -> KVCacheBlocks:
        """Return the device blocks of a request, one tuple per group. Changes nothing."""
        return self._core.get_blocks(request_id)

    def get_block_ids(self, request_id: str) -> tuple[list[int], ...]:
        """Return the device blocks of a request, one list per group. Changes nothing."""
        return tuple(list(ids) for ids in self._core.get_blocks(request_id).blocks)

    def get_block_keys(self, request_id: str) -> tuple[tuple[bytes, ...], ...]:
        """Return the 36-byte keys of full blocks, a tuple per group. Changes nothing."""
        return self._core.get_block_keys(request_id)

    def has_key(self, block: int) -> bool:
        """Return whether a device block is findable, as the null block is. Changes nothing."""
        return self._core.has_key(block)

    def get_block_key(self, block: int) -> bytes | None:
        """Return a device block's key, else its longest tail key or None. Changes nothing."""
        return self._core.get_block_key(block)

    def get_cached_block(self, key: bytes) -> int | None:
        """Return the block of a key or tail key, or None. Raises InvalidKey. Changes nothing."""
        check_kind("key", key, bytes)
        return self._core.get_cached_block(key)

    def num_owners(self, block: int) -> int:
        """Count the tables, pins and operations that hold a device block. Changes nothing."""
        return self._core.num_owners(block)

    def get_num_common_prefix_blocks(self, request_id: str) -> list[int]:
        """Count the leading blocks that all running requests share, per group. Changes nothing."""
        return self._core.get_num_common_prefix_blocks(request_id)

    def num_tokens(self, request_id: str) -> int:
        """Count the tokens of a request, without drafts. Changes nothing."""
        return self._core.num_tokens(request_id)

    def num_output_placeholders(self, request_id: str) -> int:
        """Count the scheduled positions of a request without tokens yet. Changes nothing."""
        return self._core.num_output_placeholders(request_id)

    def num_draft_tokens(self, request_id: str) -> int:
        """Count the draft tokens of a request. Changes nothing."""
        return self._core.num_draft_tokens(request_id)

    def num_computed_tokens(self, request_id: str) -> int:
        """Count the computed or scheduled tokens and drafts of a request. Changes nothing."""
        return self._core.num_computed_tokens(request_id)

    def get_row(self, request_id: str) -> int:
        """Return the row of a request, as `add_request` returned it. Changes nothing."""
        return self._core.get_row(request_id)

    def status(self, request_id: str) -> Status:
        """Return the tier of a request's blocks. Changes nothing."""
        return self._core.status(request_id)

    @property
    def in_flight(self) -> tuple[int, ...]:
        """The numbers of the batches in flight, oldest first. Changes nothing."""
        return self._core.in_flight

    @property
    def num_free_blocks(self) -> int:
        """Number of device blocks in the free queue. Changes nothing."""
        return self._core.num_free_blocks

    @property
    def quarantined_blocks(self) -> tuple[int, ...]:
        """Device blocks that lost their last owner while a batch in flight uses them, in this
        order: neither used nor free. Changes nothing.
        """
        return self._core.quarantined_blocks

    @property
    def num_free_host_blocks(self) -> int:
        """Number of host blocks without owner; 0 without a host tier. Changes nothing."""
        return self._core.num_free_host_blocks

    @property
    def usage(self) -> float:
        """Share of the usable device blocks with an owner, 0.0 to 1.0. Changes nothing."""
        return 1.0 - self.num_free_blocks / self.config.num_usable_blocks


def _rebuild(
    kind: type[KVCacheManager], backend: Any, data: bytes, explain_entries: int = 0
) -> KVCacheManager:
    made = kind.__new__(kind)
    KVCacheManager.__init__(made, Config(2), backend, explain_entries=explain_entries)
    KVCacheManager.restore(made, data)
    return made
