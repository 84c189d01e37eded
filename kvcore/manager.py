# SPDX-License-Identifier: Apache-2.0
"""KVCacheManager: the transitions as methods of one object, over either backend.

Rules: the manager holds the newest state and forgets the older ones; the pure functions do the
work, in Python (`backend="python"`) or in the compiled twin (`backend="rust"`). Both give the same
values, errors, commands, events and canonical bytes. A call that raises has changed nothing.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from typing import Any, Literal, cast

from kvcore import _twin
from kvcore.backend import PythonBackend
from kvcore.codec import decode
from kvcore.invariants import pool_and_state
from kvcore.state.state import State
from kvcore.transitions import QUERIES, TRANSITIONS, arguments
from kvcore.transitions.slot_request import check_hit_kind
from kvcore.types.arguments import check_kind, check_request, read_list
from kvcore.types.commands import Batch
from kvcore.types.config import Config
from kvcore.types.errors import BackendMissing
from kvcore.types.event_log import Events
from kvcore.types.values import (
    Appended,
    Hit,
    KVCacheBlocks,
    PrefixCacheStats,
    Refused,
    Request,
    Status,
    Verdict,
)

READ_FIRST = {"request", "hashes", "hit", "request_ids", "block_ids", "done"}
"""Arguments that the manager reads before either language sees them."""
HANDED_ON = [name for name in (*TRANSITIONS, *QUERIES) if READ_FIRST.isdisjoint(arguments(name))]
"""Methods that are the twin's own, with the same arguments by the same names."""


