# SPDX-License-Identifier: Apache-2.0
"""The blocks of one sequence in V0: allocate, append, look ahead, fork, free.

Rules: full blocks are immutable, the last one may be part full, those behind it are empty and there
for tokens to come. What lies behind a sliding window becomes the null block. A call works out what
it needs before its first change. Lists that were handed out are live until a swap, a `free` or an
`update` puts others in their place, which leaves them as they were. Source: S002-66 to 70.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvcore.legacy.block_errors import NoFreeBlocksError, WrongValue, require
from kvcore.legacy.content_block import PrefixCachingBlock
from kvcore.legacy.cpu_gpu_block_allocator import CpuGpuBlockAllocator
from kvcore.legacy.interfaces import Block, BlockId, Device
from kvcore.legacy.null_block import NullBlock


class BlockTable:
    """The blocks of a sequence, in order."""

    def __init__(
        self,
        block_size: int,
        block_allocator: CpuGpuBlockAllocator,
        _blocks: Sequence[Block] | None = None,
        max_block_sliding_window: int | None = None,
    ) -> None:
        """max_block_sliding_window: how many blocks before the computed end are kept."""
        self._block_size = block_size
        self._allocator = block_allocator
        self._max_block_sliding_window = max_block_sliding_window
        self._blocks: list[Block] = []
        self._block_ids: list[BlockId] = []
        self.update(_blocks or [])
        self._num_full_slots = sum(len(block.token_ids) for block in self._blocks)

    @staticmethod
    def get_num_required_blocks(
        token_ids: Sequence[int], block_size: int, num_lookahead_slots: int = 0
    ) -> int:
        """Blocks that tokens and slots behind them take."""
        return -(-(len(token_ids) + num_lookahead_slots) // block_size)

    @property
    def blocks(self) -> list[Block]:
        """The blocks, as a live list."""
        return self._blocks

    @property
    def physical_block_ids(self) -> list[BlockId]:
        """The ids of the blocks, as a live list."""
        return self._block_ids

    @property
    def num_null_blocks(self) -> int:
        """Places that a window has passed."""
        if self._max_block_sliding_window is None:
            return 0
        return sum(isinstance(block, NullBlock) for block in self._blocks)

    @property
    def num_full_slots(self) -> int:
        """Tokens of the table."""
        return self._num_full_slots

    def allocate(
        self,
        token_ids: Sequence[int],
        device: Device = Device.GPU,
        extra_hash: int | None = None,
    ) -> None:
        """Give an empty table blocks for its first tokens. Raises WrongCall, NoFreeBlocksError."""
        held, num = len(self._blocks), len(token_ids)
        require(not held, "the table has {held} blocks already", held=held)
        require(num > 0, "a table is allocated for at least one token, {num} are given", num=num)
        chunks = _chunks(token_ids, self._block_size, self._block_size)
        self.update(self._allocator.allocator(device).allocate_chunks(None, chunks, extra_hash))
        self._num_full_slots = num

    def update(self, blocks: Sequence[Block]) -> None:
        """Take these blocks for the table's, a list itself; ids of before stay what they were."""
        ids: list[Any] = [block.block_id for block in blocks]
        if None in ids:
            ids = [_id_of(block) for block in blocks]
        self._blocks = blocks if type(blocks) is list else list(blocks)
        self._block_ids = ids

    def append_token_ids(
        self,
        token_ids: Sequence[int],
        num_lookahead_slots: int = 0,
        num_computed_slots: int | None = None,
        extra_hash: int | None = None,
    ) -> None:
        """Drop what a window passed, make room, and add tokens.

        num_computed_slots: where the window ends. Raises WrongCall, NoFreeBlocksError.
        """
        self._check_allocated()
        num, first = len(token_ids), self._num_full_slots // self._block_size
        hash((extra_hash, *token_ids))  # What cannot be hashed is found before anything changes.
        if num_lookahead_slots < 0:
            raise WrongValue(
                reason=f"num_lookahead_slots is {num_lookahead_slots}, must be 0 or more"
            )
        adds = self._num_new_blocks(num + num_lookahead_slots) > 0
        if self._max_block_sliding_window is not None:
            self._drop_passed(num_computed_slots, token_ids, num + num_lookahead_slots)
        elif adds or num > self._first_chunk_size():
            self._check_room(token_ids, num + num_lookahead_slots)
        if adds:
            self.ensure_num_empty_slots(num + num_lookahead_slots, extra_hash)
        for position, tokens in enumerate(self._chunks_to_append(token_ids), first):
            block = self._blocks[position]
            block.append_token_ids(tokens)
            self._block_ids[position] = _id_of(block)
        self._num_full_slots += num

    def ensure_num_empty_slots(self, num_empty_slots: int, extra_hash: int | None = None) -> None:
        """Add empty blocks until there is room for so many tokens, all or none.

        Raises WrongCall, NoFreeBlocksError.
        """
        self._check_allocated()
        needed = self._num_new_blocks(num_empty_slots)
        if needed > self._allocator.get_num_free_blocks(Device.GPU):
            raise self._shortage(needed)
        for _ in range(needed):
            block = self._allocator.allocate_mutable_block(self._blocks[-1], Device.GPU, extra_hash)
            self._blocks.append(block)
            self._block_ids.append(_id_of(block))

    def fork(self) -> BlockTable:
        """A table over the same blocks, which are copied where one of the two writes.

        Raises WrongCall.
        """
        self._check_allocated()
        real = [block for block in self._blocks if not isinstance(block, NullBlock)]
        forked = iter(self._allocator.owner(real[-1]).fork_blocks(real))
        blocks = [each if isinstance(each, NullBlock) else next(forked) for each in self._blocks]
        table = BlockTable(
            self._block_size, self._allocator, blocks, self._max_block_sliding_window
        )
        table._num_full_slots = self._num_full_slots
        return table

    def free(self) -> None:
        """Give all blocks back; the table is empty then, and can be allocated again."""
        self._allocator.free_all(self._blocks)
        self.update([])
        self._num_full_slots = 0

    def get_num_blocks_touched_by_append_slots(
        self, token_ids: Sequence[int], num_lookahead_slots: int
    ) -> int:
        """Blocks that new tokens and slots behind them lie in; a part-full one counts always."""
        rest = len(token_ids) + num_lookahead_slots - self._first_chunk_size()
        return 1 - (-rest // self._block_size)

    def get_unseen_token_ids(self, sequence_token_ids: list[int]) -> list[int]:
        """A sequence's tokens that are not in the table yet."""
        return sequence_token_ids[self._num_full_slots :]

    def _get_all_token_ids(self) -> list[int]:
        """The tokens of all blocks, as tests of the original read them."""
        return [token for block in self._blocks for token in block.token_ids]

    def _first_chunk_size(self) -> int:
        """Tokens that fit into the block that the next one goes to."""
        return self._block_size - self._num_full_slots % self._block_size

    def _chunks_to_append(self, token_ids: Sequence[int]) -> list[list[int]]:
        return _chunks(token_ids, self._first_chunk_size(), self._block_size)

    def _num_new_blocks(self, num_empty_slots: int) -> int:
        empty = len(self._blocks) * self._block_size - self._num_full_slots
        return max(0, -(-(num_empty_slots - empty) // self._block_size))

    def _passed(self, num_computed_slots: int | None) -> list[int]:
        """Positions of blocks that the window has passed."""
        if self._max_block_sliding_window is None:
            return []
        reason = "a window over {num} blocks needs the number of computed slots"
        require(num_computed_slots is not None, reason, num=len(self._blocks))
        assert num_computed_slots is not None
        end = num_computed_slots // self._block_size - self._max_block_sliding_window
        if end > self._num_full_slots // self._block_size:
            reason = f"{num_computed_slots} computed slots put the window behind the end of a table"
            raise WrongValue(reason=f"{reason} of {self._num_full_slots} tokens")
        if end == len(self._blocks) and isinstance(self._blocks[-1], PrefixCachingBlock):
            require(False, "no block with a content hash can follow {num} that went", num=end)
        ahead = self._blocks[: max(end, 0)]
        return [at for at, block in enumerate(ahead) if not isinstance(block, NullBlock)]

    def _drop_passed(
        self, num_computed_slots: int | None, token_ids: Sequence[int], num_slots: int
    ) -> None:
        """Give back what the window has passed, if there is room then for what comes."""
        passed = self._passed(num_computed_slots)
        owners = self._allocator.allocator(Device.GPU).refcounter.get
        given_back = sum(owners(self._block_ids[each]) == 1 for each in passed)
        null = int(not self._allocator.has_null_block)
        if null > self._allocator.get_num_free_blocks(Device.GPU):
            raise self._shortage(null)
        self._check_room(token_ids, num_slots, given_back - null)
        null_block = self._allocator.allocate_or_get_null_block()
        for position in passed:
            self._allocator.free(self._blocks[position], keep_block_object=True)
            self._blocks[position] = null_block
            self._block_ids[position] = _id_of(null_block)

    def _check_room(self, token_ids: Sequence[int], num_slots: int, extra: int = 0) -> None:
        """Raise NoFreeBlocksError unless blocks to add and to copy are there.

        extra: how many more than are free will be by then.
        """
        needed = self._num_new_blocks(num_slots)
        first = self._num_full_slots // self._block_size
        last = -(-(self._num_full_slots + len(token_ids)) // self._block_size)
        written = self._block_ids[first:last]
        owners = self._allocator.allocator(Device.GPU).refcounter.get
        needed += sum(owners(each) > 1 for each in written)
        if needed > self._allocator.get_num_free_blocks(Device.GPU) + extra:
            raise self._shortage(needed - min(extra, 0))

    def _shortage(self, needed: int) -> NoFreeBlocksError:
        free, total = (
            self._allocator.get_num_free_blocks(Device.GPU),
            self._allocator.get_num_total_blocks(Device.GPU),
        )
        who = f"a table of {len(self._blocks)} blocks"
        return NoFreeBlocksError(who=who, needed=needed, free=free, total=total)

    def _check_allocated(self) -> None:
        if not self._blocks:
            require(False, "the table has no blocks: allocate it first")


def _id_of(block: Block) -> BlockId:
    block_id = block.block_id
    if block_id is None:
        require(False, "a block of {num} tokens has no id", num=len(block.token_ids))
    assert block_id is not None
    return block_id


def _chunks(token_ids: Sequence[int], first: int, size: int) -> list[list[int]]:
    """Tokens in parts, the first one and the others of these sizes."""
    tokens = token_ids if type(token_ids) is list else list(token_ids)
    parts = [tokens[:first]] if tokens else []
    return parts + [tokens[at : at + size] for at in range(first, len(tokens), size)]
