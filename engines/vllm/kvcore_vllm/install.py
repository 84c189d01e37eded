# SPDX-License-Identifier: Apache-2.0
"""Put kvcore's manager in the place of vLLM's own, and back.

vLLM's scheduler makes its manager by a name of its module, which is all that is replaced.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from kvcore_vllm.pinned import NotServed, check_release

VARIABLE = "KVCORE_VLLM"
SHADOW = "KVCORE_SHADOW"

_swapped: list[tuple[Any, Any]] = []
"""vLLM's manager and what stands in its place, while something does."""


def load() -> None:
    """The plugin of vLLM: `install`, if KVCORE_VLLM is 1; vLLM may call it more than once.

    Raises NotServed, also for another value than 0 and 1.
    """
    if is_set(VARIABLE) and not _swapped:
        install()


def is_set(variable: str) -> bool:
    """Whether an environment variable is 1. Raises NotServed for another value than 0 and 1."""
    value = os.environ.get(variable, "0")
    if value not in ("0", "1"):
        raise NotServed(f"{variable}={value!r} is neither 0 nor 1")
    return value == "1"


def install() -> None:
    """Let schedulers that are made from now on have kvcore's manager.

    If KVCORE_SHADOW is 1, they have vLLM's, and kvcore's behind it (shadow.py). Raises NotServed
    for another vLLM, or if it is installed.
    """
    if _swapped:
        raise NotServed("kvcore_vllm is installed: call uninstall() first")
    check_release()
    from vllm.v1.core.sched import scheduler

    from kvcore_vllm.manager import KVCacheManager
    from kvcore_vllm.shadow import shadowed

    own = scheduler.KVCacheManager
    ours = shadowed(own) if is_set(SHADOW) else KVCacheManager
    _swapped.append((own, ours))
    scheduler.KVCacheManager = ours


def uninstall() -> None:
    """Put vLLM's manager back. Raises NotServed if kvcore's does not stand there."""
    if not _swapped:
        raise NotServed("kvcore_vllm is not installed: there is nothing to undo")
    from vllm.v1.core.sched import scheduler

    own, ours = _swapped[0]
    if scheduler.KVCacheManager is not ours:
        raise NotServed("KVCacheManager was replaced after install(): undo that first")
    scheduler.KVCacheManager = own
    _swapped.clear()


@contextmanager
def installed() -> Iterator[None]:
    """Install for the length of a `with` block."""
    install()
    try:
        yield
    finally:
        uninstall()


@contextmanager
def swapped() -> Iterator[None]:
    """The same, for one scheduler that is made; also while it is installed."""
    if _swapped:
        yield
        return
    with installed():
        yield
