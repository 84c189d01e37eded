# SPDX-License-Identifier: Apache-2.0
"""The facade of vLLM 0.8.5's V1 manager hits what the original hits, look-up by look-up.

`hits.json` is what the original said; the facade is driven as the original was (`vllm085.py`).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benches import record
from benches.peers import work
from benches.peers.replay import run
from benches.peers.vllm_scheduler import V1Facade
from benches.peers.work import Work
from kvcore.legacy.v1_0_8.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
)
from kvcore.legacy.v1_0_8.kv_cache_manager import KVCacheManager
from tests.conformance.legacy_utils.requests import EngineRequest
from tests.conftest import Backend

LISTS: list[dict[str, Any]] = json.loads(Path(__file__).with_name("hits.json").read_text())


class SmallRequest(EngineRequest):
    """A request as vLLM's scheduler extends it."""

    def append_output_token_ids(self, token: int) -> None:
        self.all_token_ids.append(token)


class Facade(V1Facade):
    """The facade as the manager of vLLM's scheduler."""

    def __init__(self, made: Work, hashing: Any, backend: Backend) -> None:
        spec = FullAttentionSpec(made.block_size, num_kv_heads=1, head_size=1, dtype="float32")
        groups = [KVCacheGroupSpec(["layer"], spec)]
        manager = KVCacheManager(
            KVCacheConfig(made.num_blocks, {}, groups),
            max_model_len=made.num_tokens_max,
            caching_hash_algo=hashing,
            backend=backend,
        )
        super().__init__(manager)

    def add(self, request: int, prompt: Any) -> None:
        self.requests[request] = SmallRequest(str(request), prompt)


@pytest.mark.seed("S001-41", "S001-72", "S001-77", "S001-82")
@pytest.mark.parametrize("made", LISTS, ids=lambda made: " ".join(made["record"][:6]))
@pytest.mark.parametrize("hashing", ["builtin", "sha256"])
def test_each_look_up_hits_what_the_original_hits(
    made: dict[str, Any], hashing: str, backend: Backend, tmp_path: Path
) -> None:
    file = tmp_path / "made.ops"
    record.main([*made["record"], "--out", str(file)])
    read = work.read(file)
    facade = Facade(read, hashing, backend)
    run(facade, read, [prompt.tolist() for prompt in read.prompts])
    assert facade.hits == made["vllm085"]
    assert any(facade.hits)
    facade.manager.check()
