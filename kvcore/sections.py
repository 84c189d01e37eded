# SPDX-License-Identifier: Apache-2.0
"""The sections at the end of canonical bytes: fields that most states do not use.

Rules: a section is a tag, a size and so many bytes; the tags rise. A section that would hold
defaults only is absent, so a feature that is off adds no byte. Twin: rust/src/sections.rs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvcore.block_pool import BlockPool
from kvcore.reader import Reader
from kvcore.unconfirmed import UnconfirmedLoad

if TYPE_CHECKING:
    from kvcore.encode import Writer
    from kvcore.state import State

LOADS = 1
"""The tag of the unconfirmed loads."""
TAGS = (LOADS,)


def write_sections(out: Writer, state: State) -> None:
    """Write the sections that hold more than defaults."""
    if state.loads:
        part = type(out)(b"")
        write_loads(part, state)
        out.u8(LOADS)
        out.sized(part.data)


def write_loads(out: Writer, state: State) -> None:
    """Write the unconfirmed loads, in the order of their calls."""
    out.u32(len(state.loads))
    for load in state.loads:
        out.u64(load.batch)
        out.u32(load.first)
        out.u32(load.end)
        out.numbers(() if load.loader is None else [state.requests[load.loader].row])
        resting = [(state.requests[name].row, end) for name, end in load.requests]
        for pairs in (resting, load.blocks):
            out.u32(len(pairs))
            for number, end in pairs:
                out.u32(number)
                out.u32(end)


def read_sections(
    source: Reader, device: BlockPool, rows: list[str | None]
) -> tuple[UnconfirmedLoad, ...]:
    """The unconfirmed loads of the sections up to the end. Raises DamagedState."""
    loads: tuple[UnconfirmedLoad, ...] = ()
    last = -1
    while source.offset < len(source.data):
        tag, size = source.u8(), source.u32()
        if tag not in TAGS or tag <= last:
            raise source.damaged(f"section {tag} is not known, or not in its place")
        end, last = source.offset + size, tag
        loads = read_loads(source, device, rows)
        if source.offset != end:
            raise source.damaged(f"section {tag} has another size")
    return loads


def read_loads(
    source: Reader, device: BlockPool, rows: list[str | None]
) -> tuple[UnconfirmedLoad, ...]:
    """The unconfirmed loads of the next bytes, one at least. Raises DamagedState."""
    loads = []
    for _ in range(source.u32()):
        batch, first, end = source.u64(), source.u32(), source.u32()
        loaders = [rows[row] for row in source.ids(len(rows))]
        resting = [(source.u32(), source.u32()) for _ in range(source.u32())]
        blocks = [(source.u32(), source.u32()) for _ in range(source.u32())]
        names = [rows[row] if row < len(rows) else None for row, _ in resting]
        if None in (*loaders, *names) or len(loaders) > 1 or len(set(names)) < len(names):
            raise source.damaged("a load is not of requests")
        held = {block for block, _ in blocks}
        if not all(block < len(device.keys) and device.keys[block] for block in held):
            raise source.damaged("a block without a key rests on a load")
        if len(held) < len(blocks) or first >= end:
            raise source.damaged("a load is not in its canonical form")
        requests = tuple((str(name), at) for name, (_, at) in zip(names, resting, strict=True))
        loader = loaders[0] if loaders else None
        loads.append(UnconfirmedLoad(batch, first, end, loader, requests, tuple(blocks)))
    if not loads:
        raise source.damaged("a section holds nothing")
    return tuple(loads)
