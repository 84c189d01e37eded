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
    state = _read_unit(source, state)
    config, rows = state.config, source.ids(len(state.rows))
    delayed = [state.rows[row] for row in rows]
    if rows != sorted(set(rows)) or not all(state.batch.scheduled[row] for row in rows):
        raise source.damaged("a delayed row is not in the open batch")
    if rows and not config.has_tails:
        raise source.damaged("a delayed row is not in the open batch")
    ranked: dict[tuple[bytes, int], int] = {}
    by_block: dict[int, tuple[bytes, ...]] = {}
    last = -1
    for _ in range(source.u32()):
        block = source.u32()
        places = [(source.key(), source.u32()) for _ in range(source.u32())]
        is_known = state.device.first_block <= block < config.num_blocks
        is_once = len(set(places)) == len(places) and not ranked.keys() & set(places)
        if not config.has_tails or not is_known or not is_once or last >= block or not places:
            raise source.damaged("the tail keys are not in canonical form")
        last = block
        ranked |= dict.fromkeys(places, block)
        by_block[block] = tuple(key for key, _ in places)
    by_key: dict[bytes, tuple[int, ...]] = {}
    for key, rank in sorted(ranked):
        if rank != len(by_key.get(key, ())):
            raise source.damaged("the blocks of a tail key are not ranked from 0")
        by_key[key] = (*by_key.get(key, ()), ranked[key, rank])
    if config.has_tails:
        tails = Tails(Map(by_block), Map(by_key))
        state = replace(state, device=attrs.evolve(state.device, tails=tails))
    names = frozenset(str(name) for name in delayed)
    return replace(state, batch=replace(state.batch, delayed=names))


def _read_unit(source: Reader, state: State) -> State:
    """Read the tokens per block hash; return the state whose config has them."""
    unit = source.u32()
    try:
        config = attrs.evolve(state.config, hash_block_size=unit)
    except KvcoreError as error:
        raise source.damaged(str(error)) from None
    if config.hash_unit is None:
        raise source.damaged("a section holds nothing")
    return replace(state, config=config)
