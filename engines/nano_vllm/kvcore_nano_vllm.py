# SPDX-License-Identifier: Apache-2.0
"""nano-vllm over kvcore: its `BlockManager`, and the functions that install it in the engine.

nano-vllm makes six calls, each about one sequence, and publishes blocks after the step that writes
them. The adapter calls kvcore once per block: a sequence gets slots for whole blocks, and the
positions of its last block behind the known tokens are placeholders. When a decode step has filled
that block, one call hands in its tokens and publishes it. The steps in between need no call.

Written for commit bb823b3 of nano-vllm; `install` refuses a `BlockManager` with other calls, and
files that are not as in that commit.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator
from importlib import import_module
from inspect import signature
from pathlib import Path
from typing import Any

from kvcore import Config, Hit, KVCacheManager, Request, Verdict

COMMIT = "bb823b3"


class Unsupported(NotImplementedError):
    """The adapter does not support this version of nano-vllm, or calls in this order."""


class BlockManager:
    """nano-vllm's six calls over a `KVCacheManager`, which is `manager`.

    Block ids, hits and refusals are those of nano-vllm's own class, except that a content with two
    blocks stays findable until both are gone.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.manager = KVCacheManager(Config(num_blocks, block_size, null_block=False))
        self._hits: dict[str, Hit] = {}  # of sequences that were looked up and hold no blocks yet

    def can_allocate(self, seq: Any) -> int:
        """Return the number of cached blocks of a sequence, or -1 if the others do not fit now."""
        name, size = str(seq.seq_id), self.block_size
        if name not in self._hits:
            self.manager.add_request(Request(name, seq.token_ids))
        hit = self._hits[name] = self.manager.get_computed_blocks(name)
        num_slots = seq.num_blocks * size - hit.num_tokens
        fits = self.manager.can_allocate(name, num_slots, hit, num_output_placeholders=size)
        return hit.num_tokens // size if fits is Verdict.OK else -1

    def allocate(self, seq: Any, num_cached_blocks: int) -> None:
        """Give a sequence its cached blocks, and new blocks for the rest."""
        hit = self._hits.get(str(seq.seq_id))
        if hit is None or hit.num_tokens != num_cached_blocks * self.block_size:
            what = f"sequence {seq.seq_id} gets {num_cached_blocks} cached blocks"
            raise Unsupported(f"{what}, which is not what can_allocate found last")
        new = self._grow(seq, seq.num_blocks * self.block_size - hit.num_tokens, hit)
        del self._hits[str(seq.seq_id)]
        seq.block_table.extend(hit.blocks.blocks[0] + new)
        seq.num_cached_tokens = hit.num_tokens

    def deallocate(self, seq: Any) -> None:
        """Give back the blocks of a finished or preempted sequence, and forget it."""
        name = str(seq.seq_id)
        if self._hits.pop(name, None) is not None or seq.block_table:
            self.manager.free(name)
            self.manager.remove_request(name)
        seq.num_cached_tokens = 0
        seq.block_table.clear()

    def can_append(self, seq: Any) -> bool:
        """Return whether there is a slot for the last token of a sequence."""
        has_slot = seq.num_tokens <= len(seq.block_table) * self.block_size
        return has_slot or self.manager.num_free_blocks > 0

    def may_append(self, seq: Any) -> None:
        """Give a sequence a block for its last token if its other blocks are full."""
        computed, num_tokens = seq.num_cached_tokens, seq.num_tokens
        if computed != num_tokens - 1:
            what = f"sequence {seq.seq_id} is to decode with {computed} of its {num_tokens} tokens"
            raise Unsupported(f"{what} computed: an earlier step did not finish")
        if num_tokens > len(seq.block_table) * self.block_size:
            seq.block_table.extend(self._grow(seq, self.block_size))

    def hash_blocks(self, seq: Any) -> None:
        """Publish the blocks that the step which just ran has filled."""
        end = seq.num_cached_tokens + seq.num_scheduled_tokens
        if seq.is_prefill:
            self.manager.cache_blocks(str(seq.seq_id), end)
        elif end % self.block_size == 0:
            known = self.manager.num_tokens(name := str(seq.seq_id))
            self.manager.add_tokens(name, seq.token_ids[known:end])

    def _grow(self, seq: Any, num_slots: int, hit: Hit | None = None) -> tuple[int, ...]:
        """Schedule whole blocks, with placeholders behind the sequence's known tokens."""
        name, size = str(seq.seq_id), self.block_size
        got = self.manager.allocate_slots(
            name, num_slots, hit, delay_cache_blocks=True, num_output_placeholders=size
        )
        if not got:
            raise Unsupported(f"sequence {seq.seq_id} gets blocks that it was refused: {got}")
        self.manager.take_batch()  # it contains no work for nano-vllm
        return got.blocks[0]


CALLS = ("can_allocate", "allocate", "deallocate", "can_append", "may_append", "hash_blocks")
FILES = {
    "block_manager.py": "d0240374f589eaa85c4c7923b8970f2635ab7bc73adc5044fa2d273955b54242",
    "scheduler.py": "e7302942c967d50bb525384fa4a6e0de988d199490479d4f5965d4211bcdbd08",
    "sequence.py": "d5bb5c522d22554b5c36de745150ec8b601827ee0388058404dcceef1ae8290d",
}
"""SHA-256, at that commit, of what the adapter replaces and of what calls it and hands it over."""
_replaced: list[type] = []


def install(*, any_commit: bool = False) -> None:
    """Let each nano-vllm engine that is made from now on use kvcore. Raises Unsupported.

    any_commit: take files that differ from those of the commit, if the calls are the same.
    """
    scheduler: Any = import_module("nanovllm.engine.scheduler")
    if _replaced:
        raise Unsupported("kvcore's BlockManager is installed in nano-vllm already")
    theirs = scheduler.BlockManager
    for name in ("__init__", *CALLS):
        known = [*signature(getattr(BlockManager, name)).parameters]
        found = [*signature(getattr(theirs, name)).parameters] if hasattr(theirs, name) else None
        if found != known:
            has = "no such call" if found is None else f"{name}({', '.join(found)})"
            raise Unsupported(
                f"kvcore-nano-vllm is for commit {COMMIT} of nano-vllm, whose BlockManager has "
                f"{name}({', '.join(known)}); this one has {has}"
            )
    if not any_commit:
        _check_files(Path(scheduler.__file__).parent)
    _replaced.append(theirs)
    scheduler.BlockManager = BlockManager


def _check_files(folder: Path) -> None:
    for name, digest in FILES.items():
        path = folder / name
        content = path.read_bytes().replace(b"\r\n", b"\n") if path.is_file() else b""
        if hashlib.sha256(content).hexdigest() != digest:
            raise Unsupported(
                f"kvcore-nano-vllm is for commit {COMMIT} of nano-vllm, and {path} is not as in "
                f"that commit; install(any_commit=True) looks at the calls alone"
            )


def uninstall() -> None:
    """Undo `install`; engines made in between keep kvcore. Raises Unsupported."""
    scheduler: Any = import_module("nanovllm.engine.scheduler")
    if not _replaced or scheduler.BlockManager is not BlockManager:
        raise Unsupported("kvcore's BlockManager is not installed in nano-vllm")
    scheduler.BlockManager = _replaced.pop()


@contextlib.contextmanager
def installed(*, any_commit: bool = False) -> Iterator[None]:
    """Install within a `with` block, and uninstall at its end."""
    install(any_commit=any_commit)
    try:
        yield
    finally:
        uninstall()
