# SPDX-License-Identifier: Apache-2.0
"""Record what small lists of operations hit in vLLM's own managers, so that tests need no vLLM.

Run: python -m benches.peers.hits > tests/peers/hits.json. Installs both versions of vLLM first
(benches/peers/install.py). tests/peers/test_hits.py compares kvcore with the records.
"""

from __future__ import annotations

import hashlib
import json
import sys
from contextlib import redirect_stdout
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benches import record
from benches.peers import install
from benches.peers.measure import run_once

PEERS = ("vllm033", "vllm085")
# Seed, blocks, block size: pools that are short of blocks to different degrees.
LISTS = (
    (1, 40, 4),
    (2, 48, 4),
    (3, 64, 4),
    (4, 96, 4),
    (5, 160, 4),
    (6, 24, 8),
    (7, 32, 8),
    (8, 160, 1),
    (9, 16, 16),
    (10, 12, 16),
)


def list_arguments(seed: int, num_blocks: int, block_size: int) -> list[str]:
    """Return the arguments of `benches.record` for a list."""
    sizes = ["--blocks", num_blocks, "--block-size", block_size, "--budget", 64]
    return [str(word) for word in ("--made", seed, *sizes, "--max-running", 8)]


def main() -> None:
    """Print the lists with the hits of each look-up."""
    install.install(PEERS)
    found: list[dict[str, Any]] = []
    with TemporaryDirectory() as folder:
        for numbers in LISTS:
            file = Path(folder) / "made.ops"
            arguments = list_arguments(*numbers)
            with redirect_stdout(sys.stderr):
                record.main([*arguments, "--out", str(file)])
            digest = hashlib.sha256(file.read_bytes()).hexdigest()
            hits = {peer: run_once(peer, file).hits for peer in PEERS}
            print({peer: sum(each) for peer, each in hits.items()}, file=sys.stderr)
            found.append({"record": arguments, "sha256": digest, **hits})
    lines = ",\n".join(json.dumps(each) for each in found)
    print(f"[\n{lines}\n]")


if __name__ == "__main__":
    main()
