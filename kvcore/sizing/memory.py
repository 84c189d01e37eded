# SPDX-License-Identifier: Apache-2.0
"""Checks whether the cache of one full-length request fits, and finds the longest that does.

Need grows with the length, so the longest length that fits is found by binary search between 1 and
the configured one, only if the request does not fit. An impossible amount of memory is refused
before anything is computed from it.
Source: S001-48 to 56.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import attrs

from kvcore.sizing.errors import InvalidMemory, NoCacheMemory, NoLayers, NotEnoughMemory
from kvcore.sizing.specs import LayerSpec, Limits, check_integer
from kvcore.sizing.units import MAX_MEMORY_BYTES, TOO_MUCH

Specs = Mapping[str, LayerSpec]
"""The layers of a model by name, in the model's order."""


def max_request_bytes(specs: Specs, limits: Limits) -> int:
    """Return the bytes to reserve for one request of maximum length, summed over the layers.

    With `limits.null_block`, this includes one more block of every layer.
    """
    null = sum(spec.page_bytes for spec in specs.values()) if limits.null_block else 0
    return null + sum(spec.max_bytes(limits) for spec in specs.values())


def longest_length(need: Callable[[Limits], int], available: int, limits: Limits) -> int:
    """Return the greatest length up to `limits.max_model_len` whose need is available; 0 if there
    is none.

    need: amount for one request under these limits; must not fall as the length grows.
    """
    low, high, longest = 1, limits.max_model_len, 0
    while low <= high:  # at most log2 of the length
        middle = (low + high) // 2
        if need(attrs.evolve(limits, max_model_len=middle)) <= available:
            longest, low = middle, middle + 1
        else:
            high = middle - 1
    return longest


def longest_in_memory(specs: Specs, available_bytes: int, limits: Limits) -> int:
    """Return the longest request that this memory holds, at most `limits.max_model_len`; 0 if none.

    Does not look at `limits.num_blocks`.
    Raises WrongArgument, NoCacheMemory below 0 bytes, InvalidMemory above a PiB.
    """
    check_memory("available_bytes", available_bytes, least=0)
    return longest_length(lambda probe: max_request_bytes(specs, probe), available_bytes, limits)


def check_enough_kv_cache_memory(specs: Specs, available_bytes: int, limits: Limits) -> None:
    """Raise NoLayers, or what `check_need` raises, unless one full-length request fits."""
    if not specs:
        raise NoLayers
    check_need(lambda probe: max_request_bytes(specs, probe), available_bytes, limits)


def check_need(need: Callable[[Limits], int], available_bytes: int, limits: Limits) -> None:
    """Raise unless the bytes that one request of full length needs are available.

    Raises what `check_memory` does, and NotEnoughMemory with the longest length that fits, if any.
    """
    check_memory("available_bytes", available_bytes)
    needed_bytes = need(limits)
    if needed_bytes <= available_bytes:
        return
    longest = longest_length(need, available_bytes, limits)
    raise NotEnoughMemory(
        max_model_len=limits.max_model_len,
        needed_bytes=needed_bytes,
        available_bytes=available_bytes,
        longest_model_len=longest,
    )


def at_least_none(available_bytes: int) -> int:
    """Return an amount of memory, 0 if it is negative. Raises WrongArgument unless it is an
    integer.
    """
    check_integer("available_bytes", available_bytes)
    return max(0, available_bytes)


def check_memory(name: str, num_bytes: int, *, least: int = 1) -> None:
    """Raise unless this many bytes can be a device's memory for the cache.

    name: of the argument. least: 0 if the call also works for no memory. Raises WrongArgument
    unless it is an integer, NoCacheMemory, InvalidMemory above a PiB.
    """
    check_integer(name, num_bytes)
    if num_bytes < least:
        raise NoCacheMemory(available=num_bytes)
    if num_bytes > MAX_MEMORY_BYTES:
        raise InvalidMemory(value=num_bytes, reason=TOO_MUCH)
