# SPDX-License-Identifier: Apache-2.0
"""The blocks of one sequence in V0: allocate, append, look ahead, fork, free.

Full blocks are immutable, the last one may be partly full, and the blocks after it are empty, ready
for coming tokens. Blocks that a sliding window has passed become the null block. If block objects
were changed directly, a call reads those changes first; it computes what it needs before its first
change. Lists that were handed out are live until a swap, a `free` or an `update` replaces them.
Source: S002-66 to 70.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvcore.legacy.blocks.named_enum import Device
from kvcore.legacy.v0.block import Block, NullBlock
from kvcore.legacy.v0.block_allocator import BlockAllocator
from kvcore.legacy.v0.common import ids_of
from kvcore.legacy.v0.cpu_gpu_block_allocator import CpuGpuBlockAllocator
from kvcore.legacy.v0.errors import WrongValue, require


class BlockTable:
    """The blocks of a sequence, in order; positions that a window has passed hold the null block.

    blocks, physical_block_ids: live lists. num_null_blocks: number of positions that a window has
    passed. _home: the allocator of the device that has the blocks. _num_by_hand: its `num_by_hand`
    when the blocks were last read; -1 if the objects belong to a caller, or to another table.
    """

    def __init__(
        self,
        block_size: int,
        block_allocator: CpuGpuBlockAllocator,
        _blocks: Sequence[Block] | None = None,
        max_block_sliding_window: int | None = None,
    ) -> None:
        """max_block_sliding_window: number of blocks kept before the end of the computed tokens."""
        self._block_size = block_size
        self._allocator = block_allocator
        self._max_block_sliding_window = max_block_sliding_window
        self._clear()
        if _blocks:
            self.update(_blocks)

    @staticmethod
    def get_num_required_blocks(
        token_ids: Sequence[int], block_size: int, num_lookahead_slots: int = 0
    ) -> int:
        """Return how many blocks tokens and lookahead slots take."""
        return -(-(len(token_ids) + num_lookahead_slots) // block_size)

    @property
    def num_full_slots(self) -> int:
        """The number of tokens in the table."""
        if self._num_by_hand != self._home.num_by_hand:
            self._read()
        return self._num_full_slots

    @property
    def real_blocks(self) -> list[Block]:
        """The blocks that no window has passed. Raises WrongCall."""
        return self._read()[self.num_null_blocks :]

    def allocate(
        self,
        token_ids: Sequence[int],
        device: Device = Device.GPU,
        extra_hash: int | None = None,
    ) -> None:
        """Give an empty table blocks for its first tokens. Raises WrongCall, NoFreeBlocksError."""
        require(not self.blocks, "the table has {held} blocks already", held=len(self.blocks))
        if not token_ids:
            require(False, "a table is allocated for at least one token, {num} are given", num=0)
        tokens, size, home = list(token_ids), self._block_size, self._allocator.allocator(device)
        chunks = [tokens[at : at + size] for at in range(0, len(tokens), size)]
        self._be(home.fill(None, chunks, extra_hash), home, 0, len(tokens))

    def update(self, blocks: Sequence[Block]) -> None:
        """Replace the table's blocks; a list is used itself, and old id lists stay unchanged.

        Raises WrongCall if a block has no owner.
        """
        given = blocks if type(blocks) is list else list(blocks)
        num_null = sum(isinstance(block, NullBlock) for block in given)
        home = self._owner(given[num_null:])
        num = sum(len(block.token_ids) for block in given[num_null:])
        self._be(given, home, num_null, num_null * self._block_size + num)
        self._num_by_hand = -1

    def append_token_ids(
        self,
        token_ids: Sequence[int],
        num_lookahead_slots: int = 0,
        num_computed_slots: int | None = None,
        extra_hash: int | None = None,
    ) -> None:
        """Drop blocks that a window has passed, make room, and add tokens.

        num_computed_slots: the position at which the window ends. Raises WrongCall,
        NoFreeBlocksError.
        """
        blocks = self._read(least=1)
        hash((extra_hash, *token_ids))  # Unhashable tokens raise here, before anything changes.
        if num_lookahead_slots < 0:
            raise WrongValue(
                reason=f"num_lookahead_slots is {num_lookahead_slots}, must be 0 or more"
            )
        num, num_old, size = len(token_ids), len(blocks), self._block_size
        first, end = self._num_full_slots // size, self._num_full_slots + num
        num_new = max(0, -(-(end + num_lookahead_slots) // size) - num_old)
        if num_new:
            self._check_grows(num_new)
        if self._home.caches and first < num_old and blocks[first].computed:
            reason = "block {block} is computed: {num} tokens cannot be added"
            require(False, reason, block=blocks[first].block_id, num=num)
        if self._max_block_sliding_window is not None:
            self._drop_passed(num_computed_slots, num, num_new)
        elif min(num_old, -(-end // size)) - first + (num_new > 0) > 1:
            self._check_room(num, num_new)  # with one such block, the call that takes it checks
        if num_new:
            self._add(num_new, extra_hash)
        if num:
            self._write(token_ids, first, num_old)
        self._home.num_by_hand += self._num_by_hand < 0

    def ensure_num_empty_slots(self, num_empty_slots: int, extra_hash: int | None = None) -> None:
        """Add empty blocks, all or none, until there are num_empty_slots empty slots.

        Raises WrongCall, NoFreeBlocksError.
        """
        self._read(least=1)
        num_new = self._num_missing(num_empty_slots)
        self._check_grows(num_new)
        self._add(num_new, extra_hash)

    def fork(self) -> BlockTable:
        """Return a table over the same blocks; a block is copied when one of the two writes it.

        Raises WrongCall.
        """
        blocks, num_null = self._read(least=1), self.num_null_blocks
        window = self._max_block_sliding_window
        table = BlockTable(self._block_size, self._allocator, max_block_sliding_window=window)
        forked = blocks[:num_null] + self._home.fork_blocks(blocks[num_null:])
        table._be(forked, self._home, num_null, self._num_full_slots)
        return table

    def free(self) -> None:
        """Free all blocks; the empty table can then be allocated again.

        Raises WrongCall.
        """
        blocks = self._read()
        self._home.give_back(self.physical_block_ids[self.num_null_blocks :])
        self._home.part_with(blocks[self.num_null_blocks :])
        self._home.num_by_hand += self._num_by_hand < 0
        self._clear()

    def moved(self, home: BlockAllocator) -> None:
        """Record that the blocks now belong to another device."""
        self._be(self.blocks, home, self.num_null_blocks, self._num_full_slots)

    def get_num_blocks_touched_by_append_slots(
        self, token_ids: Sequence[int], num_lookahead_slots: int
    ) -> int:
        """Return how many blocks new tokens and lookahead slots touch.

        A partly full block always counts.
        """
        return self.count_touched(self._num_full_slots + len(token_ids), num_lookahead_slots)

    def count_touched(self, num_tokens: int, num_lookahead_slots: int) -> int:
        """Return how many blocks a sequence touches by growing to num_tokens tokens."""
        size, full = self._block_size, self._num_full_slots
        return -(-(max(num_tokens, full) + num_lookahead_slots) // size) - full // size

    def count_needed(self, num_tokens: int, num_lookahead_slots: int) -> int:
        """Return how many new blocks and copies growing to num_tokens takes.

        Counts neither the null block nor the blocks that a window gives back.
        """
        num = max(0, num_tokens - self._num_full_slots)
        return self._num_missing(num + num_lookahead_slots) + self._count_copies(num)

    def count_passed(self, num_computed_slots: int) -> int:
        """Return how many blocks an append frees: passed by the window, and not shared."""
        passed = self.physical_block_ids[
            self.num_null_blocks : self._window_start(num_computed_slots)
        ]
        return self._home.blocks.ref_counts(passed).count(1)

    def get_unseen_token_ids(self, sequence_token_ids: list[int]) -> list[int]:
        """Return a sequence's tokens that are not in the table yet."""
        return sequence_token_ids[self.num_full_slots :]

    def _get_all_token_ids(self) -> list[int]:
        """Return the tokens of all blocks; tests of the original read them."""
        return [token for block in self.blocks for token in block.token_ids]

    def _clear(self) -> None:
        """Make the table empty."""
        self._be([], self._allocator.on_gpu, 0, 0)

    def _be(self, blocks: list[Block], home: BlockAllocator, num_null: int, num_slots: int) -> None:
        """Set the table's blocks and number of tokens."""
        self.blocks, self.physical_block_ids = blocks, ids_of(blocks)
        self._home, self._num_by_hand = home, home.num_by_hand
        self.num_null_blocks, self._num_full_slots = num_null, num_slots

    def _read(self, least: int = 0) -> list[Block]:
        """Return the blocks, after reading direct changes to their objects. Raises WrongCall.

        least: the smallest allowed number of blocks.
        """
        blocks = self.blocks
        if self._num_by_hand != self._home.num_by_hand:
            real = blocks[self.num_null_blocks :]
            home = self._owner(real)
            self.physical_block_ids[self.num_null_blocks :] = [
                block.block_id or 0 for block in real
            ]
            num = sum(len(block.token_ids) for block in real)  # tokens may be added by hand
            self._num_full_slots = self.num_null_blocks * self._block_size + num
            self._home = home
            self._num_by_hand = -1 if self._num_by_hand < 0 else home.num_by_hand
        if len(blocks) < least:
            require(False, "the table has no blocks: allocate it first")
        return blocks

    def _owner(self, real: list[Block]) -> BlockAllocator:
        """Return the allocator of blocks, which must have owners. Raises WrongCall."""
        if not real:
            return self._home
        home = self._allocator.owner(real[0])
        home.check_held(real)
        return home

    def _num_missing(self, num_slots: int) -> int:
        """Return how many blocks are missing for num_slots more tokens."""
        num = -(-(self._num_full_slots + num_slots) // self._block_size)
        return max(0, num - len(self.blocks))

    def _check_grows(self, num_new: int) -> None:
        """Raise WrongCall unless num_new blocks can be added."""
        if num_new and self._home is not self._allocator.on_gpu:
            reason = "a table of {num} blocks on the CPU cannot grow by {new}: swap it in first"
            require(False, reason, num=len(self.blocks), new=num_new)

    def _add(self, num_blocks: int, extra_hash: int | None) -> None:
        """Add empty blocks, all or none. Raises NoFreeBlocksError."""
        blocks, gpu = self.blocks, self._allocator.on_gpu
        for block_id in gpu.take_empty(num_blocks):
            blocks.append(gpu.make(blocks[-1], [], block_id, extra_hash))
            self.physical_block_ids.append(block_id)

    def _write(self, token_ids: Sequence[int], first: int, num_old: int) -> None:
        """Write tokens into the blocks from index first on; there must be room.

        num_old: number of blocks from before this call, which may be shared.
        """
        blocks, ids, size = self.blocks, self.physical_block_ids, self._block_size
        end, own = self._num_full_slots + len(token_ids), self._home.own
        for at in range(first, -(-end // size)):
            block = blocks[at]
            if at < num_old:
                block.block_id = own(ids[at])
            start = at * size + len(block.token_ids) - self._num_full_slots
            block.extend(token_ids[start : (at + 1) * size - self._num_full_slots])
            ids[at] = block.block_id  # type: ignore[assignment] # it has an owner
        self._num_full_slots = end

    def _window_start(self, num_computed_slots: int) -> int:
        """Return the first position not yet passed by a window that ends at num_computed_slots."""
        assert self._max_block_sliding_window is not None
        end = num_computed_slots // self._block_size - self._max_block_sliding_window
        return max(end, self.num_null_blocks)

    def _drop_passed(self, num_computed_slots: int | None, num: int, num_new: int) -> None:
        """Free the blocks that the window has passed, if the append then has room."""
        blocks, ids, gpu = self.blocks, self.physical_block_ids, self._allocator.on_gpu
        reason = "a window over {num} blocks needs the number of computed slots"
        require(num_computed_slots is not None, reason, num=len(blocks))
        start, end = self.num_null_blocks, self._window_start(num_computed_slots or 0)
        if end > self._num_full_slots // self._block_size:
            reason = f"{num_computed_slots} computed slots put the window past the end of a table"
            raise WrongValue(reason=f"{reason} of {self._num_full_slots} tokens")
        if end == len(blocks) and gpu.caches:
            require(False, "no block with a content hash can follow {num} dropped blocks", num=end)
        passed, dropped = ids[start:end], blocks[start:end]
        null = int(not self._allocator.has_null_block)
        if null > gpu.get_num_free_blocks():
            raise gpu.shortage(null, f"a table of {len(blocks)} blocks")
        self._check_room(num, num_new, gpu.blocks.ref_counts(passed).count(1) - null)
        null_block = self._allocator.allocate_or_get_null_block()
        gpu.give_back(passed)
        gpu.part_with(dropped, keep_block_object=True)  # later blocks of the chain refer to them
        blocks[start:end] = [null_block] * len(passed)
        ids[start:end] = ids_of([null_block]) * len(passed)
        self.num_null_blocks = end

    def _check_room(self, num_tokens: int, num_new: int, extra: int = 0) -> None:
        """Raise NoFreeBlocksError unless enough blocks are free to add and to copy.

        extra: number of blocks that will become free before then.
        """
        needed, gpu = num_new + self._count_copies(num_tokens), self._allocator.on_gpu
        if needed > gpu.get_num_free_blocks() + extra:
            raise gpu.shortage(needed - min(extra, 0), f"a table of {len(self.blocks)} blocks")

    def _count_copies(self, num_tokens: int) -> int:
        """Return how many of the blocks that num_tokens new tokens are written to are shared."""
        if not num_tokens:
            return 0
        full, size = self._num_full_slots, self._block_size
        written = self.physical_block_ids[full // size : -(-(full + num_tokens) // size)]
        return sum(count > 1 for count in self._home.blocks.ref_counts(written))
