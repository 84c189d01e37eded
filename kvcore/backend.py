# SPDX-License-Identifier: Apache-2.0
"""What a backend of the manager offers, and the one over the pure functions.

Rules: a backend holds one state. The compiled twin offers the same methods (`_twin.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, TypeVar

from kvcore.codec import decode as decoding
from kvcore.codec import encode as encoding
from kvcore.state.state import State, make_state
from kvcore.transitions import (
    allocate,
    batches,
    cancel,
    drain,
    fork,
    pins,
    publish,
    queries,
    requests,
    transfers,
    window,
)
from kvcore.transitions import free as release
from kvcore.transitions import rewind as rewinding
from kvcore.transitions import swap as swapping
from kvcore.transitions import truncate as truncating
from kvcore.types.arguments import check_requests
from kvcore.types.commands import Batch
from kvcore.types.config import Config
from kvcore.types.event_log import Events
from kvcore.types.values import (
    Appended,
    Hit,
    KVCacheBlocks,
    Outcome,
    PrefixCacheStats,
    Refused,
    Request,
    Status,
    Verdict,
)

T = TypeVar("T")


class Backend(Protocol):
    """The methods that `KVCacheManager` delegates to; their meaning is written there."""

    # fmt: off
    def add_request(self, request: Request, /) -> int: ...
    def add_tokens(self, request_id: str, tokens: Any, /) -> None: ...
    def add_block_hashes(self, request_id: str, hashes: Sequence[bytes], /) -> None: ...
    def add_drafts(self, request_id: str, tokens: Any, /) -> None: ...
    def accept(self, request_id: str, num_accepted: int, /) -> None: ...
    def remove_request(self, request_id: str, /) -> None: ...
    def get_computed_blocks(self, request_id: str, /) -> Hit: ...
    def allocate_slots(
        self, request_id: str, num_new_tokens: int, hit: Hit | None, /, *,
        num_lookahead_tokens: int, num_external_computed_tokens: int,
        delay_cache_blocks: bool, num_encoder_tokens: int, full_sequence_must_fit: bool,
        reserved_blocks: int,
    ) -> KVCacheBlocks | Refused: ...
    def can_allocate(
        self, request_id: str, num_new_tokens: int, hit: Hit | None, /, *,
        num_lookahead_tokens: int, num_external_computed_tokens: int,
        delay_cache_blocks: bool, num_encoder_tokens: int, full_sequence_must_fit: bool,
        reserved_blocks: int,
    ) -> Verdict: ...
    def append(self, requests: Any, tokens: Any, /) -> Appended: ...
    def cache_blocks(self, request_id: str, num_computed_tokens: int, /) -> None: ...
    def free(self, request_id: str, /) -> None: ...
    def fork(self, parent_id: str, child_id: str, /) -> int: ...
    def truncate(self, request_id: str, num_tokens: int, /) -> None: ...
    def rewind(
        self, request_ids: list[str], num_computed_tokens: int, /
    ) -> tuple[str, ...]: ...
    def remove_skipped_blocks(self, request_id: str, total_computed_tokens: int, /) -> None: ...
    def swap_out(self, request_ids: list[str], /) -> Refused | None: ...
    def swap_in(self, request_ids: list[str], /) -> Refused | None: ...
    def pin(self, block_ids: Sequence[int], /) -> None: ...
    def unpin(self, block_ids: Sequence[int], /) -> None: ...
    def evict_blocks(self, block_ids: Sequence[int], /) -> None: ...
    def reset_prefix_cache(self) -> bool: ...
    def store(self, block_ids: Sequence[int], /) -> tuple[int, ...]: ...
    def load(
        self, request_id: str, num_tokens: int, hit: Hit | None, /, *,
        full_sequence_must_fit: bool, reserved_blocks: int,
    ) -> tuple[int, ...] | Refused: ...
    def complete_operation(self, operation: int, done: bool, /) -> None: ...
    def take_batch(self) -> Batch: ...
    def complete(self, number: int, /) -> None: ...
    def cancel(self, number: int, /) -> None: ...
    def take_events(self) -> Events: ...
    def take_stats(self) -> PrefixCacheStats: ...
    def take_new_block_ids(self) -> list[int]: ...
    def new_step_starts(self) -> None: ...
    def get_blocks(self, request_id: str, /) -> KVCacheBlocks: ...
    def get_num_common_prefix_blocks(self, request_id: str, /) -> list[int]: ...
    def num_tokens(self, request_id: str, /) -> int: ...
    def get_block_keys(self, request_id: str, /) -> tuple[tuple[bytes, ...], ...]: ...
    def has_key(self, block: int, /) -> bool: ...
    def num_draft_tokens(self, request_id: str, /) -> int: ...
    def num_computed_tokens(self, request_id: str, /) -> int: ...
    def get_row(self, request_id: str, /) -> int: ...
    def status(self, request_id: str, /) -> Status: ...
    @property
    def in_flight(self) -> tuple[int, ...]: ...
    @property
    def num_free_blocks(self) -> int: ...
    @property
    def num_free_host_blocks(self) -> int: ...
    def encode(self) -> bytes: ...
    def restore(self, data: bytes, /) -> None: ...
    # fmt: on


class PythonBackend:
    """The newest state, and the pure functions on it."""

    def __init__(self, config: Config) -> None:
        self._state = make_state(config)

    def state(self) -> State:
        """The state as it is."""
        return self._state

    def _keep(self, outcome: Outcome[State, T]) -> T:
        self._state = outcome.state
        return outcome.value

    def add_request(self, request: Request) -> int:
        return self._keep(requests.add_request(self._state, request))

    def add_tokens(self, request_id: str, tokens: Any) -> None:
        self._keep(requests.add_tokens(self._state, request_id, tokens))

    def remove_request(self, request_id: str) -> None:
        self._keep(requests.remove_request(self._state, request_id))

    def add_block_hashes(self, request_id: str, hashes: Sequence[bytes]) -> None:
        self._keep(requests.add_block_hashes(self._state, request_id, hashes))

    def add_drafts(self, request_id: str, tokens: Any) -> None:
        self._keep(requests.add_drafts(self._state, request_id, tokens))

    def accept(self, request_id: str, num_accepted: int) -> None:
        self._keep(requests.accept(self._state, request_id, num_accepted))

    def get_computed_blocks(self, request_id: str) -> Hit:
        return queries.get_computed_blocks(self._state, request_id)

    def allocate_slots(
        self, request_id: str, num_new_tokens: int, hit: Hit | None, **options: Any
    ) -> KVCacheBlocks | Refused:
        return self._keep(
            allocate.allocate_slots(self._state, request_id, num_new_tokens, hit, **options)
        )

    def can_allocate(
        self, request_id: str, num_new_tokens: int, hit: Hit | None, **options: Any
    ) -> Verdict:
        return allocate.can_allocate(self._state, request_id, num_new_tokens, hit=hit, **options)

    def append(self, request_ids: Any, tokens: Any) -> Appended:
        check_requests(request_ids)
        return self._keep(allocate.append(self._state, request_ids, tokens))

    def cache_blocks(self, request_id: str, num_computed_tokens: int) -> None:
        self._keep(publish.cache_blocks(self._state, request_id, num_computed_tokens))

    def free(self, request_id: str) -> None:
        self._keep(release.free(self._state, request_id))

    def fork(self, parent_id: str, child_id: str) -> int:
        return self._keep(fork.fork(self._state, parent_id, child_id))

    def truncate(self, request_id: str, num_tokens: int) -> None:
        self._keep(truncating.truncate(self._state, request_id, num_tokens))

    def rewind(self, request_ids: list[str], num_computed_tokens: int) -> tuple[str, ...]:
        return self._keep(rewinding.rewind(self._state, request_ids, num_computed_tokens))

    def remove_skipped_blocks(self, request_id: str, total_computed_tokens: int) -> None:
        self._keep(window.remove_skipped_blocks(self._state, request_id, total_computed_tokens))

    def swap_out(self, request_ids: list[str]) -> Refused | None:
        return self._keep(swapping.swap_out(self._state, request_ids))

    def swap_in(self, request_ids: list[str]) -> Refused | None:
        return self._keep(swapping.swap_in(self._state, request_ids))

    def pin(self, block_ids: Sequence[int]) -> None:
        self._keep(pins.pin(self._state, block_ids))

    def unpin(self, block_ids: Sequence[int]) -> None:
        self._keep(pins.unpin(self._state, block_ids))

    def evict_blocks(self, block_ids: Sequence[int]) -> None:
        self._keep(publish.evict_blocks(self._state, block_ids))

    def reset_prefix_cache(self) -> bool:
        return self._keep(publish.reset_prefix_cache(self._state))

    def store(self, block_ids: Sequence[int]) -> tuple[int, ...]:
        return self._keep(transfers.store(self._state, block_ids))

    def load(
        self, request_id: str, num_tokens: int, hit: Hit | None, **options: Any
    ) -> tuple[int, ...] | Refused:
        return self._keep(transfers.load(self._state, request_id, num_tokens, hit, **options))

    def complete_operation(self, operation: int, done: bool) -> None:
        self._keep(transfers.complete_operation(self._state, operation, done))

    def take_batch(self) -> Batch:
        return self._keep(batches.take_batch(self._state))

    def complete(self, number: int) -> None:
        self._keep(batches.complete(self._state, number))

    def cancel(self, number: int) -> None:
        self._keep(cancel.cancel(self._state, number))

    def take_events(self) -> Events:
        return self._keep(drain.take_events(self._state))

    def take_stats(self) -> PrefixCacheStats:
        return self._keep(drain.take_stats(self._state))

    def take_new_block_ids(self) -> list[int]:
        return self._keep(drain.take_new_block_ids(self._state))

    def new_step_starts(self) -> None:
        self._keep(drain.new_step_starts(self._state))

    def get_blocks(self, request_id: str) -> KVCacheBlocks:
        return queries.get_blocks(self._state, request_id)

    def get_num_common_prefix_blocks(self, request_id: str) -> list[int]:
        return queries.get_num_common_prefix_blocks(self._state, request_id)

    def num_tokens(self, request_id: str) -> int:
        return len(queries.find_request(self._state, request_id).tokens)

    def get_block_keys(self, request_id: str) -> tuple[tuple[bytes, ...], ...]:
        return queries.get_block_keys(self._state, request_id)

    def has_key(self, block: int) -> bool:
        return queries.has_key(self._state, block)

    def num_draft_tokens(self, request_id: str) -> int:
        return len(queries.find_request(self._state, request_id).drafts)

    def num_computed_tokens(self, request_id: str) -> int:
        return queries.find_request(self._state, request_id).num_computed

    def get_row(self, request_id: str) -> int:
        return queries.find_request(self._state, request_id).row

    def status(self, request_id: str) -> Status:
        return queries.find_request(self._state, request_id).status

    @property
    def in_flight(self) -> tuple[int, ...]:
        return tuple(each.number for each in self._state.unfinished)

    @property
    def num_free_blocks(self) -> int:
        return self._state.device.num_free

    @property
    def num_free_host_blocks(self) -> int:
        return 0 if self._state.host is None else self._state.host.num_free

    def encode(self) -> bytes:
        return encoding.encode(self._state)

    def restore(self, data: bytes) -> None:
        self._state = decoding.decode(data)
