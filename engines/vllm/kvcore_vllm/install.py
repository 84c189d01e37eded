# SPDX-License-Identifier: Apache-2.0
"""Put kvcore's manager in place of vLLM's own, and undo that.

vLLM's scheduler makes its manager by a name in its module. That name is replaced, and so is the
scheduler's `__init__`, which first refuses a configuration that is not served.
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
"""Connectors that are not served, and why; the second is served with a single group."""

_before: list[tuple[Any, str, Any, Any]] = []
"""What was replaced: its holder, its name, vLLM's value, and ours."""


def load() -> None:
    """Install if KVCORE_VLLM is 1, or KVCORE_SHADOW without it. vLLM calls this as a plugin,
    perhaps more than once.

    Raises NotServed, also if the variable is neither 0 nor 1.
    """
    if is_set(VARIABLE if VARIABLE in os.environ else SHADOW) and not _before:
        install()


def is_set(variable: str) -> bool:
    """Return whether an environment variable is 1. Raises NotServed unless it is 0 or 1."""
    value = os.environ.get(variable, "0")
    if value not in ("0", "1"):
        raise NotServed(f"{variable}={value!r} is neither 0 nor 1")
    return value == "1"


def install() -> None:
    """Give every scheduler that is made from now on kvcore's manager.

    If KVCORE_SHADOW is 1, it has vLLM's own with kvcore's behind it (shadow.py). Raises NotServed
    for another release of vLLM, or if kvcore is installed already.
    """
    if _before:
        raise NotServed("kvcore_vllm is installed: call uninstall() first")
    check_release()
    for holder, name, ours in replacements():
        _before.append((holder, name, vars(holder)[name], ours))
        setattr(holder, name, ours)


def uninstall() -> None:
    """Undo `install`. Raises NotServed if nothing is installed or a name was replaced since."""
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
    """Install within a `with` block, and uninstall at its end."""
    install()
    try:
        yield
    finally:
        uninstall()


@contextmanager
def swapped() -> Iterator[None]:
    """Install within a `with` block in which a scheduler is made, unless kvcore is installed."""
    if _before:
        yield
        return
    with installed():
        yield


def replacements() -> list[tuple[Any, str, Any]]:
    """Return what kvcore replaces: the holder, the name, and the value while it is installed."""
    from vllm.v1.core.sched import scheduler

    from kvcore_vllm.shadow import shadowed
    from kvcore_vllm.short_ways import KVCacheManager

    ours = shadowed(scheduler.KVCacheManager) if is_set(SHADOW) else KVCacheManager
    native = scheduler.Scheduler.__init__

    def init(self: Any, vllm_config: Any, kv_cache_config: Any, *args: Any, **kw: Any) -> None:
        """Refuse what is not served, and continue as vLLM does."""
        connectors, groups = vllm_config.kv_transfer_config, kv_cache_config.kv_cache_groups
        check_connectors(connectors, len(groups), has_states=kv_cache_config.has_mamba_layers)
        native(self, vllm_config, kv_cache_config, *args, **kw)

    return [
        (scheduler, "KVCacheManager", ours),
        (scheduler.Scheduler, "__init__", init),
    ]


def check_connectors(config: Any, num_groups: int, *, has_states: bool = False) -> None:
    """Refuse connectors that rely on vLLM's own objects. Raises NotServed."""
    if config is None or config.kv_connector is None:
        return
    if has_states:
        raise NotServed(f"kvcore does not serve {config.kv_connector} beside state-space layers")
    for name in named_connectors(config.kv_connector, config.kv_connector_extra_config):
        several = name == "OffloadingConnector"
        if name in CONNECTORS and (num_groups > 1 or not several):
            where = f" with {num_groups} groups" if several else ""
            raise NotServed(f"kvcore does not serve {name}{where}: it {CONNECTORS[name]}")


def named_connectors(name: str | None, extra: dict[str, Any] | None) -> Iterator[str | None]:
    """Yield a connector's name and those of the connectors inside it, at any depth."""
    yield name
    for each in (extra or {}).get("connectors", ()):
        inner = each.get("kv_connector_extra_config")
        yield from named_connectors(each.get("kv_connector"), inner)
