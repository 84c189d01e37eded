# SPDX-License-Identifier: Apache-2.0
"""Enumerations that compare by name, so that an engine can keep its own copies.

A member equals the member of the same name of any enumeration with the same class name, on either
side of `==`, and has the same hash. An engine can thus keep its own classes and import only the
manager. `is` does not compare by name. Source: S003-04, 30, S002-61.
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
    """Tells whether a group of sequences can be given blocks."""

    OK = enum.auto()
    """The group can be admitted now."""
    LATER = enum.auto()
    """The group does not fit now, but may fit later."""
    NEVER = enum.auto()
    """The group would not fit into an empty pool minus the watermark."""


class Device(NamedEnum):
    """The tier of a block: GPU is the core's device tier, CPU its host tier."""

    GPU = enum.auto()
    CPU = enum.auto()
