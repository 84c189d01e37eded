# SPDX-License-Identifier: Apache-2.0
"""The store events of a scheduler, in every third run: tokens, parents, keys and sessions.

They are compared block by block: kvcore announces what a load and a step store in two events, vLLM
in one. Their order within a step is not compared, nor are removals: of several blocks with one
content kvcore announces the last that leaves.
"""

from __future__ import annotations

from typing import Any

from vllm.config import KVEventsConfig
from vllm.distributed.kv_events import BlockStored

from benches.vllm.options import MODES


def events_of(mode: str, seed: int) -> KVEventsConfig | None:
    """Return vLLM's configuration of events for a run, or None if it has none.

    Without events the adapter takes shorter paths, so most runs have none. States get their keys a
    step later than in vLLM.
    """
    if seed % 3 != 2 or MODES[mode].has_states:
        return None
    return KVEventsConfig(enable_kv_cache_events=True, publisher="null")


def blocks_of(event: BlockStored) -> list[str]:
    """Return what a store event says of each of its blocks, as text."""
    hashes, size = event.block_hashes, event.block_size
    extra = event.extra_keys or [None] * len(hashes)
    parents = [event.parent_block_hash, *hashes]
    kind = (event.kv_cache_spec_kind, event.kv_cache_spec_sliding_window)
    of_all = (event.group_idx, *kind, event.medium, event.lora_name, event.session_id)
    return [
        f"{parents[at]} {hashes[at]} {event.token_ids[at * size : (at + 1) * size]} {extra[at]}"
        f" {of_all}"
        for at in range(len(hashes))
    ]


class Stored:
    """What a scheduler announced as stored since the last call of `take`."""

    def __init__(self) -> None:
        self._events: list[str] = []

    def publish(self, batch: Any) -> None:
        """Note a batch, in place of the publisher."""
        for event in batch.events:
            if isinstance(event, BlockStored):
                self._events += blocks_of(event)

    def take(self) -> list[str]:
        """Return the events in the order of their text, and forget them."""
        taken, self._events = sorted(self._events), []
        return taken


def note_stored(scheduler: Any) -> Stored:
    """Note the store events of a scheduler from now on."""
    stored = Stored()
    scheduler.kv_event_publisher.publish = stored.publish
    return stored
