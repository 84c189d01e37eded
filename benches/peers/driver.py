# SPDX-License-Identifier: Apache-2.0
"""Replay one list of operations through one peer in this process; print the cost as JSON.

Run: python -m benches.peers.driver PEER FILE. It runs in the peer's own environment.
"""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

from benches.peers import work
from benches.peers.replay import Maker, Null, replay

MODULES = {
    "kvcore": "benches.peers.kvcore_peers",
    "vllm033": "benches.peers.vllm033",
    "vllm085": "benches.peers.vllm085",
    "sglang": "benches.peers.sglang",
}


def find(name: str) -> Maker:
    """Return the maker of a peer. Raises TypeError for an unknown name."""
    if name == "null":
        return Maker(lambda _: Null())
    found = importlib.import_module(MODULES[name.split("-")[0]]).MAKERS[name]
    if not isinstance(found, Maker):
        raise TypeError(f"{name} is no peer")
    return found


def main() -> None:
    """Replay and print."""
    name, file = sys.argv[1:]
    print(json.dumps(replay(find(name), work.read(Path(file)))))


if __name__ == "__main__":
    main()
