# SPDX-License-Identifier: Apache-2.0
"""Groups: layers that share block size and retention rule, and those rules.

Invariants: positions count tokens. With n computed tokens the next query is at n and sees positions
from `skipped_tokens(group, n)` on. Earlier positions are never read again: their blocks are given
back and replaced by the null block. Cross-attention has one table for the encoder's tokens, which
does not grow with the request and is never cached. A state group keeps no tokens: its block at
(n - 1) // block_size holds the state after n tokens, so it gives blocks back as a window of two
tokens does.
Source: S000-11, 28, 36, 40; S001-79 to 81. Twin: rust/src/types/groups.rs.
"""

from __future__ import annotations

from typing import Any, Literal

import attrs

from kvcore.types.arguments import read_scalars
from kvcore.types.errors import InvalidConfig

Kind = Literal[
    "full_attention", "mla", "sliding_window", "chunked_local", "cross_attention", "state"
]

KINDS: tuple[Kind, ...] = (
    "full_attention",
    "mla",
    "sliding_window",
    "chunked_local",
    "cross_attention",
    "state",
)
WINDOWED = ("sliding_window", "chunked_local")
MAX_BLOCK_SIZE = 2**31 - 1
MAX_PAGE_BYTES = 2**63 - 1


@attrs.frozen
class Group:
    """Layers that share block size and retention rule.

    block_size: tokens per block. kind: full_attention and mla keep everything; sliding_window keeps
    the `window` tokens that a query sees, itself included; chunked_local keeps the chunk of
    `window` tokens that contains the query; cross_attention keeps the encoder's tokens; state keeps
    one recurrent state, and a checkpoint of it at each multiple of block_size at which a step ends.
    eagle: a draft model reads these layers, so a hit leaves the last matched block to be computed.
    zero_new_blocks: a `Zero` follows each `Allocate` of a block that nothing else fills.
    page_bytes: bytes of one block of these layers, None if unknown. draft_states: most drafts that
    a step of a state group may compute, each with a state of its own. Raises InvalidConfig.
    """

    block_size: int = 16
    kind: Kind = attrs.field(default="full_attention", kw_only=True)
    window: int | None = attrs.field(default=None, kw_only=True)
    eagle: bool = attrs.field(default=False, kw_only=True)
    zero_new_blocks: bool = attrs.field(default=False, kw_only=True)
    page_bytes: int | None = attrs.field(default=None, kw_only=True)
    draft_states: int = attrs.field(default=0, kw_only=True)
    is_windowed: bool = attrs.field(init=False, eq=False, repr=False)
    """Whether blocks that no later query reads are given back."""
    is_cross: bool = attrs.field(init=False, eq=False, repr=False)
    """Whether the table holds the encoder's tokens."""
    is_state: bool = attrs.field(init=False, eq=False, repr=False)
    """Whether a block holds a recurrent state instead of tokens."""

    def __attrs_post_init__(self) -> None:
        read_scalars(self)
        if not _is_count(self.block_size, 1, MAX_BLOCK_SIZE):
            _refuse("block_size", self.block_size, f"must be from 1 to {MAX_BLOCK_SIZE}")
        if not isinstance(self.kind, str) or self.kind not in KINDS:
            _refuse("kind", self.kind, f"must be one of {', '.join(KINDS)}")
        if self.kind in WINDOWED:
            if not _is_count(self.window, 1, MAX_BLOCK_SIZE):
                reason = f"a {self.kind} group needs 1 to {MAX_BLOCK_SIZE} tokens"
                _refuse("window", self.window, reason)
        elif self.window is not None:
            _refuse("window", self.window, f"a {self.kind} group has none")
        if self.kind == "state" and self.eagle is True:
            _refuse("eagle", self.eagle, "a state group has no hit block to drop")
        for name in ("eagle", "zero_new_blocks"):
            if not isinstance(getattr(self, name), bool):
                _refuse(name, getattr(self, name), "must be True or False")
        if self.page_bytes is not None and not _is_count(self.page_bytes, 1, MAX_PAGE_BYTES):
            _refuse("page_bytes", self.page_bytes, "must be at least 1 if it is given")
        if not _is_count(self.draft_states, 0, MAX_BLOCK_SIZE):
            _refuse("draft_states", self.draft_states, "must be an integer of at least 0")
        if self.draft_states and self.kind != "state":
            _refuse("draft_states", self.draft_states, f"a {self.kind} group has none")
        if self.draft_states >= self.block_size and self.draft_states:
            reason = f"must be smaller than block_size={self.block_size}"
            _refuse("draft_states", self.draft_states, reason)
        object.__setattr__(self, "is_state", self.kind == "state")
        object.__setattr__(self, "is_windowed", self.kind in WINDOWED or self.is_state)
        object.__setattr__(self, "is_cross", self.kind == "cross_attention")


def skipped_tokens(group: Group, num_computed: int) -> int:
    """Count the leading positions that no query at num_computed or later sees."""
    if group.is_state:
        return max(0, num_computed - 1)
    if group.window is None:
        return 0
    if group.kind == "sliding_window":
        return max(0, num_computed - group.window + 1)
    return num_computed // group.window * group.window


def skipped_blocks(group: Group, num_computed: int) -> int:
    """Count the leading blocks of which no query at num_computed or later sees a token."""
    return skipped_tokens(group, num_computed) // group.block_size


def admission_cap(group: Group, max_num_batched: int, max_model_len: int) -> int | None:
    """Return the most blocks that a request holds at once, whatever its length; None if nothing is
    given back.

    max_num_batched: most tokens that one step computes of a request. The result includes one more
    block if the first visible token need not be at the start of a block.
    """
    if group.window is None:
        return None
    seen = group.window - 1 if group.kind == "sliding_window" else group.window
    most = -(-min(seen + max_num_batched, max_model_len) // group.block_size)
    return most + int(group.kind == "sliding_window" or group.window % group.block_size > 0)


def most_states(group: Group, num_to_come: int) -> int:
    """Return the most states that a request holds at once: the one after its last step, the one
    before it or those that its tokens to come will make checkpoints, and those after its drafts.
    """
    return 1 + max(1, -(-num_to_come // group.block_size)) + group.draft_states


def _is_count(value: Any, least: int, most: int) -> bool:
    """Return whether a value is an int, not a bool, within these bounds."""
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


def _refuse(name: str, value: Any, reason: str) -> None:
    raise InvalidConfig(field=name, value=value, reason=reason)
