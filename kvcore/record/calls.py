# SPDX-License-Identifier: Apache-2.0
"""The calls of a record: an opcode, the required fields, and a bit set of the options that follow.

The arguments and their order are those of the transitions' signatures. An argument at its default
is not written. Old records stay readable as long as an opcode is never used again for another call,
and a new option stands behind the others of its transition, which gives it the next bit.
Twin: rust/src/record/calls.rs.
"""

from __future__ import annotations

from collections.abc import Mapping
from inspect import signature
from typing import Any, get_type_hints

import attrs

from kvcore.record.fields import (
    BLOCK_HASHES,
    BLOCKS,
    COUNT,
    FLAG,
    HIT,
    ID,
    NAMED,
    NUMBER,
    PIN,
    REQUEST,
    REQUESTS,
    TOKENS,
    Field,
    Known,
    NotReadable,
    Source,
    check_flag,
    put_varint,
)
from kvcore.record.new_request import NEW_REQUEST, RETENTION
from kvcore.transitions import QUERIES, TRANSITIONS
from kvcore.types.arguments import read_int
from kvcore.types.slot_request import SlotOptions

CALLS = [*TRANSITIONS]
"""The recorded calls by their opcodes, from 1 on: the table of transitions, and the look-up."""
CALLS.insert(CALLS.index("advance_epoch"), "get_computed_blocks")  # recorded before epochs were
KINDS = {
    "Request": NEW_REQUEST,
    "str": ID,
    "int": COUNT,
    "int | None": NUMBER,
    "bool": FLAG,
    "Any": TOKENS,
    "Hit | None": HIT,
    "Iterable[int]": BLOCKS,
    "Iterable[str]": REQUESTS,
    "Iterable[str] | Any": NAMED,
    "Sequence[bytes]": BLOCK_HASHES,
    "KvCacheRetentionConfig": RETENTION,
}
"""How an argument is written, by its type in the signature of the transition."""
NAMES_OF = {"request_id": REQUEST, "parent_id": REQUEST, "name": PIN}
"""How the arguments of type str are written that name an existing request, or a pin."""


@attrs.frozen
class Shape:
    """How a call is written: its number, its fields in order, and its options by their bits.

    needed: those of the options that have no default, which are flags.
    """

    opcode: int
    fields: dict[str, Field] = attrs.field(factory=dict)
    options: dict[str, Field] = attrs.field(factory=dict)
    needed: list[str] = attrs.field(factory=list)


def _shape(opcode: int, name: str) -> Shape:
    """Derive the shape of a call from the signature of its transition."""
    shape = Shape(opcode)
    for each in list(signature((TRANSITIONS | QUERIES)[name]).parameters.values())[1:]:
        if each.kind is each.VAR_KEYWORD:
            hints = get_type_hints(SlotOptions)
            shape.options.update({name: KINDS[hint.__name__] for name, hint in hints.items()})
            continue
        kind = NAMES_OF.get(each.name) or KINDS[each.annotation]
        is_option = kind is FLAG or each.default is not each.empty
        (shape.options if is_option else shape.fields)[each.name] = kind
        if is_option and each.default is each.empty:
            shape.needed.append(each.name)
    return shape


SHAPES = {name: _shape(opcode, name) for opcode, name in enumerate(CALLS, 1)}
NAMES = {shape.opcode: name for name, shape in SHAPES.items()}


def write_call(out: bytearray, name: str, arguments: Mapping[str, Any], known: Known) -> None:
    """Write a call. Raises NoForm, after which `out` must be discarded."""
    shape = SHAPES[name]
    out.append(shape.opcode)
    request_id = arguments.get("request_id")
    for field, kind in shape.fields.items():
        kind.write(out, arguments[field], known, request_id)
    if not shape.options:
        return
    given = [name for name, kind in shape.options.items() if _is_given(kind, arguments.get(name))]
    put_varint(out, sum(1 << bit for bit, field in enumerate(shape.options) if field in given))
    for field in given:
        shape.options[field].write(out, arguments[field], known, request_id)


def _is_given(kind: Field, value: Any) -> bool:
    """Return whether an option is not at its default. Raises NoForm."""
    if value is None:
        return False
    if kind is FLAG:
        return check_flag(value)
    number = read_int(value)
    return kind is not COUNT or not isinstance(number, int) or number != 0


def read_call(source: Source) -> tuple[str, dict[str, Any]]:
    """Read the name and arguments of the next call. Raises NotReadable, and KeyError for an unknown
    opcode.
    """
    name = NAMES[source.take(1)[0]]
    shape = SHAPES[name]
    arguments = {field: kind.read(source) for field, kind in shape.fields.items()}
    bits = source.varint() if shape.options else 0
    if bits >> len(shape.options):
        raise NotReadable
    if bits:
        for bit, (field, kind) in enumerate(shape.options.items()):
            if bits >> bit & 1:
                arguments[field] = kind.read(source)
    for field in shape.needed:
        arguments.setdefault(field, False)
    return name, arguments
