# SPDX-License-Identifier: Apache-2.0
"""kvcore hits what vLLM's own managers hit, look-up by look-up, on small lists of operations.

`hits.json` is what they said: `python -m benches.peers.hits > tests/peers/hits.json` asks again.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any, Literal

import pytest

from benches import record
from benches.peers import work
from benches.peers.kvcore_peers import Batched, Calls
from benches.peers.replay import Peer, run

LISTS: list[dict[str, Any]] = json.loads(Path(__file__).with_name("hits.json").read_text())
EVICTIONS: dict[str, Literal["lru", "uncached_first"]] = {
    "vllm033": "uncached_first",
    "vllm085": "lru",
}


def recorded(arguments: list[str], folder: Path) -> Path:
    """Return the file of a list."""
    file = folder / "made.ops"
    record.main([*arguments, "--out", str(file)])
    return file


def replayed(peer: Peer, file: Path) -> list[int]:
    """Return the hits of each look-up."""
    read = work.read(file)
    run(peer, read, [prompt.tolist() for prompt in read.prompts])
    return peer.hits


@pytest.mark.parametrize("made", LISTS, ids=lambda made: " ".join(made["record"][:6]))
@pytest.mark.parametrize("peer", EVICTIONS)
def test_each_look_up_hits_what_vllm_hits(made: dict[str, Any], peer: str, tmp_path: Path) -> None:
    file = recorded(made["record"], tmp_path)
    assert hashlib.sha256(file.read_bytes()).hexdigest() == made["sha256"]
    read = work.read(file)
    eviction = EVICTIONS[peer]
    assert replayed(Calls(read, eviction=eviction), file) == made[peer]
    assert replayed(Batched(read, eviction=eviction), file) == made[peer]
    assert replayed(Calls(read, eviction=eviction, backend="python"), file) == made[peer]


def test_the_lists_tell_the_orders_of_eviction_apart() -> None:
    differing = [made for made in LISTS if made["vllm033"] != made["vllm085"]]
    assert len(differing) >= len(LISTS) // 2
    assert all(any(made["vllm033"]) for made in LISTS)
