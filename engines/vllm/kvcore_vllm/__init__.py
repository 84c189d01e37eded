# SPDX-License-Identifier: Apache-2.0
"""kvcore in place of the KV-cache manager of vLLM 0.33.0.

    vllm serve MODEL --scheduler-cls kvcore_vllm.Scheduler

vLLM keeps the scheduler, the workers and the tensors; kvcore decides about the blocks. vLLM is
imported only when a scheduler is looked up, so an unused plugin costs nothing.
"""

from __future__ import annotations

from typing import Any

from kvcore_vllm.install import install, installed, uninstall
from kvcore_vllm.pinned import NotServed, check_release

__all__ = ["AsyncScheduler", "NotServed", "Scheduler", "install", "installed", "uninstall"]


def __getattr__(name: str) -> Any:
    """Import a scheduler by its name. Raises NotServed for another release of vLLM."""
    if name not in ("AsyncScheduler", "Scheduler"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    check_release()
    from kvcore_vllm import schedulers

    return getattr(schedulers, name)