class KVCacheManager:
    """Decides which block holds which tokens; touches no tensor.

    backend: "rust", "python", or None for the twin where it is compiled, else Python with a
    warning. Raises BackendMissing.
    """

    def __init__(self, config: Config, backend: Literal["rust", "python"] | None = None) -> None:
        check_kind("config", config, Config)
        self.config = config
        self.backend = backend or _default_backend()
        self._core = _make_backend(config, self.backend)
        if self.backend == "rust":
            self._hand_on()

    def _hand_on(self) -> None:
        """Put the twin's own methods in front of those here that only call them.

        A Python frame is a third of a call. What a subclass overrides stays its own.
        """
        for name in HANDED_ON:
            if getattr(type(self), name) is getattr(KVCacheManager, name):
                self.__dict__[name] = getattr(self._core, name)

    def __repr__(self) -> str:
        free, usable = self.num_free_blocks, self.config.num_usable_blocks
        return f"<KVCacheManager {self.backend}: {free} of {usable} blocks free>"

    def add_request(self, request: Request) -> int:
        """Make a request known; returns its row, which stays until `remove_request`."""
        check_request(request)
        return self._core.add_request(request)

    def add_tokens(self, request_id: str, tokens: Any) -> None:
        """Add tokens behind those that a request has."""
        self._core.add_tokens(request_id, tokens)

    def add_block_hashes(self, request_id: str, hashes: Sequence[bytes]) -> None:
        """Add the engine's hashes of the next full blocks of a request that brought its own."""
        self._core.add_block_hashes(request_id, read_list("hashes", hashes, "a list of hashes"))

    def add_drafts(self, request_id: str, tokens: Any) -> None:
        """Put guessed tokens behind those of a request, in place of the guesses before."""
        self._core.add_drafts(request_id, tokens)

    def accept(self, request_id: str, num_accepted: int) -> None:
        """Make the first scheduled drafts tokens of the request and drop the others."""
        self._core.accept(request_id, num_accepted)

    def remove_request(self, request_id: str) -> None:
        """Forget a request that holds no blocks."""
        self._core.remove_request(request_id)

    def get_computed_blocks(self, request_id: str) -> Hit:
        """The longest cached prefix that leaves a token to compute. Changes nothing."""
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
    ) -> KVCacheBlocks | Refused:
        """Schedule the next tokens of a request; returns the blocks that its tables grew by.

        See `kvcore.transitions.allocate.allocate_slots` for the arguments and errors.
        """
        check_hit_kind(hit)
        return self._core.allocate_slots(
            request_id,
            num_new_tokens,
            hit,
            num_lookahead_tokens=num_lookahead_tokens,
            num_external_computed_tokens=num_external_computed_tokens,
            delay_cache_blocks=delay_cache_blocks,
            num_encoder_tokens=num_encoder_tokens,
            full_sequence_must_fit=full_sequence_must_fit,
            reserved_blocks=reserved_blocks,
        )

    def can_allocate(
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
    ) -> Verdict:
        """What `allocate_slots` would say to the same arguments. Changes nothing."""
        check_hit_kind(hit)
        return self._core.can_allocate(
            request_id,
            num_new_tokens,
            hit,
            num_lookahead_tokens=num_lookahead_tokens,
            num_external_computed_tokens=num_external_computed_tokens,
            delay_cache_blocks=delay_cache_blocks,
            num_encoder_tokens=num_encoder_tokens,
            full_sequence_must_fit=full_sequence_must_fit,
            reserved_blocks=reserved_blocks,
        )

    def append(self, requests: Sequence[str] | Any, tokens: Any) -> Appended:
        """One token and one slot more for each request, in order, in one call.

        requests: a list of ids, or rows as a buffer of integers; one that is named twice gets two
        tokens. tokens: as many ids. Misuse anywhere in the list is raised before anything is done.
        """
        return self._core.append(requests, tokens)

    def cache_blocks(self, request_id: str, num_computed_tokens: int) -> None:
        """Publish a request's full blocks up to so many tokens, whose caching was delayed."""
        self._core.cache_blocks(request_id, num_computed_tokens)

    def free(self, request_id: str) -> None:
        """Give back a request's blocks, tail first; its tokens stay.

        A request that holds nothing is left as it is.
        """
        self._core.free(request_id)

    def fork(self, parent_id: str, child_id: str) -> int:
        """Add a child that shares its parent's computed blocks; returns its row."""
        return self._core.fork(parent_id, child_id)

    def truncate(self, request_id: str, num_tokens: int) -> None:
        """Keep the first num_tokens of a request's tokens."""
        self._core.truncate(request_id, num_tokens)

    def rewind(self, request_ids: Iterable[str], num_computed_tokens: int) -> tuple[str, ...]:
        """Let requests count no more than num_computed_tokens: a load failed, or came in part.

        Returns the ids of the requests whose count fell. If the load is still unconfirmed, these
        are all requests that rest on it, named or not.
        """
        return self._core.rewind(read_list("request_ids", request_ids), num_computed_tokens)

    def remove_skipped_blocks(self, request_id: str, total_computed_tokens: int) -> None:
        """Give back the blocks that no query at so many tokens or later sees."""
        self._core.remove_skipped_blocks(request_id, total_computed_tokens)

    def swap_out(self, request_ids: Iterable[str]) -> Refused | None:
        """Move the requests' blocks to the host tier, each distinct block once.

        Returns None where it was done; a `Refused` is false in a condition, too: ask `is None`.
        """
        return self._core.swap_out(read_list("request_ids", request_ids))

    def swap_in(self, request_ids: Iterable[str]) -> Refused | None:
        """Move swapped requests back to the device; returns as `swap_out` does."""
        return self._core.swap_in(read_list("request_ids", request_ids))

    def pin(self, block_ids: Iterable[int]) -> None:
        """Hold blocks so that their content stays."""
        self._core.pin(read_list("block_ids", block_ids))

    def unpin(self, block_ids: Iterable[int]) -> None:
        """Undo `pin`."""
        self._core.unpin(read_list("block_ids", block_ids))

    def evict_blocks(self, block_ids: Iterable[int]) -> None:
        """Forget the keys of blocks; their owners keep them."""
        self._core.evict_blocks(read_list("block_ids", block_ids))

    def reset_prefix_cache(self) -> bool:
        """Forget every key; False, and nothing happens, while any block of any tier is used."""
        return self._core.reset_prefix_cache()

    def store(self, block_ids: Iterable[int]) -> tuple[int, ...]:
        """Copy blocks to the external store under their keys; returns one operation a block."""
        return self._core.store(read_list("block_ids", block_ids))

    def load(
        self,
        request_id: str,
        num_tokens: int,
        hit: Hit | None = None,
        *,
        full_sequence_must_fit: bool = False,
        reserved_blocks: int = 0,
    ) -> tuple[int, ...] | Refused:
        """Fill slots for the next tokens of a request from the external store.

        Returns one operation a block; see `kvcore.transitions.transfers.load` for the arguments and
        errors.
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
        """Finish a store or load, done or failed."""
        check_kind("done", done, bool)
        self._core.complete_operation(operation, done)

    def take_batch(self) -> Batch:
        """Close and number the open batch; with `max_in_flight` it stays unfinished."""
        return self._core.take_batch()

    def complete(self, batch: int) -> None:
        """Finish the oldest batch in flight, by its number: its forward pass has run."""
        self._core.complete(batch)

    def cancel(self, batch: int) -> None:
        """Take back a batch in flight, all later ones and the open one, executed or not."""
        self._core.cancel(batch)

    def take_events(self) -> Events:
        """Hand out the events since the last call; their objects are made when they are read."""
        return self._core.take_events()

    def take_stats(self) -> PrefixCacheStats:
        """Hand out the look-up statistics since the last call."""
        return self._core.take_stats()

    def take_new_block_ids(self) -> list[int]:
        """Hand out the blocks that full-attention groups got since the last call, for zeroing."""
        return self._core.take_new_block_ids()

    def new_step_starts(self) -> None:
        """Say that a scheduling step begins."""
        self._core.new_step_starts()

    def get_blocks(self, request_id: str) -> KVCacheBlocks:
        """The device blocks of a request. Changes nothing."""
        return self._core.get_blocks(request_id)

    def get_block_ids(self, request_id: str) -> tuple[list[int], ...]:
        """The device blocks of a request as one list a group. Changes nothing."""
        return tuple(list(ids) for ids in self._core.get_blocks(request_id).blocks)

    def get_block_keys(self, request_id: str) -> tuple[tuple[bytes, ...], ...]:
        """The keys of a request's full blocks, one tuple a group. Changes nothing."""
        return self._core.get_block_keys(request_id)

    def has_key(self, block: int) -> bool:
        """Whether a block is findable; the null block counts as such. Changes nothing."""
        return self._core.has_key(block)

    def get_num_common_prefix_blocks(self, request_id: str) -> list[int]:
        """Leading blocks that all requests with device blocks hold, a group. Changes nothing."""
        return self._core.get_num_common_prefix_blocks(request_id)

    def num_tokens(self, request_id: str) -> int:
        """Tokens of a request. Changes nothing."""
        return self._core.num_tokens(request_id)

    def num_draft_tokens(self, request_id: str) -> int:
        """Draft tokens of a request. Changes nothing."""
        return self._core.num_draft_tokens(request_id)

    def num_computed_tokens(self, request_id: str) -> int:
        """Tokens of a request that are computed or scheduled. Changes nothing."""
        return self._core.num_computed_tokens(request_id)

    def get_row(self, request_id: str) -> int:
        """The row of a request. Changes nothing."""
        return self._core.get_row(request_id)

    def status(self, request_id: str) -> Status:
        """Where a request's blocks are. Changes nothing."""
        return self._core.status(request_id)

    @property
    def in_flight(self) -> tuple[int, ...]:
        """The numbers of the batches in flight, oldest first."""
        return self._core.in_flight

    @property
    def num_free_blocks(self) -> int:
        """Device blocks in the free queue."""
        return self._core.num_free_blocks

    @property
    def num_free_host_blocks(self) -> int:
        """Host blocks without owner; 0 without a host tier."""
        return self._core.num_free_host_blocks

    @property
    def usage(self) -> float:
        """Share of the usable device blocks that have an owner, 0.0 to 1.0."""
        return 1.0 - self.num_free_blocks / self.config.num_usable_blocks

    def encode(self) -> bytes:
        """The canonical bytes of the state. O(pool)."""
        return self._core.encode()

    def restore(self, data: bytes) -> None:
        """Put the state of canonical bytes in place of this manager's.

        Raises DamagedState, InvalidConfig, and InvariantViolation for bytes that no run gives.
        """
        check_kind("data", data, bytes)
        state = decode.decode(data)
        pool_and_state.check(state)
        self._core.restore(data)
        self.config = state.config

    def state(self) -> State:
        """The state as an immutable value. O(pool) on the rust backend."""
        core: Any = self._core
        return core.state() if isinstance(core, PythonBackend) else decode.decode(core.encode())

    def check(self) -> None:
        """Assert every structural invariant. O(pool); raises InvariantViolation."""
        pool_and_state.check(self.state())


def _default_backend() -> Literal["rust", "python"]:
    if _twin.available():
        return "rust"
    warnings.warn(
        "the compiled twin kvcore._rust is missing: the slow Python core is used",
        RuntimeWarning,
        stacklevel=3,
    )
    return "python"


def _make_backend(config: Config, name: str) -> _twin.Backend:
    if name == "python":
        return cast("_twin.Backend", PythonBackend(config))
    if name == "rust":
        return _twin.make_backend(config)
    raise BackendMissing(backend=repr(name), reason='the backends are "rust" and "python"')
