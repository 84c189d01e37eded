# SPDX-License-Identifier: Apache-2.0
"""The blocks of one sequence in V0: allocate, append, look ahead, fork, free.

Rules: full blocks are immutable, the last one may be part full, those behind it are empty and there
for tokens to come. What lies behind a sliding window becomes the null block. A call works out what
it needs before its first change. It works on columns; block objects are made when somebody looks
(`table_blocks.py`). Lists that were handed out are live until a swap, a `free` or an `update` puts
others in their place, which leaves them as they were. Source: S002-66 to 70.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvcore.legacy.v0.block_interfaces import Block, BlockId, Device
from kvcore.legacy.v0.cpu_gpu_block_allocator import CpuGpuBlockAllocator
from kvcore.legacy.v0.errors import NoFreeBlocksError, WrongValue, require
from kvcore.legacy.v0.table_blocks import TableBlocks


class BlockTable:
    """The blocks of a sequence, in order."""

    __slots__ = (
        "_allocator",
        "_block_size",
        "_held",
        "_max_block_sliding_window",
        "_num_full_slots",
    )

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
        self._num_full_slots = 0
        self._held = TableBlocks(block_allocator.on_gpu, block_size)
        if _blocks:
            self.update(_blocks)
            self._num_full_slots = sum(len(block.token_ids) for block in _blocks)

    @staticmethod
    def get_num_required_blocks(
        token_ids: Sequence[int], block_size: int, num_lookahead_slots: int = 0
    ) -> int:
        """Blocks that tokens and slots behind them take."""
        return -(-(len(token_ids) + num_lookahead_slots) // block_size)

    @property
    def blocks(self) -> list[Block]:
        """The blocks, as a live list: objects that are made when they are asked for first."""
        return self._held.look()

    @property
    def physical_block_ids(self) -> list[BlockId]:
        """The ids of the blocks, as a live list."""
        return self._held.block_ids

    @property
    def num_null_blocks(self) -> int:
        """Places that a window has passed."""
        return self._held.num_null

    @property
    def num_full_slots(self) -> int:
        """Tokens of the table."""
        if self._held.objects is not None:
            self.held  # noqa: B018 # reads what was added by hand
        return self._num_full_slots

    @property
    def held(self) -> TableBlocks:
        """The blocks as columns, with all that was done with their objects. Raises WrongCall."""
        held = self._held
        if held.objects is not None:
            held.read(self._allocator.owner)
            self._num_full_slots = len(held.token_ids)  # tokens may be added by hand
        return held

    def allocate(
        self,
        token_ids: Sequence[int],
        device: Device = Device.GPU,
        extra_hash: int | None = None,
    ) -> None:
        """Give an empty table blocks for its first tokens. Raises WrongCall, NoFreeBlocksError."""
        if self._held.block_ids:
            num = len(self._held.block_ids)
            require(False, "the table has {held} blocks already", held=num)
        if not token_ids:
            require(False, "a table is allocated for at least one token, {num} are given", num=0)
        tokens, allocator = list(token_ids), self._allocator.allocator(device)
        filled = allocator.fill(tokens, extra_hash)
        held = self._held
        held.allocator, held.objects = allocator, None
        held.block_ids, held.keys, held.found = filled
        held.token_ids, held.extra_hashes = tokens, [extra_hash] * len(held.block_ids)
        self._num_full_slots = len(tokens)

    def update(self, blocks: Sequence[Block]) -> None:
        """Take these blocks for the table's, a list itself; ids of before stay what they were.

        Raises WrongCall where one has no owner.
        """
        before = self._held
        held = TableBlocks(before.allocator, self._block_size)
        held.token_ids = before.token_ids[:]
        held.extra_hashes = before.extra_hashes[:]
        held.keys = before.keys[:]
        held.objects = blocks if type(blocks) is list else list(blocks)
        held.is_given = True
        held.read(self._allocator.owner)
        self._held = held

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
        held = self._held
        if held.objects is not None or not held.block_ids:
            held = self._allocated()
        hash((extra_hash, *token_ids))  # What cannot be hashed is found before anything changes.
        if num_lookahead_slots < 0:
            raise WrongValue(
                reason=f"num_lookahead_slots is {num_lookahead_slots}, must be 0 or more"
            )
        num, num_old, size = len(token_ids), len(held.block_ids), self._block_size
        first, end = self._num_full_slots // size, self._num_full_slots + num
        num_new = max(0, -(-(end + num_lookahead_slots) // size) - num_old)
        if num_new and held.allocator is not self._allocator.on_gpu:
            self._refuse(num_new)
        if first in held.found:
            reason = "block {block} is computed: {num} tokens cannot be added"
            require(False, reason, block=held.block_ids[first], num=num)
        num_null = held.num_null
        if self._max_block_sliding_window is not None:
            self._drop_passed(num_computed_slots, num, num_new)
        elif min(num_old, -(-end // size)) - first + (num_new > 0) > 1:
            self._check_room(num, num_new)  # else the one call that needs room asks itself
        if num_new:
            self._add(num_new, extra_hash)
        if num:
            self._write(token_ids, first, num_old)
        if held.objects is not None:
            held.write(first, range(num_null, min(held.num_null, first)))

    def ensure_num_empty_slots(self, num_empty_slots: int, extra_hash: int | None = None) -> None:
        """Add empty blocks until there is room for so many tokens, all or none.

        Raises WrongCall, NoFreeBlocksError.
        """
        held, needed = self._allocated(), self._num_new_blocks(num_empty_slots)
        if needed:
            first = len(held.block_ids)
            self._add(needed, extra_hash)
            held.write(first)

    def fork(self) -> BlockTable:
        """A table over the same blocks, which are copied where one of the two writes.

        Raises WrongCall.
        """
        held = self._allocated()
        held.allocator.share(held.real_ids())
        table = object.__new__(type(self))
        table._block_size, table._allocator = self._block_size, self._allocator
        table._max_block_sliding_window = self._max_block_sliding_window
        table._held, table._num_full_slots = held.fork(), self._num_full_slots
        return table

    def free(self) -> None:
        """Give all blocks back; the table is empty then, and can be allocated again.

        Raises WrongCall.
        """
        held = self.held
        held.allocator.give_back(held.real_ids())
        held.part()
        self._held = TableBlocks(self._allocator.on_gpu, self._block_size)
        self._num_full_slots = 0

    def move(self, block_ids: Sequence[BlockId], allocator: object) -> None:
        """Have these blocks of another device in place of those that no window passed."""
        held = self._held
        held.block_ids = held.block_ids[: held.num_null] + list(block_ids)
        held.allocator = allocator
        held.write()

    def get_num_blocks_touched_by_append_slots(
        self, token_ids: Sequence[int], num_lookahead_slots: int
    ) -> int:
        """Blocks that new tokens and slots behind them lie in; a part-full one counts always."""
        return self.count_touched(self._num_full_slots + len(token_ids), num_lookahead_slots)

    def count_touched(self, num_tokens: int, num_lookahead_slots: int) -> int:
        """The same for a sequence that has so many tokens by then."""
        size, full = self._block_size, self._num_full_slots
        return -(-(max(num_tokens, full) + num_lookahead_slots) // size) - full // size

    def count_needed(self, num_tokens: int, num_lookahead_slots: int) -> int:
        """New blocks and copies that appending takes where a sequence has so many tokens by then,
        without the null block and what a window gives back.
        """
        full, held = self._num_full_slots, self._held
        end = max(num_tokens, full) + num_lookahead_slots
        num_new = max(0, -(-end // self._block_size) - len(held.block_ids))
        return num_new + self._count_copies(max(0, num_tokens - full))

    def count_passed(self, num_computed_slots: int) -> int:
        """Blocks that an append gives back: its window passed them, and nobody else holds them."""
        passed = self._held.block_ids[self._held.num_null : self._window_start(num_computed_slots)]
        counts: Sequence[int] = self._held.allocator.blocks.ref_counts(passed)
        return counts.count(1)

    def get_unseen_token_ids(self, sequence_token_ids: list[int]) -> list[int]:
        """A sequence's tokens that are not in the table yet."""
        return sequence_token_ids[self.num_full_slots :]

    def _get_all_token_ids(self) -> list[int]:
        """The tokens of all blocks, as tests of the original read them."""
        return [token for block in self.blocks for token in block.token_ids]

    def _num_new_blocks(self, num_empty_slots: int) -> int:
        held = self._held
        num = -(-(self._num_full_slots + num_empty_slots) // self._block_size)
        num_new = num - len(held.block_ids)
        if num_new > 0 and held.allocator is not self._allocator.on_gpu:
            self._refuse(num_new)
        return max(0, num_new)

    def _refuse(self, num_new: int) -> None:
        reason = "a table of {num} blocks on the CPU cannot grow by {new}: swap it in first"
        require(False, reason, num=len(self._held.block_ids), new=num_new)

    def _add(self, num_blocks: int, extra_hash: int | None) -> None:
        """Add empty blocks, all or none. Raises NoFreeBlocksError."""
        held = self._held
        held.block_ids += self._allocator.on_gpu.take_empty(num_blocks)
        held.extra_hashes += [extra_hash] * num_blocks

    def _write(self, token_ids: Sequence[int], first: int, num_old: int) -> None:
        """Write tokens into the blocks from a place on, for which there is room.

        num_old: blocks that were there before this call, which others may share.
        """
        held, size = self._held, self._block_size
        ids, allocator = held.block_ids, held.allocator
        if first < num_old:
            ids[first] = allocator.own(ids[first])
        held.token_ids += token_ids
        self._num_full_slots += len(token_ids)
        for at in range(first, -(-self._num_full_slots // size)):
            if first < at < num_old:
                ids[at] = allocator.own(ids[at])
            if allocator.caches and (at + 1) * size <= self._num_full_slots:
                self._close(at)

    def _close(self, at: int) -> None:
        """Make a block findable that is full now, if all before it are."""
        held, size = self._held, self._block_size
        if len(held.keys) != at:
            return
        ids, allocator = held.block_ids, held.allocator
        tokens = held.token_ids[at * size : (at + 1) * size]
        key = allocator.key_behind(held.keys, tokens, held.extra_hashes[at])
        found = allocator.close(ids[at], key, (at + 1) * size)
        held.keys.append(key)
        if found != ids[at]:
            ids[at] = found
            held.found.add(at)

    def _num_passed(self, num_computed_slots: int | None) -> int:
        """How many of the first places a window has passed."""
        held = self._held
        reason = "a window over {num} blocks needs the number of computed slots"
        require(num_computed_slots is not None, reason, num=len(held.block_ids))
        assert num_computed_slots is not None
        end = self._window_start(num_computed_slots)
        if end > self._num_full_slots // self._block_size:
            reason = f"{num_computed_slots} computed slots put the window behind the end of a table"
            raise WrongValue(reason=f"{reason} of {self._num_full_slots} tokens")
        if end == len(held.block_ids) and held.allocator.caches:
            require(False, "no block with a content hash can follow {num} that went", num=end)
        return end

    def _window_start(self, num_computed_slots: int) -> int:
        """The first place that a window over so many slots has not passed."""
        assert self._max_block_sliding_window is not None
        end = num_computed_slots // self._block_size - self._max_block_sliding_window
        return max(end, self._held.num_null)

    def _drop_passed(self, num_computed_slots: int | None, num: int, num_new: int) -> None:
        """Give back what the window has passed, if there is room then for what comes."""
        held, gpu = self._held, self._allocator.on_gpu
        end = self._num_passed(num_computed_slots)
        passed = held.block_ids[held.num_null : end]
        given_back = gpu.blocks.ref_counts(passed).count(1)
        null = int(not self._allocator.has_null_block)
        if null > gpu.get_num_free_blocks():
            raise self._shortage(null)
        self._check_room(num, num_new, given_back - null)
        held.null_block = null_block = self._allocator.allocate_or_get_null_block()
        gpu.give_back(passed)
        held.block_ids[held.num_null : end] = gpu.ids_of([null_block]) * len(passed)
        held.num_null = end

    def _check_room(self, num_tokens: int, num_new: int, extra: int = 0) -> None:
        """Raise NoFreeBlocksError unless blocks to add and to copy are there.

        extra: how many more than are free will be by then.
        """
        needed = num_new + self._count_copies(num_tokens)
        if needed > self._allocator.on_gpu.get_num_free_blocks() + extra:
            raise self._shortage(needed - min(extra, 0))

    def _count_copies(self, num_tokens: int) -> int:
        """Blocks that others hold too, of those that so many tokens are written to."""
        if not num_tokens:
            return 0
        full, size = self._num_full_slots, self._block_size
        written = self._held.block_ids[full // size : -(-(full + num_tokens) // size)]
        return sum(count > 1 for count in self._held.allocator.blocks.ref_counts(written))

    def _shortage(self, needed: int) -> NoFreeBlocksError:
        gpu = self._allocator.on_gpu
        free, total = gpu.get_num_free_blocks(), gpu.get_num_total_blocks()
        who = f"a table of {len(self._held.block_ids)} blocks"
        return NoFreeBlocksError(who=who, needed=needed, free=free, total=total)

    def _allocated(self) -> TableBlocks:
        """The blocks, of which there are some. Raises WrongCall."""
        held = self.held
        if not held.block_ids:
            require(False, "the table has no blocks: allocate it first")
        return held
