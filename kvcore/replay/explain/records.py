# SPDX-License-Identifier: Apache-2.0
"""`kvcore explain RECORD`: makes the calls of a record again, one by one, with an observer."""

from __future__ import annotations

import os
from typing import Any

import attrs

from kvcore.record.errors import InvalidRecorder, RecordNeedsText
from kvcore.record.reader import read_calls, segment_files
from kvcore.record.segment import CONTINUES, KEYS, read_segment
from kvcore.replay.explain.explained import Explained
from kvcore.replay.records.rerun import Backend, Player
from kvcore.replay.report_text import counted
from kvcore.types.config import Config


@attrs.frozen
class Again:
    """A record whose calls were made again."""

    record: str
    backend: str
    config: Config
    num_calls: int
    num_steps: int

    def lines(self) -> list[str]:
        """Return lines about the record and its manager."""
        config, calls = self.config, counted(self.num_calls, "call")
        blocks, tokens = counted(config.num_blocks, "block"), counted(config.block_size, "token")
        return [
            f"{self.record}: {calls} in {counted(self.num_steps, 'step')}",
            f"{blocks} of {tokens}, {config.eviction}, {self.backend} core",
        ]

    def data(self) -> dict[str, Any]:
        """Return the same as plain data."""
        return {
            "record": self.record,
            "backend": self.backend,
            "calls": self.num_calls,
            "steps": self.num_steps,
        }


def explain_record(path: str | os.PathLike[str], explained: Explained, backend: Backend) -> Again:
    """Make the calls of a record again, and explain each admission.

    Raises RecordNeedsText for a record by keys without prefix caching; InvalidRecorder for one that
    begins with requests, has a gap, or differs when its calls are made again; NotARecord,
    NewerRecord, DamagedRecord.
    """

    def refuse(reason: str) -> InvalidRecorder:
        return InvalidRecorder(name="record", value=str(path), reason=reason)

    player, observer, num_calls, num_steps, follows = None, None, 0, 0, 0
    for segment in map(read_segment, segment_files(path)):
        if player is None:
            player, follows = Player(segment, backend), segment.header.first_call
            config, requests = player.manager.config, player.manager.state().requests
            if requests:
                there = counted(len(requests), "request")
                raise refuse(f"it begins with {there}, whose past it does not contain")
            if not segment.header.flags & KEYS:
                player.manager = explained.observe(player.manager)
            elif config.enable_caching:
                player.manager, observer = explained.observe_by_keys(player.manager)
            else:
                raise RecordNeedsText(what="an explanation without prefix caching", path=str(path))
        elif segment.header.first_call != follows or not segment.header.flags & CONTINUES:
            raise refuse(f"some calls before {segment.path.name} are missing")
        player.hits.clear()
        for call in read_calls(segment):
            if call.result is not None:
                if observer is not None:
                    observer.hashes = call.hashes or {}
                if player.make(call) != call.outcome:
                    raise refuse(f"call {call.number:,} differs: `kvcore replay` shows how")
                num_calls, follows = num_calls + 1, call.number + 1
                num_steps += call.name == "take_batch"
    return Again(str(path), backend, config, num_calls, num_steps)
