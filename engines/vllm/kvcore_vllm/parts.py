# SPDX-License-Identifier: Apache-2.0
"""Hits inside blocks in vLLM's form: states that are kept, copies, and where blocks lie.

kvcore keeps a cached block and gives the request that writes behind it a copy. vLLM's worker only
appends to the row of a running request, so there the two blocks change places: the request keeps
the block of its row, and what is cached lies in the other one from then on, which the worker fills
by a copy before the step.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import itemgetter
from typing import Any

from vllm.v1.core.kv_cache_utils import KVCacheBlockCopy
from vllm.v1.kv_cache_interface import get_mamba_prefill_checkpoint_position

from kvcore.compat import KVCacheBlocks, KVCacheManager
from kvcore.types.keys import HASH_SIZE, make_key
from kvcore_vllm.blocks import HeldBlock, Tables
from kvcore_vllm.states import States


class Parts:
    """The checkpoints of the prompts' last hashes, and the copies of the current step.

    drops: whether look-ups drop the last hash, as EAGLE's do. num_lookahead: number of tokens
    behind a block that its hash covers too. keeps_junctions: whether the state at the boundary of a
    shared prefix is kept, too. num_given_up: calls for which copies were given up, since the pool
    had no room. vLLM refuses such a call.
    """

    def __init__(
        self,
        compat: KVCacheManager,
        states: States,
        *,
        drops: bool,
        num_lookahead: int,
        keeps_junctions: bool,
    ) -> None:
        self._compat, self._states = compat, states
        self._config = config = compat.config
        self._unit = config.hash_block_size
        self._drops, self._num_lookahead = drops, num_lookahead
        self._keeps_junctions = keeps_junctions
        self.num_given_up = 0
        self._shown: dict[int, int] = {}  # vLLM's number of a block of the core, if it is another
        self._numbers: dict[int, int] = {}  # and the reverse
        self._copies: list[tuple[int, HeldBlock, HeldBlock]] = []  # each with its group
        self._copied = set[str]()  # requests whose last call copied
        self._ends: dict[str, int] = {}  # where a state with a key ends in a request's last block
        self._lengths: dict[bytes, int] = {}  # tokens before the end of what a hash names

    # Numbers of blocks.

    def number(self, block_id: int) -> int:
        """Return the core's number of a block of vLLM."""
        return self._numbers.get(block_id, block_id)

    def numbers(self, tables: Sequence[Sequence[int]]) -> Tables:
        """Return the core's numbers of blocks of vLLM."""
        if not self._numbers:
            return tuple(tables)
        return tuple([self._numbers.get(each, each) for each in table] for table in tables)

    def shown(self, tables: Sequence[Sequence[int]]) -> tuple[list[int], ...]:
        """Return vLLM's numbers of blocks of the core."""
        return tuple([self._shown.get(each, each) for each in table] for table in tables)

    def held(self, number: int) -> HeldBlock:
        """Return a block as vLLM numbers it now; it stays this block of the core."""
        return HeldBlock(self._compat, self._shown.get(number, number), number)

    def _exchange(self, first: int, second: int) -> None:
        """Let two blocks of the core change places."""
        places = self._shown.get(second, second), self._shown.get(first, first)
        for number, place in zip((first, second), places, strict=True):
            for known, one, other in (
                (self._shown, number, place),
                (self._numbers, place, number),
            ):
                if one == other:
                    known.pop(one, None)
                else:
                    known[one] = other

    # Steps.

    def is_checkpoint(self, request: Any, end: int) -> bool:
        """Return whether the state after a request's first `end` tokens is one that vLLM keeps."""
        if end % self._unit or end > request.num_tokens:
            return False
        last = get_mamba_prefill_checkpoint_position(
            request.num_prompt_tokens,
            self._unit,
            self._drops,
            num_hash_lookahead_tokens=self._num_lookahead,
        )
        is_junction = self._keeps_junctions and end == request.shared_prefix_boundary
        return end == last or (
            is_junction and request.num_computed_tokens < end <= request.num_prompt_tokens
        )

    def _drop_last_parts(self, request: Any) -> None:
        """Forget the keys of parts of a request's last blocks, as vLLM does not give them, unless
        its prompt ends there. No state is kept where such a part ends, so no hit needs it.
        """
        name, core = request.request_id, self._compat.core
        tables = self._compat.get_block_ids(name)
        if not any(tables):
            return
        count = core.num_computed_tokens(name)
        limit = request.num_prompt_tokens - (not self._drops)
        last = min(limit // self._unit, len(request.block_hashes)) * self._unit
        for group, table in zip(self._config.groups, tables, strict=True):
            place, size = count // group.block_size, group.block_size
            is_prompt = last % size and last // size == place and last <= count
            if group.is_state or place >= len(table) or is_prompt:
                continue
            block = table[place]
            if block and core.has_key(block) and core.num_owners(block) == 1:
                self._compat.evict_blocks([block])

    def allocate_slots(
        self,
        request: Any,
        num_new_tokens: int,
        num_new_computed_tokens: int,
        hit: KVCacheBlocks | None,
        num_lookahead_tokens: int,
        num_external_computed_tokens: int,
        delay_cache_blocks: bool,
        *options: Any,
        **more: Any,
    ) -> KVCacheBlocks | None:
        """Allocate slots as `compat` does, and note copies. Returns the new blocks as vLLM numbers
        them, with the copies of a hit and without those of a running request.
        """
        name, compat = request.request_id, self._compat
        start = request.num_computed_tokens + num_new_computed_tokens
        end = start + num_external_computed_tokens + num_new_tokens
        checkpoint = not delay_cache_blocks and self.is_checkpoint(request, end)
        # A block that is still held for a copy counts as another's, and is replaced again.
        is_kept = name in self._ends or name in self._copied
        before = compat.get_block_ids(name) if is_kept else ()
        sources = self._sources(hit, start) if hit is not None and num_new_computed_tokens else []
        pins = [source for _, _, source in sources]

        def allocate() -> KVCacheBlocks | None:
            return compat.allocate_slots(
                *(request, num_new_tokens, num_new_computed_tokens, hit, num_lookahead_tokens),
                *(num_external_computed_tokens, delay_cache_blocks, *options),
                checkpoint=checkpoint,
                **more,
            )

        # vLLM copies each block that a hit ends in. kvcore need not, but does if it has two owners.
        compat.core.pin(pins)
        got = allocate()
        if got is None and pins:
            compat.core.unpin(pins)
            pins = []
            got = allocate()
            self.num_given_up += got is not None
        if got is None:
            return None
        self._copied.discard(name)
        rows: Tables = got.blocks
        if sources:
            rows = self._note_hit(name, sources, rows, pins)
        elif before:
            rows = self._note_running(request, before, start, rows)
        self._note_end(request, end, checkpoint=checkpoint)
        return compat.create_kv_cache_blocks(self.shown(rows))

    def _sources(self, hit: KVCacheBlocks, end: int) -> list[tuple[int, int, int]]:
        """Return the group, the position and the number of each block that a hit ends inside."""
        found = []
        for number, (group, ids) in enumerate(zip(self._config.groups, hit.blocks, strict=True)):
            place, rest = divmod(end, group.block_size)
            if rest and len(ids) == place + 1 and ids[place]:
                found.append((number, place, ids[place]))
        return found

    def _note_hit(
        self, name: str, sources: list[tuple[int, int, int]], rows: Tables, pins: list[int]
    ) -> Tables:
        """Note the copies of a hit that ends inside blocks. Returns the rows of new blocks with
        these. pins: the sources that are pinned, and stay so if they are copied.
        """
        tables, grown, unused = self._compat.get_block_ids(name), list(rows), list[int]()
        for number, place, source in sources:
            target = tables[number][place]
            if target in (0, source):
                unused.append(source)
                continue
            self._copy(number, source, target, is_pinned=bool(pins))
            self._copied.add(name)
            if target not in grown[number]:
                grown[number] = (target, *grown[number])
        if pins:
            self._compat.core.unpin(unused)
        return tuple(grown)

    def _note_end(self, request: Any, end: int, *, checkpoint: bool) -> None:
        """Note that a call ends at a token, and whether the state there is kept."""
        self._ends.pop(request.request_id, None)
        last = end // self._unit
        if end % self._unit == 0 and last <= len(request.block_hashes):
            self._lengths[bytes(request.block_hashes[last - 1])] = end
        if checkpoint:
            self._states.note_written(request, end)
            if any(end % group.block_size for group in self._config.groups if group.is_state):
                self._ends[request.request_id] = end
        if len(self._lengths) > 4 * self._config.num_blocks:
            self._drop_lengths()

    def _note_running(self, request: Any, before: Tables, start: int, rows: Tables) -> Tables:
        """Note the copies of a call of a running request. Returns the rows of new blocks without
        these.
        """
        tables, grown = self._compat.get_block_ids(request.request_id), list(rows)
        given_up = False
        for number, group in enumerate(self._config.groups):
            place, rest = divmod(start, group.block_size)
            if not rest or place >= len(before[number]):
                continue
            old, new = before[number][place], tables[number][place]
            if old == new and group.is_state:
                given_up |= request.request_id in self._ends
            elif 0 not in (old, new) and old != new:
                self._copy(number, old, new)
                self._copied.add(request.request_id)
                self._exchange(old, new)
                grown[number] = tuple(each for each in grown[number] if each != new)
                self._states.note_moved(request, start)
        self.num_given_up += given_up
        return tuple(grown)

    def _copy(self, group_id: int, source: int, target: int, *, is_pinned: bool = False) -> None:
        """Note a copy, and hold both blocks until it is over. is_pinned: the source is held."""
        self._compat.core.pin([target] if is_pinned else [source, target])
        self._copies.append((group_id, self.held(source), self.held(target)))

    def take_copies(self) -> tuple[list[Any], list[HeldBlock]]:
        """Return the copies since the last call, group by group, and the blocks that are held for
        them.
        """
        copies, self._copies = sorted(self._copies, key=itemgetter(0)), []
        return (
            [KVCacheBlockCopy(source.block_id, target.block_id) for _, source, target in copies],
            [block for _, *pair in copies for block in pair],
        )

    def forget(self, request: Any) -> None:
        """Note that a request gives back its blocks."""
        self._ends.pop(request.request_id, None)
        self._copied.discard(request.request_id)
        if self._config.has_tails:
            self._drop_last_parts(request)

    def take_end(self, request: Any) -> list[tuple[int, int, int]]:
        """Return the state of the prompt's last hash, once: for each group its number, its block
        and its tokens; nothing if the request has computed more.
        """
        end = self._ends.get(request.request_id)
        is_last = end == request.num_computed_tokens and not request.num_in_flight_tokens
        if end is None or not is_last:
            return []
        self._ends.pop(request.request_id)
        tables = self.shown(self._compat.get_block_ids(request.request_id))
        return [
            (number, tables[number][end // group.block_size], end)
            for number, group in enumerate(self._config.groups)
            if group.is_state and end % group.block_size
        ]

    # Lengths.

    def num_tokens(self, key: bytes | None) -> int | None:
        """Return the tokens before the end of what a key names, None if that is not known."""
        if key is None:
            return None
        return self._lengths.get(key[:HASH_SIZE])

    def _drop_lengths(self) -> None:
        """Forget the lengths of what is not cached any more."""
        find, groups = self._compat.core.get_cached_block, range(len(self._config.groups))
        self._lengths = {
            each: length
            for each, length in self._lengths.items()
            if any(find(make_key(each, group)) is not None for group in groups)
        }
