# SPDX-License-Identifier: Apache-2.0
"""The sections of canonical bytes for pins of prefixes and for floors.

Twin: rust/src/codec/claims_section.rs.
"""

from __future__ import annotations

import attrs
from immutables import Map
from msgspec.structs import replace

from kvcore.state.state import NamedPin, State, with_floors
from kvcore.types.errors import InvalidConfig
from kvcore.types.wire import Reader, Writer


def write_pins(out: Writer, state: State) -> None:
    """Write the most blocks that may be pinned, and 1, or 0 for the default; then the pins by
    name.
    """
    most = state.config.max_pinned_blocks
    out.u32(0 if most is None else most + 1)
    out.u32(len(state.named_pins))
    for name, pin in sorted(state.named_pins.items()):
        out.sized(name.encode())
        out.u32(pin.epoch)
        out.numbers(pin.blocks)


def read_pins(source: Reader, state: State) -> State:
    """Read pins; return the state with them. Raises DamagedState."""
    most, pins, last = source.u32(), dict[str, NamedPin](), ""
    for _ in range(source.u32()):
        name, epoch = source.name(), source.u32()
        blocks = tuple(source.ids(state.config.num_blocks))
        if name <= last or not blocks:
            raise source.damaged("the pins are not in their canonical form")
        last, pins[name] = name, NamedPin(epoch, blocks)
    if not (most or pins):
        raise source.damaged("a section holds nothing")
    try:
        config = attrs.evolve(state.config, max_pinned_blocks=most - 1 if most else None)
    except InvalidConfig as error:
        raise source.damaged(str(error)) from None
    return replace(state, config=config, named_pins=Map(pins))


def write_floors(out: Writer, state: State) -> None:
    """Write the floors by salt, then for each block the tenant that took it last."""
    floors = state.device.floors
    assert floors is not None
    out.u32(len(state.config.floors))
    for salt in state.config.tenants:
        out.sized(salt.encode())
        out.u32(state.config.floors[salt])
    for tenant in floors.takers:
        out.u8(tenant)


def read_floors(source: Reader, state: State) -> State:
    """Return the state with the floors of the next bytes. Raises DamagedState."""
    sizes, last = dict[str, int](), ""
    for _ in range(source.u32()):
        salt, size = source.name(), source.u32()
        if salt <= last:
            raise source.damaged("the floors are not in their canonical form")
        last, sizes[salt] = salt, size
    if not sizes:
        raise source.damaged("a section holds nothing")
    try:
        config = attrs.evolve(state.config, floors=sizes)
    except InvalidConfig as error:
        raise source.damaged(str(error)) from None
    device = with_floors(state.device, config)
    takers = [source.u8() for _ in range(device.num_blocks)]
    if any(takers[: device.first_block]) or max(takers) > len(sizes):
        raise source.damaged("a block was taken by a tenant without a floor")
    assert device.floors is not None
    floors = device.floors.taken(range(device.num_blocks), takers)
    return replace(state, config=config, device=attrs.evolve(device, floors=floors))
