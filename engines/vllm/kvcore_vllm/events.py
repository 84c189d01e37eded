# SPDX-License-Identifier: Apache-2.0
"""Convert kvcore's events to vLLM's, with the session and vLLM's form of the extra keys."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from vllm.distributed import kv_events
from vllm.v1.core.kv_cache_utils import (
    generate_block_hash_extra_keys,
    generate_lookahead_block_hash_extra_keys,
    maybe_convert_block_hash,
    to_event_extra_keys,
)
from vllm.v1.kv_cache_interface import get_kv_cache_spec_kind, get_kv_cache_spec_sliding_window

from kvcore import AllBlocksCleared, BlockRemoved, BlockStored
from kvcore.compat import KVCacheManager
from kvcore.types.events import DEVICE_MEDIUM


class Events:
    """Collects the core's events while the request that made them is known.

    num_lookahead: number of tokens behind a block that its hash covers too.
    """

    def __init__(self, compat: KVCacheManager, specs: Iterable[Any], num_lookahead: int) -> None:
        self._compat = compat
        self._num_lookahead = num_lookahead
        self._kinds = [
            (get_kv_cache_spec_kind(spec).value, get_kv_cache_spec_sliding_window(spec))
            for spec in specs
        ]
        self._scheduled: dict[str, Any] = {}
        self._events: list[Any] = []

    def collect(self, request: Any | None = None) -> None:
        """Take the events of the last call. request: the request of that call, or None."""
        if request is not None:
            self._scheduled.pop(request.request_id, None)  # so that it comes last
            self._scheduled[request.request_id] = request
        for event in self._compat.take_events():
            match event:
                case BlockStored():
                    self._store(event)
                case BlockRemoved():
                    hashes = [maybe_convert_block_hash(event.block_hash)]
                    self._events.append(
                        kv_events.BlockRemoved(
                            block_hashes=hashes, medium=event.medium, group_idx=event.group_id
                        )
                    )
                case AllBlocksCleared():
                    self._events.append(kv_events.AllBlocksCleared())

    def report_hit(self, request: Any, ids: Sequence[Sequence[int]]) -> None:
        """Make store events for a hit if the request wants every block that it uses reported."""
        if getattr(request, "kv_cache_report_mode", "incremental") != "full":
            return
        scales = self._compat.config.scales
        for number, (blocks, scale) in enumerate(zip(ids, scales, strict=True)):
            hashes = request.block_hashes[scale - 1 :: scale][: len(blocks)]
            if hashes:
                self._events.append(self._stored(request, number, hashes, 0, None))

    def take(self) -> list[Any]:
        """Return the events since the last call, and forget the requests of the step."""
        self.collect()
        self._scheduled.clear()
        taken, self._events = self._events, []
        return taken

    def annotated(self) -> list[Any]:
        """Return the same events with the kind of each group, as vLLM's manager does."""
        events = self.take()
        for event in events:
            if isinstance(event, kv_events.BlockStored):
                kind, window = self._kinds[event.group_idx]
                event.kv_cache_spec_kind = kind
                event.kv_cache_spec_sliding_window = window
        return events

    def _store(self, event: BlockStored) -> None:
        """Convert a store event. Its tokens and session are those of the request with all its
        hashes that was called last: others may share the first ones only.
        """
        config, hashes = self._compat.config, event.block_hashes
        size, scale = config.hash_block_size, config.scales[event.group_id]
        for request in reversed(self._scheduled.values()):
            own = request.block_hashes
            if hashes[0] not in own:
                continue
            at = own.index(hashes[0])
            if tuple(own[at : at + len(hashes) * scale : scale]) == hashes:
                start, parent = (at + 1) * size - event.block_size, event.parent_hash
                self._events.append(self._stored(request, event.group_id, hashes, start, parent))
                return

    def _stored(
        self, request: Any, group_id: int, hashes: Sequence[bytes], start: int, parent: bytes | None
    ) -> Any:
        """Make a store event for consecutive blocks of a request from this token on."""
        size = self._compat.config.groups[group_id].block_size
        firsts = range(start, start + len(hashes) * size, size)
        lora, tokens, ahead = request.lora_request, request.all_token_ids, self._num_lookahead
        return kv_events.BlockStored(
            block_hashes=[maybe_convert_block_hash(each) for each in hashes],
            parent_block_hash=None if parent is None else maybe_convert_block_hash(parent),
            token_ids=tokens[start : firsts[-1] + size],
            block_size=size,
            lora_id=lora.adapter_id if lora else None,
            medium=DEVICE_MEDIUM,
            lora_name=lora.name if lora else None,
            extra_keys=to_event_extra_keys([self._extra_keys(request, at, size) for at in firsts]),
            group_idx=group_id,
            session_id=request.session_id,
            lookahead_token_ids=(
                [list(tokens[at + size : at + size + ahead]) for at in firsts] if ahead else None
            ),
        )

    def _extra_keys(self, request: Any, start: int, size: int) -> tuple[Any, ...] | None:
        end = start + size
        keys: tuple[Any, ...] | None
        if self._num_lookahead:
            behind = end + self._num_lookahead
            keys, _ = generate_lookahead_block_hash_extra_keys(request, start, end, behind, 0)
        else:
            keys, _ = generate_block_hash_extra_keys(request, start, end, 0)
        return keys
