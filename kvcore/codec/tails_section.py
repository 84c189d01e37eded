# SPDX-License-Identifier: Apache-2.0
"""The section of canonical bytes for hits that may end inside blocks.

Twin: rust/src/codec/tails_section.rs.
"""

from __future__ import annotations

import attrs
from immutables import Map
from msgspec.structs import replace

from kvcore.errors import KvcoreError
from kvcore.pool.tails import Tails
from kvcore.state.state import State
from kvcore.types.wire import Reader, Writer


def write_tails(out: Writer, state: State) -> None:
    """Write the tokens per block hash, the rows whose tail keys the open batch delays, and the
    blocks with tail keys, ascending, each with its keys and their ranks among those of a key.
    """
    tails = state.device.tails or Tails()
    out.u32(state.config.hash_block_size)
    out.numbers(sorted(state.requests[request_id].row for request_id in state.batch.delayed))
    out.u32(len(tails.by_block))
    for block, keys in sorted(tails.by_block.items()):
        out.u32(block)
        out.u32(len(keys))
        for key in keys:
            out.sized(key)
            out.u32(tails.blocks(key).index(block))


def read_tails(source: Reader, state: State) -> State:
    """Read tail keys; return the state with them, and with the config. Raises DamagedState."""
    unit, rows = source.u32(), source.ids(len(state.rows))
    try:
        config = attrs.evolve(state.config, hash_block_size=unit)
    except KvcoreError:
        raise source.damaged(f"blocks cannot be hashed by {unit} tokens") from None
    delayed = [state.rows[row] for row in rows]
    known = config.has_tails and rows == sorted(set(rows)) and None not in delayed
    if config.hash_unit is None or (rows and not known):
        raise source.damaged("keys are delayed without hits inside blocks")
    by_block, ranked = dict[int, tuple[bytes, ...]](), dict[bytes, dict[int, int]]()
    last = -1
    for _ in range(source.u32()):
        block, keys = source.u32(), []
        for _ in range(source.u32()):
            key, rank = source.key(), source.u32()
            ranks = ranked.setdefault(key, {})
            if rank in ranks:
                raise source.damaged("two blocks of a tail key have one rank")
            ranks[rank] = block
            keys.append(key)
        if not last < block < config.num_blocks or not keys or len(set(keys)) < len(keys):
            raise source.damaged("the tail keys of blocks are not in canonical form")
        last, by_block[block] = block, tuple(keys)
    if any(max(ranks) >= len(ranks) for ranks in ranked.values()):
        raise source.damaged("the ranks of a tail key's blocks have a gap")
    by_key = {key: tuple(ranks[at] for at in sorted(ranks)) for key, ranks in ranked.items()}
    if by_block and not config.has_tails:
        raise source.damaged("there are tail keys without hits inside blocks")
    tails = Tails(Map(by_block), Map(by_key)) if config.has_tails else None
    device = replace(state.device, tails=tails)
    names = frozenset(str(name) for name in delayed)
    return replace(state, config=config, device=device, batch=replace(state.batch, delayed=names))
