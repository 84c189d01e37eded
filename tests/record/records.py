# SPDX-License-Identifier: Apache-2.0
"""Runs that are recorded, call by call, and the checks of a record."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs

from kvcore import (
    Config,
    Group,
    KVCacheManager,
    KvCacheRetentionConfig,
    Request,
    TokenRangeRetentionConfig,
)
from kvcore.record.reader import read_calls, segment_files
from kvcore.record.recorder import Recorder
from kvcore.record.segment import read_segment
from kvcore.replay.records.rerun import Player
from kvcore.trace.calls import Call, perform_on
from tests.conftest import Backend

SEED = b"records"


def record(
    folder: Path,
    config: Config,
    calls: Sequence[Call],
    backend: Backend,
    start: int = 0,
    **options: Any,
) -> list[bytes]:
    """Record calls; the manager's state before the first and after each.

    start: how many calls are made before the record begins. A third of the hits were looked up
    before, as in an engine.
    """
    manager = KVCacheManager(config, backend)
    for call in calls[:start]:
        perform_on(manager, call)
    manager.start_recording(Recorder(folder, **{"segment_bytes": 1 << 16, **options}))
    states = [manager.encode()]
    for number, call in enumerate(calls[start:]):
        names_hit = call.name in ("allocate_slots", "load") and len(call.args) > 2
        if names_hit and call.args[2] is not None and number % 3:
            perform_on(manager, Call("get_computed_blocks", call.args[:1]))
            states.append(manager.encode())
        perform_on(manager, call)
        states.append(manager.encode())
    manager.stop_recording()
    return states


def contents(folder: Path) -> list[bytes]:
    """Return the bytes of a record's files, oldest first."""
    return [path.read_bytes() for path in segment_files(folder)]


def check_replays(folder: Path, states: Sequence[bytes], backend: Backend) -> int:
    """Assert that each file of a record, alone, leads through the states; count the calls."""
    num_calls = 0
    for path in segment_files(folder):
        segment = read_segment(path)
        assert segment.state == states[segment.header.first_call]
        player = Player(segment, backend)
        for call in read_calls(segment):
            assert player.make(call) == call.outcome, call
            assert player.manager.encode() == states[call.number + 1], call
            num_calls += 1
    return num_calls


def story() -> list[Call]:
    """Return calls with a hit, a refusal, misuse, drafts, a fork, a swap, new weights; 7 blocks."""
    prompt = [1, 2, 3, 4, 5]
    return [
        Call("add_request", (Request("a", prompt, cache_salt="s"),)),
        Call("allocate_slots", ("a", 5), {"num_lookahead_tokens": 1}),
        Call("take_batch"),
        Call("append", (["a"], [6])),
        Call("take_batch"),
        Call("add_request", (Request("b", [*prompt, 9], cache_salt="s"),)),
        Call("get_computed_blocks", ("b",)),
        Call("allocate_slots", ("b", 40)),
        Call("free", ("nobody",)),
        Call("add_drafts", ("a", [7, 8])),
        Call("allocate_slots", ("a", 2)),
        Call("take_batch"),
        Call("accept", ("a", 1)),
        Call("fork", ("a", "c")),
        Call("append", (["c", "a"], [1, 2])),
        Call("take_batch"),
        Call("swap_out", (["c"],)),
        Call("take_batch"),
        Call("free", ("a",)),
        Call("remove_request", ("a",)),
        Call("take_events"),
        Call("take_batch"),
        Call("advance_epoch"),
        Call("advance_epoch", (1,)),
        Call("advance_epoch", (), {"epoch": 300}),
        Call("take_batch"),
    ]


CONFIG = Config(8, 2, num_host_blocks=8, hash_seed=SEED, enable_events=True)
INSIDE = attrs.evolve(CONFIG, block_size=8, groups=(Group(8),), hash_block_size=2)
"""In which the story's hits end inside blocks."""

RETENTION = KvCacheRetentionConfig(
    [TokenRangeRetentionConfig(0, 2, 80, 1000), TokenRangeRetentionConfig(2, None, 20)], 60, 300
)
MORE = KvCacheRetentionConfig([TokenRangeRetentionConfig(2, 4, 0, 5)], 100)
LEVELS = Config(9, 2, hash_seed=SEED, eviction="retention", max_model_len=8, max_pinned_blocks=2)


def levels_story() -> list[Call]:
    """Return calls with wishes, without and with an end, and a pin; then time falls."""
    return [
        Call("add_request", (Request("a", [1, 2, 3, 4, 5], retention=RETENTION),)),
        Call("allocate_slots", ("a", 5)),
        Call("take_batch"),
        Call("extend_retention", ("a", MORE)),
        Call("pin_prefix", ("system", "a", 4)),
        Call("pin_prefix", ("", "nobody", 4)),
        Call("free", ("a",)),
        Call("take_batch"),
        Call("tick", (1000,)),
        Call("tick", (999,)),
        Call("unpin_prefix", ("system",)),
        Call("unpin_prefix", ("system",)),
        Call("add_request", (Request("b", [6, 7, 8, 9, 0, 1, 2]),)),
        Call("allocate_slots", ("b", 7)),
        Call("take_batch"),
    ]
