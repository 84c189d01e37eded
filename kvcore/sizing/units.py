# SPDX-License-Identifier: Apache-2.0
"""Reads amounts of memory and number formats as people write them.

Sizes are exact integers of bytes. `GiB` is 2**30 and `GB` is 10**9; an ambiguous unit (`80G`) is
refused, and so is a number without a unit.
"""

from __future__ import annotations

import re
from decimal import Decimal

from kvcore.sizing.errors import InvalidMemory, UnknownDtype

MAX_MEMORY_BYTES = 2**50
"""A PiB on one device must be a mistake."""
TOO_MUCH = f"must be at most {MAX_MEMORY_BYTES // 2**40} TiB"

DTYPE_BYTES = {
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "fp8": 1,
    "fp8_e4m3": 1,
    "fp8_e5m2": 1,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int8": 1,
    "uint8": 1,
    "int32": 4,
    "float64": 8,
}
_SHORT = {"fp32": "float32", "fp16": "float16", "half": "float16", "bf16": "bfloat16"}
_UNITS = {"b": 1, "byte": 1, "bytes": 1} | {
    unit: size
    for power, letter in enumerate("kmgt", 1)
    for unit, size in ((f"{letter}ib", 2 ** (10 * power)), (f"{letter}b", 10 ** (3 * power)))
}
_AMOUNT = re.compile(r"([+-]?)(\d{1,30}(?:\.\d{1,30})?)\s*([a-z]*)", re.ASCII)


def read_dtype(text: str) -> str:
    """Return the full name of a number format. Raises UnknownDtype."""
    name = _SHORT.get(text.lower(), text.lower())
    if name not in DTYPE_BYTES:
        raise UnknownDtype(value=text, known=tuple(DTYPE_BYTES))
    return name


def parse_memory(text: str) -> int:
    """Return the bytes of an amount like `80GiB`, `80 GB`, `512MiB` or `4096 bytes`, rounded down.

    Raises InvalidMemory for text that is not an amount, a missing or unknown unit, less than a
    byte, or more than a PiB.
    """
    found = _AMOUNT.fullmatch(text.strip().lower())
    if found is None:
        raise InvalidMemory(value=text, reason="must be a number and a unit, like 80GiB")
    sign, number, unit = found.groups()
    if unit not in _UNITS:
        wrong = f"unit {unit} is not one of" if unit else "the unit is missing: give one of"
        reason = f"{wrong} bytes, KiB, MiB, GiB, TiB, KB, MB, GB, TB"
        raise InvalidMemory(value=text, reason=reason)
    size = int(Decimal(number) * _UNITS[unit])
    if sign == "-" or size < 1:
        raise InvalidMemory(value=text, reason="must be at least 1 byte")
    if size > MAX_MEMORY_BYTES:
        raise InvalidMemory(value=text, reason=TOO_MUCH)
    return size
