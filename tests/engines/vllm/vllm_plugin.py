# SPDX-License-Identifier: Apache-2.0
"""A plugin of pytest: vLLM's own tests over kvcore, offline, each against its expected outcome.

Loaded with `-p vllm_plugin` in a folder of vLLM's source distribution, without vLLM's conftest,
which reads every model. KVCORE_VLLM_TESTS=own leaves vLLM's manager where it is.
"""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from vllm_models import write_models  # type: ignore[import-not-found] # the folder is on the path
from vllm_outcomes import (  # type: ignore[import-not-found] # the same
    OUTCOMES,
    PASSES,
    differences,
    read_outcomes,
)

os.environ |= {
    "CUDA_VISIBLE_DEVICES": "",
    "HF_HUB_OFFLINE": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_TARGET_DEVICE": "cpu",
}

OWN = os.environ.get("KVCORE_VLLM_TESTS") == "own"


class Verdicts:
    """Collects outcomes, and fails a run in which one differs from what is expected.

    A test that is left out, by -k for example, is taken as expected.
    """

    def __init__(self) -> None:
        self.expected: dict[str, str] = read_outcomes(OUTCOMES)
        if OWN:
            self.expected = dict.fromkeys(self.expected, PASSES)
        self.found: dict[str, bool] = {}
        self.num_run = 0

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        """Run what has an expected outcome."""
        items[:] = [item for item in items if item.nodeid in self.expected]
        self.found = {item.nodeid: self.expected[item.nodeid] == PASSES for item in items}

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Note how each test that runs comes out."""
        if report.when == "setup":
            self.num_run += 1
            self.found[report.nodeid] = True
        self.found[report.nodeid] &= report.passed

    def pytest_sessionfinish(self, session: Any) -> None:
        """Set the exit status to 0 if every outcome is the expected one, else to 1."""
        session.exitstatus = int(bool(differences(self.expected, self.found)))

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """Write the differences, and how many tests passed."""
        for line in differences(self.expected, self.found):
            terminalreporter.write_line(line)
        passed = sum(self.found.values())
        terminalreporter.write_line(
            f"{passed} of {len(self.expected)} of vLLM's tests pass, {self.num_run} of them ran now"
        )


def pytest_configure(config: Any) -> None:
    """Put kvcore's manager in the place of vLLM's before a test module is imported."""
    folder = tempfile.TemporaryDirectory()
    config.add_cleanup(folder.cleanup)
    os.environ["VLLM_MODEL_REDIRECT_PATH"] = str(write_models(Path(folder.name)))
    if not OWN:
        from kvcore_vllm import install
        from kvcore_vllm.short_ways import KVCacheManager
        from vllm.v1.core import kv_cache_manager

        install()
        kv_cache_manager.KVCacheManager = KVCacheManager
    config.pluginmanager.register(Verdicts(), "kvcore-verdicts")


@pytest.fixture
def default_vllm_config() -> Iterator[Any]:
    """Make vLLM's defaults the current configuration."""
    from vllm.config import VllmConfig, set_current_vllm_config

    config = VllmConfig()
    with set_current_vllm_config(config):
        yield config


@pytest.fixture
def should_do_global_cleanup_after_test() -> bool:
    """Provide a name that fixtures of vLLM request."""
    return False


@pytest.fixture
def caplog_vllm(caplog: Any, monkeypatch: Any) -> Any:
    """Capture vLLM's log, which does not reach the root logger by itself."""
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    with caplog.at_level(logging.INFO):
        yield caplog
