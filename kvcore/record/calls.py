# SPDX-License-Identifier: Apache-2.0
"""The calls of a record: an opcode, the required fields, and a bit set of the options that follow.

Old records stay readable: an opcode is never given to another call, and a new argument takes the
next bit. An argument that has its default is not written.
Twin: rust/src/record/calls.rs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

from kvcore.record.fields import (
    BLOCK_HASHES,
    BLOCKS,
    COUNT,
    FLAG,
    HIT,
    ID,
    NAMED,
    NEW_REQUEST,
    REQUEST,
    REQUESTS,
    RETENTION,
    TOKENS,
    Field,
    Known,
    NotReadable,
    Source,
    check_flag,
    put_varint,
)
from kvcore.types.arguments import read_int


@attrs.frozen
class Shape:
    """How a call is written: its opcode, its fields in order, and its options by bit."""

    opcode: int
    fields: dict[str, Field] = attrs.field(factory=dict)
    options: dict[str, Field] = attrs.field(factory=dict)


OF_ONE = {"request_id": REQUEST}
OF_BLOCKS = {"block_ids": BLOCKS}
SHAPES = {
    "add_request": Shape(1, {"request": NEW_REQUEST}),
    "add_tokens": Shape(2, OF_ONE | {"tokens": TOKENS}, {"num_rejected": COUNT, "batch": COUNT}),
    "remove_request": Shape(3, OF_ONE),
    "add_block_hashes": Shape(4, OF_ONE | {"hashes": BLOCK_HASHES}),
    "add_drafts": Shape(5, OF_ONE | {"tokens": TOKENS}),
    "accept": Shape(6, OF_ONE | {"num_accepted": COUNT}),
    "allocate_slots": Shape(
        7,
        OF_ONE | {"num_new_tokens": COUNT},
        {
            "hit": HIT,
            "num_lookahead_tokens": COUNT,
            "num_external_computed_tokens": COUNT,
            "num_encoder_tokens": COUNT,
            "reserved_blocks": COUNT,
            "num_output_placeholders": COUNT,
            "delay_cache_blocks": FLAG,
            "full_sequence_must_fit": FLAG,
        },
    ),
    "append": Shape(8, {"requests": NAMED}, {"tokens": TOKENS, "batch": COUNT}),
    "fork": Shape(9, {"parent_id": REQUEST, "child_id": ID}),
    "free": Shape(10, OF_ONE),
    "truncate": Shape(11, OF_ONE | {"num_tokens": COUNT}),
    "cache_blocks": Shape(12, OF_ONE | {"num_computed_tokens": COUNT}),
    "evict_blocks": Shape(13, OF_BLOCKS),
    "reset_prefix_cache": Shape(14),
    "swap_out": Shape(15, {"request_ids": REQUESTS}),
    "swap_in": Shape(16, {"request_ids": REQUESTS}),
    "pin": Shape(17, OF_BLOCKS),
    "unpin": Shape(18, OF_BLOCKS),
    "remove_skipped_blocks": Shape(19, OF_ONE | {"total_computed_tokens": COUNT}),
    "rewind": Shape(20, {"request_ids": REQUESTS, "num_computed_tokens": COUNT}),
    "unschedule": Shape(21, OF_ONE | {"num_tokens": COUNT}),
    "store": Shape(22, OF_BLOCKS),
    "load": Shape(
        23,
        OF_ONE | {"num_tokens": COUNT},
        {"hit": HIT, "reserved_blocks": COUNT, "full_sequence_must_fit": FLAG},
    ),
    "complete_operation": Shape(24, {"operation": COUNT}, {"done": FLAG}),
    "take_batch": Shape(25),
    "complete": Shape(26, {"batch": COUNT}),
    "cancel": Shape(27, {"batch": COUNT}),
    "take_events": Shape(28),
    "take_stats": Shape(29),
    "take_new_block_ids": Shape(30),
    "get_computed_blocks": Shape(31, OF_ONE),
    "advance_epoch": Shape(32, {}, {"epoch": COUNT}),
    "tick": Shape(33, {"now_ms": COUNT}),
    "extend_retention": Shape(34, OF_ONE | {"retention": RETENTION}),
    "pin_prefix": Shape(35, {"name": ID} | OF_ONE | {"num_tokens": COUNT}),
    "unpin_prefix": Shape(36, {"name": ID}),
}
"""The recorded calls: all transitions and the look-up."""
NAMES = {shape.opcode: name for name, shape in SHAPES.items()}
NONE_BY_DEFAULT = {"hit", "tokens", "batch", "epoch"}


def write_call(out: bytearray, name: str, arguments: Mapping[str, Any], known: Known) -> None:
    """Write a call. Raises NoForm, after which `out` must be discarded."""
    shape = SHAPES[name]
    out.append(shape.opcode)
    request_id = arguments.get("request_id")
    for field, kind in shape.fields.items():
        kind.write(out, arguments[field], known, request_id)
    if not shape.options:
        return
    given = [field for field in shape.options if _is_given(shape, field, arguments)]
    put_varint(out, sum(1 << bit for bit, field in enumerate(shape.options) if field in given))
    for field in given:
        shape.options[field].write(out, arguments[field], known, request_id)


def _is_given(shape: Shape, field: str, arguments: Mapping[str, Any]) -> bool:
    """Whether an option differs from its default. Raises NoForm."""
    value = arguments.get(field)
    if value is None or field in NONE_BY_DEFAULT:
        return value is not None
    if shape.options[field] is FLAG:
        return check_flag(value)
    number = read_int(value)
    return not isinstance(number, int) or number != 0


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
    if name == "complete_operation":
        arguments.setdefault("done", False)
    return name, arguments
