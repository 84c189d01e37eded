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

_own: list[Any] = []
"""vLLM's manager while kvcore's stands in its place."""


def load() -> None:
    """The plugin of vLLM: `install`, if KVCORE_VLLM is 1; vLLM may call it more than once.

    Raises NotServed, also for another value than 0 and 1.
    """
    value = os.environ.get(VARIABLE, "0")
    if value not in ("0", "1"):
        raise NotServed(f"{VARIABLE}={value!r} is neither 0 nor 1")
    if value == "1" and not _own:
        install()


def install() -> None:
    """Let schedulers that are made from now on have kvcore's manager.

    Raises NotServed for another vLLM, or if it is installed.
    """
    if _own:
        raise NotServed("kvcore_vllm is installed: call uninstall() first")
    check_release()
    from vllm.v1.core.sched import scheduler

    from kvcore_vllm.manager import KVCacheManager

    _own.append(scheduler.KVCacheManager)
    scheduler.KVCacheManager = KVCacheManager


def uninstall() -> None:
    """Put vLLM's manager back. Raises NotServed if kvcore's does not stand there."""
    if not _own:
        raise NotServed("kvcore_vllm is not installed: there is nothing to undo")
    from vllm.v1.core.sched import scheduler

    from kvcore_vllm.manager import KVCacheManager

    if scheduler.KVCacheManager is not KVCacheManager:
        raise NotServed("KVCacheManager was replaced after install(): undo that first")
    scheduler.KVCacheManager = _own.pop()


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
    if _own:
        yield
        return
    with installed():
        yield
