# SPDX-License-Identifier: Apache-2.0
"""Variants of a block manager: keeping copies, recording answers, giving recorded answers."""

from __future__ import annotations

from typing import Any


class Copies(dict[int, int]):
    """An index from hashes to blocks that returns the oldest block and knows the others."""

    def __init__(self) -> None:
        super().__init__()
        self.others: dict[int, list[int]] = {}

    def __setitem__(self, key: int, block: int) -> None:
        if key in self:
            self.others.setdefault(key, []).append(block)
        else:
            super().__setitem__(key, block)

    def drop(self, key: int, block: int) -> None:
        """Forget one block of a hash."""
        others = self.others.get(key, [])
        if self.get(key) != block:
            others.remove(block)
        elif others:
            super().__setitem__(key, others.pop(0))
        else:
            del self[key]


def keeping_copies(theirs: Any) -> Any:
    """Return nano-vllm's manager, changed to find a content while any block has it."""

    class Keeping(theirs):  # type: ignore[misc] # nano-vllm has no types here
        """Its index lists all blocks of a hash."""

        def __init__(self, num_blocks: int, block_size: int) -> None:
            super().__init__(num_blocks, block_size)
            self.hash_to_block_id = Copies()

        def _allocate_block(self) -> int:
            block = self.blocks[self.free_block_ids[0]]
            if block.hash != -1:
                self.hash_to_block_id.drop(block.hash, block.block_id)
                block.hash = -1
            taken: int = super()._allocate_block()
            return taken

    return Keeping


def recording(cls: Any, answers: list[Any]) -> Any:
    """Return a manager class that also records its answers."""

    class Recording(cls):  # type: ignore[misc] # either manager
        """Records its own answers, in order."""

        def can_allocate(self, seq: Any) -> Any:
            answers.append(super().can_allocate(seq))
            return answers[-1]

        def can_append(self, seq: Any) -> Any:
            answers.append(super().can_append(seq))
            return answers[-1]

    return Recording


def repeating(answers: list[Any]) -> Any:
    """Return a manager class that repeats recorded answers and gives every table one block."""

    class Repeating:
        """Decides nothing, to measure the scheduler's cost without its manager."""

        def __init__(self, num_blocks: int, block_size: int) -> None:
            del num_blocks
            self.block_size = block_size
            self.answer = iter(answers).__next__

        def can_allocate(self, _seq: Any) -> Any:
            return self.answer()

        def allocate(self, seq: Any, num_cached_blocks: int) -> None:
            seq.block_table.append(0)
            seq.num_cached_tokens = num_cached_blocks * self.block_size

        def deallocate(self, seq: Any) -> None:
            seq.num_cached_tokens = 0
            seq.block_table.clear()

        def can_append(self, _seq: Any) -> Any:
            return self.answer()

        def may_append(self, seq: Any) -> None: ...

        def hash_blocks(self, seq: Any) -> None: ...

    return Repeating
