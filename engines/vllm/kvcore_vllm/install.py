# SPDX-License-Identifier: Apache-2.0
"""Put kvcore's manager in the place of vLLM's own, and back.

vLLM's scheduler makes its manager by a name of its module: that is replaced, and the scheduler asks
first whether its configuration is served.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from kvcore_vllm.pinned import NotServed, check_release

VARIABLE = "KVCORE_VLLM"
SHADOW = "KVCORE_SHADOW"
CONNECTORS = {
    "SimpleCPUOffloadConnector": "reads the free queue of vLLM's own pool",
    "OffloadingConnector": "asks vLLM's own coordinator about single groups",
}
"""Connectors that are not served, the second only with several groups, and why."""

_before: list[tuple[Any, str, Any, Any]] = []
"""What was replaced: where, its name, vLLM's value, ours."""


def load() -> None:
    """The plugin of vLLM: `install`, if KVCORE_VLLM is 1; vLLM may call it more than once.

    Raises NotServed, also for another value than 0 and 1.
    """
    if is_set(VARIABLE) and not _before:
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
    if _before:
        raise NotServed("kvcore_vllm is installed: call uninstall() first")
    check_release()
    for holder, name, ours in replacements():
        _before.append((holder, name, vars(holder)[name], ours))
        setattr(holder, name, ours)


def uninstall() -> None:
    """Put everything back. Raises NotServed if nothing is installed, or if others came on top."""
    if not _before:
        raise NotServed("kvcore_vllm is not installed: there is nothing to undo")
    for holder, name, _, ours in _before:
        if vars(holder)[name] is not ours:
            raise NotServed(f"{name} was replaced after install(): undo that first")
    while _before:
        holder, name, theirs, _ = _before.pop()
        setattr(holder, name, theirs)


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
    if _before:
        yield
        return
    with installed():
        yield


def replacements() -> list[tuple[Any, str, Any]]:
    """Where, which name, and what stands there while kvcore is installed."""
    from vllm.v1.core.sched import scheduler

    from kvcore_vllm.shadow import shadowed
    from kvcore_vllm.short_ways import KVCacheManager

    ours = shadowed(scheduler.KVCacheManager) if is_set(SHADOW) else KVCacheManager
    native = scheduler.Scheduler.__init__

    def init(self: Any, vllm_config: Any, kv_cache_config: Any, *args: Any, **kw: Any) -> None:
        """Refuse what is not served, and go on as vLLM does."""
        check_connectors(vllm_config.kv_transfer_config, len(kv_cache_config.kv_cache_groups))
        native(self, vllm_config, kv_cache_config, *args, **kw)

    return [
        (scheduler, "KVCacheManager", ours),
        (scheduler.Scheduler, "__init__", init),
    ]


def check_connectors(config: Any, num_groups: int) -> None:
    """Refuse connectors that take vLLM's own objects for granted. Raises NotServed."""
    if config is None:
        return
    listed = (config.kv_connector_extra_config or {}).get("connectors", ())
    for name in (config.kv_connector, *(each.get("kv_connector") for each in listed)):
        several = name == "OffloadingConnector"
        if name in CONNECTORS and (num_groups > 1 or not several):
            where = f" with {num_groups} groups" if several else ""
            raise NotServed(f"kvcore does not serve {name}{where}: it {CONNECTORS[name]}")
