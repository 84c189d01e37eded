# SPDX-License-Identifier: Apache-2.0
"""nano-vllm's `BlockManager`, commit bb823b3, called as its scheduler calls it.

    KVCORE_NANO_VLLM=CHECKOUT kvcore check --manager kvcore.check.managers.nano_vllm:Manager

It is not in a registry. Only the two files of the manager and of its requests are loaded from a
checkout, since the package needs a GPU.
"""

from __future__ import annotations

import copy
import os
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from kvcore import Config

CHECKOUT = "KVCORE_NANO_VLLM"


def load(name: str) -> Any:
    """Load a module of nano-vllm's checkout. Raises LookupError, FileNotFoundError."""
    folder = os.environ.get(CHECKOUT)
    if not folder:
        raise LookupError(f"set {CHECKOUT} to a checkout of nano-vllm")
    if not (Path(folder) / "nanovllm").is_dir():
        raise FileNotFoundError(f"{CHECKOUT} is {folder}, which has no folder nanovllm")
    if "nanovllm" not in sys.modules:
        package = sys.modules["nanovllm"] = ModuleType("nanovllm")
        package.__path__ = [str(Path(folder) / "nanovllm")]
    return import_module(f"nanovllm.{name}")


class Manager:
    """The manager, with the sequences of a scheduler."""

    def __init__(self, config: Config) -> None:
        self.sequence = load("engine.sequence").Sequence
        self.sequence.block_size = config.block_size
        self.manager = load("engine.block_manager").BlockManager(
            config.num_blocks, config.block_size
        )
        self.sequences: dict[str, Any] = {}

    def __deepcopy__(self, memo: Any) -> Manager:
        other = copy.copy(self)
        other.manager, other.sequences = copy.deepcopy(self.manager, memo), {}
        for name, sequence in self.sequences.items():
            twin = other.sequences[name] = object.__new__(self.sequence)
            twin.__dict__ |= copy.deepcopy(vars(sequence), memo)  # its pickle leaves tokens out
        return other

    def add_request(self, request: Any) -> None:
        self.sequences[request.request_id] = self.sequence(list(request.tokens))

    def get_computed_blocks(self, name: str) -> tuple[None, int]:
        hit = self.manager.can_allocate(self.sequences[name])
        return None, max(0, hit) * self.manager.block_size

    def allocate_slots(self, name: str, count: int, _: Any = None) -> Any:
        sequence = self.sequences[name]
        hit = self.manager.can_allocate(sequence)
        if hit == -1:
            return None
        self.manager.allocate(sequence, hit)
        sequence.num_scheduled_tokens = count
        return sequence.block_table

    def append(self, names: list[str], tokens: list[int]) -> Any:
        sequence = self.sequences[names[0]]
        sequence.append_token(tokens[0])
        if not self.manager.can_append(sequence):
            sequence.token_ids.pop()
            sequence.num_tokens -= 1
            return None
        self.manager.may_append(sequence)
        sequence.num_scheduled_tokens = 1
        return sequence.block_table

    def end_step(self) -> None:
        for sequence in self.sequences.values():
            if sequence.num_scheduled_tokens:
                self.manager.hash_blocks(sequence)
                sequence.num_cached_tokens += sequence.num_scheduled_tokens
                sequence.num_scheduled_tokens = 0

    def free(self, name: str) -> None:
        self.manager.deallocate(self.sequences[name])
        self.sequences[name].num_scheduled_tokens = 0

    def remove_request(self, name: str) -> None:
        del self.sequences[name]

    def get_block_ids(self, name: str) -> Any:
        return (self.sequences[name].block_table,)

    def take_batch(self) -> tuple[()]:
        return ()

    @property
    def num_free_blocks(self) -> int:
        return len(self.manager.free_block_ids)

    def state_name(self, slots: Callable[[int], object]) -> bytes:
        tables = sorted((name, each.block_table) for name, each in self.sequences.items())
        order = [block for _, table in tables for block in table] + [*self.manager.free_block_ids]
        places = {block: place for place, block in reversed([*enumerate(order)])}
        rows = []
        for block in map(self.manager.blocks.__getitem__, sorted(places, key=places.__getitem__)):
            live = slots(block.block_id) if block.ref_count or block.hash != -1 else None
            rows.append((block.ref_count, block.hash, block.token_ids, live))
        index = sorted((key, places[it]) for key, it in self.manager.hash_to_block_id.items())
        counts = [(name, each.num_cached_tokens) for name, each in sorted(self.sequences.items())]
        named = [(name, [places[block] for block in table]) for name, table in tables]
        return repr((rows, index, named, counts)).encode()
