# SPDX-License-Identifier: Apache-2.0
"""The radix tree of Dynamo 1.6.1, fed with `DynamoForm`, answers as the managers do."""

from __future__ import annotations

import json
import subprocess
from typing import Any

import pytest

from kvcore.codec.event_msgpack import event_maps
from kvcore.event_index import DynamoForm
from kvcore.sanitizer.hunter.adapter import peer_python
from tests.event_index.fleet import SIZE, Engine

PYTHON = peer_python("dynamo")
pytestmark = [
    pytest.mark.dynamo,
    pytest.mark.skipif(
        not PYTHON.exists(), reason="Dynamo is not installed: `make engines-dynamo`"
    ),
]
TREE = """
import json, sys
from dynamo.llm import RadixTree, compute_block_hash_for_seq
tree, scores = RadixTree(), []
for line in sys.stdin:
    worker, event, tokens, size, salt = json.loads(line)
    if event:
        tree.apply_event(worker, json.dumps(event).encode())
    else:
        hashes = compute_block_hash_for_seq(tokens, size, cache_namespace=salt)
        scores.append(sorted(map(list, tree.find_matches(hashes).scores.items())))
print(json.dumps(scores))
"""


def test_the_tree_finds_what_the_managers_find() -> None:
    engines = [Engine(seed, "rust") for seed in (11, 12)]
    forms = [DynamoForm(rank) for rank in range(2)]
    lines: list[tuple[Any, ...]] = []
    expected: list[list[list[Any]]] = []
    for step in range(120):
        for worker, engine in enumerate(engines):
            engine.step()
            for event in event_maps(engine.manager.take_events()):
                form = forms[worker].as_dynamo(event, len(lines))
                assert form is not None
                lines.append((worker, form, None, SIZE, None))
        tokens, salt = engines[0].prompt() + engines[1].prompt(), (None, "tenant")[step % 2]
        lines.append((None, None, tokens, SIZE, salt))
        found = [engine.ask(tokens, salt)[1] for engine in engines]
        expected.append([[[worker, worker], count] for worker, count in enumerate(found) if count])
    reported = subprocess.run(
        [str(PYTHON), "-c", TREE],
        input="\n".join(map(json.dumps, lines)),
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(reported.stdout) == expected
    assert sum(map(bool, expected)) > 40
