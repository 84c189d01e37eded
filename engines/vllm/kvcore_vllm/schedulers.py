# SPDX-License-Identifier: Apache-2.0
"""vLLM's schedulers over kvcore, for `vllm serve --scheduler-cls`."""

from __future__ import annotations

from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler as VllmAsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler as VllmScheduler

from kvcore_vllm.install import swapped


class AsyncScheduler(VllmAsyncScheduler):  # type: ignore[misc] # vLLM has no types here
    """vLLM's asynchronous scheduler over kvcore."""

    def __init__(self, *args: Any, **options: Any) -> None:
        with swapped():
            super().__init__(*args, **options)


class Scheduler(VllmScheduler):  # type: ignore[misc] # vLLM has no types here
    """vLLM's scheduler over kvcore; an AsyncScheduler if the configuration wants one."""

    def __new__(cls, vllm_config: Any, *args: Any, **options: Any) -> Any:
        """What vLLM itself would choose: the engine runs the two in different ways."""
        if vllm_config.scheduler_config.async_scheduling:
            return AsyncScheduler(vllm_config, *args, **options)
        return super().__new__(cls)

    def __init__(self, *args: Any, **options: Any) -> None:
        with swapped():
            super().__init__(*args, **options)
