# SPDX-License-Identifier: Apache-2.0
"""vLLM's schedulers over kvcore, for `vllm serve --scheduler-cls`."""

from __future__ import annotations

from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler as VllmAsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler as VllmScheduler

from kvcore_vllm.install import swapped
from kvcore_vllm.pinned import NotServed


def check_model(vllm_config: Any) -> None:
    """Refuse models that have a scheduler of their own. Raises NotServed."""
    if vllm_config.diffusion_config is not None:
        raise NotServed(
            "diffusion models have a scheduler of their own: set KVCORE_VLLM=1 and name none"
        )


class AsyncScheduler(VllmAsyncScheduler):  # type: ignore[misc] # vLLM has no types here
    """vLLM's asynchronous scheduler over kvcore."""

    def __init__(self, vllm_config: Any, *args: Any, **options: Any) -> None:
        check_model(vllm_config)
        with swapped():
            super().__init__(vllm_config, *args, **options)


class Scheduler(VllmScheduler):  # type: ignore[misc] # vLLM has no types here
    """vLLM's scheduler over kvcore, or an AsyncScheduler if the configuration asks for one."""

    def __new__(cls, vllm_config: Any, *args: Any, **options: Any) -> Any:
        """Choose the class as vLLM does: the engine runs the two in different ways."""
        if cls is Scheduler and vllm_config.scheduler_config.async_scheduling:
            return AsyncScheduler(vllm_config, *args, **options)
        return super().__new__(cls)

    def __init__(self, vllm_config: Any, *args: Any, **options: Any) -> None:
        check_model(vllm_config)
        with swapped():
            super().__init__(vllm_config, *args, **options)
