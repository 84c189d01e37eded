# SPDX-License-Identifier: Apache-2.0
"""Enumerations that an engine may have a second time, under the same names.

Rules: a member equals the member of that name of any enumeration of its class's name, and hashes as
it does, whichever stands on the left. So an engine that keeps its own classes, and imports the
manager alone from here, goes on comparing. `is` compares nothing of the sort. Source: S003-04, 30,
S002-61. Twin: none.
"""

from __future__ import annotations

import enum


class NamedEnum(enum.Enum):
    """An enumeration that compares by name."""

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, enum.Enum) or type(other).__name__ != type(self).__name__:
            return NotImplemented
        return self._name_ == other._name_

    def __hash__(self) -> int:
        return hash(self._name_)  # as all enumerations do


class Device(NamedEnum):
    """Where a block is: the core's device tier, or its host tier."""

    GPU = enum.auto()
    CPU = enum.auto()
