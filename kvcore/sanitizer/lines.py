# SPDX-License-Identifier: Apache-2.0
"""A chunk of a step while it is checked, and its possible errors.

Twin: rust/src/sanitizer/lines.rs.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from kvcore.sanitizer.contents import Event, Held
from kvcore.sanitizer.requests import Followed

SlotLists = tuple[int, Sequence[int], Sequence[int]]
"""A group, its written slots and its read slots."""
BlockLists = Sequence[Sequence[int]]
"""Blocks of each group."""


@attrs.define
class Line:
    """One chunk of a step while it is checked.

    oldest_epoch: of the contents that it reads and writes; written: its value at the time of
    writing. loads: it only writes, from outside, without null blocks, and in one group if that is
    given.
    """

    request: Followed
    start: int
    end: int
    drafts: Sequence[int]
    slots: SlotLists | None
    oldest_epoch: int = 0
    written: int = 0
    loads: bool = False
    group_id: int | None = None
    wrong: bool = False


@attrs.frozen
class WrongAccess:
    """A wrong read or write of a chunk; only `alias` proves nothing.

    block, slot, held and event are None if the table has no block for the position.
    """

    name: str
    serial: int
    group_id: int
    start: int
    position: int
    block: int | None
    slot: int | None
    held: Held | None
    event: Event | None
    step: int
