# SPDX-License-Identifier: Apache-2.0
"""The arguments of an allocation; `transitions/slot_request.py` reads and checks them.

Twin: rust/src/types/slot_request.rs.
"""

from __future__ import annotations

from typing import Any, TypedDict

from msgspec import Struct
from msgspec.structs import fields


class SlotOptions(TypedDict, total=False):
    """The options of an allocation, besides its tokens and its hit; a new one goes last.

    Their order is that of their bits in a record.
    """

    num_lookahead_tokens: int
    num_external_computed_tokens: int
    num_encoder_tokens: int
    reserved_blocks: int
    num_output_placeholders: int
    delay_cache_blocks: bool
    full_sequence_must_fit: bool
    checkpoint: bool


class RequestedHit(Struct, frozen=True, gc=False):
    """A hit as an engine hands it in, with ints if they can be read; unchecked."""

    blocks: tuple[tuple[int, ...], ...]
    num_tokens: int


class SlotRequest(Struct, frozen=True, gc=False, kw_only=True):
    """The arguments of one allocation, by the names of `allocate_slots`.

    loads: a load fills the blocks of the external tokens, so they are not zeroed.
    """

    request_id: str
    num_new_tokens: int
    hit: RequestedHit | None = None
    num_lookahead_tokens: int = 0
    num_external_computed_tokens: int = 0
    num_encoder_tokens: int = 0
    reserved_blocks: int = 0
    num_output_placeholders: int = 0
    delay_cache_blocks: bool = False
    full_sequence_must_fit: bool = False
    checkpoint: bool = False
    loads: bool = False


MAX_COUNT = 2**31 - 1
"""Maximum number of encoder tokens in a plan: no pool has blocks for more."""

DEFAULTS: dict[str, Any] = {
    each.name: each.default
    for each in fields(SlotRequest)
    if each.name in SlotOptions.__annotations__
}
"""The default options of an allocation."""
FLAGS = tuple(name for name, default in DEFAULTS.items() if default is False)
COUNTS = ("num_new_tokens", *(name for name in DEFAULTS if name not in FLAGS))
