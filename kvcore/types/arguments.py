# SPDX-License-Identifier: Apache-2.0
"""Reads numbers and flags passed by an engine, including scalars of numpy and torch.

An object with `__index__` becomes that int; one that changes the manager meanwhile ends the call.
Any other object is passed on to the check of the number, which refuses it by name. A flag is a
bool, or a scalar whose dtype is bool. Other flags, and arguments that are not iterable, are refused
here. The twin reads its arguments in `rust/src/bindings/arguments.rs`.
"""

from __future__ import annotations

import operator
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import attrs

from kvcore.types.errors import ConcurrentCall, InvalidCount, WrongArgument
from kvcore.types.extra_inputs import LoRA, MediaItem, PromptEmbeds
from kvcore.types.values import Request

BOOLS = ("bool", "torch.bool")
"""Names of the types of scalars that are flags."""


def read_int(value: Any) -> Any:
    """Return the int that a value stands for, or the value itself if it is not an int."""
    try:
        return int(operator.index(value))
    except ConcurrentCall:
        raise
    except Exception:
        return value


def read_ints(values: Iterable[Any]) -> list[Any]:
    """Apply `read_int` to each value; what its code does to `values` changes nothing."""
    return [value if type(value) is int else read_int(value) for value in tuple(values)]


def read_count(name: str, value: Any, least: int = 0) -> int:
    """Return a count as int. Raises InvalidCount if it is not an int, or below `least`."""
    number = value if type(value) is int else read_int(value)
    if not isinstance(number, int):
        raise InvalidCount(name=name, value=value, least=least)
    if number < least:
        raise InvalidCount(name=name, value=number, least=least)
    return number


def read_batch_number(batch: Any) -> int | None:
    """Return the number of a batch, or None. Raises InvalidCount."""
    return None if batch is None else read_count("batch", batch)


def read_bool(value: Any) -> Any:
    """Return the bool that a value stands for, or the value itself if it is not a flag."""
    if isinstance(value, bool):
        return value
    try:
        return bool(value) if str(value.dtype) in BOOLS and not len(value.shape) else value
    except ConcurrentCall:
        raise
    except Exception:
        return value


def read_flag(name: str, value: Any) -> bool:
    """Return a flag as bool. Raises WrongArgument if it is not a flag."""
    flag = read_bool(value)
    check_kind(name, flag, bool)
    return bool(flag)


def read_scalars(made: Any) -> None:
    """Convert the fields of a new attrs value to the ints and bools that they stand for."""
    for field in attrs.fields(type(made)):
        value = getattr(made, field.name) if field.init else None
        if value is not None and not isinstance(value, int | str | bytes | tuple | list):
            flag = read_bool(value)
            scalar = flag if isinstance(flag, bool) else read_int(value)
            object.__setattr__(made, field.name, scalar)


def check_kind(name: str, value: Any, kind: type) -> None:
    """Raise WrongArgument unless a value is of type `kind`."""
    if not isinstance(value, kind):
        raise WrongArgument(name=name, expected=f"a {kind.__name__}", value=value)


def check_request(request: Any) -> None:
    """Raise WrongArgument unless a value is a `Request` whose parts have the right types."""
    check_kind("request", request, Request)
    check_kinds(request)
    if request.block_hashes is not None:
        check_items("block_hashes", request.block_hashes, "a list of hashes")
    read_flag("skip_reading_prefix_cache", request.skip_reading_prefix_cache)
    if request.retention is not None:
        check_retention(request.retention)


def check_retention(value: Any) -> None:
    """Raise WrongArgument unless a value is a `KvCacheRetentionConfig`."""
    from kvcore.types.retention import KvCacheRetentionConfig  # few requests have this

    check_kind("retention", value, KvCacheRetentionConfig)


def check_items(name: str, values: Any, expected: str) -> None:
    """Raise WrongArgument for a str, and for a value that is not iterable."""
    try:
        if not isinstance(values, str | bytes):
            iter(values)
            return
    except TypeError:
        pass
    raise WrongArgument(name=name, expected=expected, value=values)


def read_list(name: str, values: Any, expected: str = "a list of ids") -> list[Any]:
    """Return the items as a list. Raises WrongArgument for a str, and for a value that is not
    iterable.
    """
    check_items(name, values, expected)
    return list(values)


def read_once(values: Any) -> Any:
    """Read an iterator, which may call the manager, into a list; return any other value as
    it is.
    """
    return deque(values) if isinstance(values, Iterator) else values


def check_kinds(request: Request) -> None:
    """Raise WrongArgument unless each part of a request's extra keys has the right type."""
    if not isinstance(request.media, Sequence) or isinstance(request.media, str):
        raise WrongArgument(name="media", expected="a sequence of MediaItem", value=request.media)
    parts: list[tuple[str, Any, type]] = [("media", item, MediaItem) for item in request.media]
    parts.append(("lora", request.lora, LoRA))
    parts.append(("prompt_embeds", request.prompt_embeds, PromptEmbeds))
    for name, part, kind in parts:
        if not isinstance(part, kind) and (name == "media" or part is not None):
            raise WrongArgument(name=name, expected=f"a {kind.__name__}", value=part)
