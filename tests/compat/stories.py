# SPDX-License-Identifier: Apache-2.0
"""Short words for stories about `kvcore.compat`: make it, admit a prompt, end a request.

Requests are the plain objects of `compat_worker`.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from kvcore import Config
from kvcore.compat import KVCacheManager
from tests.compat.worker import EngineRequest
from tests.conftest import Backend


def make(backend: Backend, num_blocks: int = 10, **options: Any) -> KVCacheManager:
    """Return a manager with blocks of two tokens."""
    named = ("log_stats", "own_hashes", "keep_commands", "ends_steps", "reads_tables")
    chosen = {name: options.pop(name) for name in named if name in options}
    config = Config(num_blocks, 2, hash_seed=b"unit", **options)
    return KVCacheManager(config, backend=backend, **chosen)


def admit(
    manager: KVCacheManager, name: str, prompt: list[int], **options: Any
) -> tuple[EngineRequest, list[list[int]]]:
    """Look up a request and schedule all of it in a step of its own. Returns its block ids."""
    request = EngineRequest(name, prompt)
    blocks, num_hit = manager.get_computed_blocks(request)
    got = manager.allocate_slots(request, len(prompt) - num_hit, num_hit, blocks, **options)
    assert got is not None
    request.num_computed_tokens = len(prompt)
    return request, list(manager.get_block_ids(name))


def decode(manager: KVCacheManager, request: EngineRequest, count: int) -> tuple[int, ...]:
    """Schedule this many tokens of a running request in a step. Returns its new blocks."""
    manager.new_step_starts()
    got = manager.allocate_slots(request, count)
    assert got is not None
    request.num_computed_tokens += count
    return got.blocks[0]


def num_found(manager: KVCacheManager, tokens: list[int]) -> int:
    """Count the tokens of a new request with these tokens that would be hit."""
    return manager.get_computed_blocks(EngineRequest(f"asks {tokens}", tokens))[1]


def finish(manager: KVCacheManager, request: EngineRequest) -> None:
    """Free a request that is over."""
    request.status = "FINISHED_STOPPED"
    manager.free(request)


class CountingTokens(list[int]):
    """A list that counts what is read of it."""

    num_read = 0

    def __getitem__(self, index: Any) -> Any:
        got = super().__getitem__(index)
        self.num_read += len(got) if isinstance(index, slice) else 1
        return got


def plain(name: str, tokens: Any, **fields: Any) -> Any:
    """Return a request object with the fewest attributes, and these."""
    given = {"all_token_ids": tokens, "num_tokens": len(tokens), "num_computed_tokens": 0}
    return SimpleNamespace(request_id=name, **{**given, **fields})
