# SPDX-License-Identifier: Apache-2.0
"""Enumerations that an engine may have a second time, under the same names.

A member equals the member of the same name of any enumeration with the same class name, on either
side of `==`, and has the same hash. So an engine can keep its own classes and import the manager
alone. `is` does not compare by name. Source: S003-04, 30, S002-61.
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


class AllocStatus(NamedEnum):
    """Whether a group of sequences can be given blocks."""

    OK = enum.auto()
    """It can be admitted now."""
    LATER = enum.auto()
    """Not now."""
    NEVER = enum.auto()
    """It would not fit into an empty pool less the watermark."""


class Device(NamedEnum):
    """Where a block is: the core's device tier, or its host tier."""

    GPU = enum.auto()
    CPU = enum.auto()
