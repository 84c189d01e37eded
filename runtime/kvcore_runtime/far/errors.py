# SPDX-License-Identifier: Apache-2.0
"""What can be wrong with a far tier when it is made, and with a ticket."""

from __future__ import annotations

import importlib
from types import ModuleType

from kvcore_runtime.errors import KvcoreRuntimeError


class InvalidTier(KvcoreRuntimeError):
    """An option of a far tier, or of its exchange, outside its range."""

    message = "{name} is {value!r}, expected {expected}"


class UnknownTicket(KvcoreRuntimeError):
    """A ticket that was never given, or has ended."""

    message = "ticket {ticket} is not on its way"


class FarPackageMissing(KvcoreRuntimeError):
    """A tier needs a package that is an extra."""

    message = "this far tier needs the Python package {package!r}: pip install {install!r}"


def load_package(module: str, package: str, install: str) -> ModuleType:
    """A module of an optional package. Raises FarPackageMissing."""
    try:
        return importlib.import_module(module)
    except ImportError:
        raise FarPackageMissing(package=package, install=install) from None
