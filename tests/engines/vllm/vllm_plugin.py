# SPDX-License-Identifier: Apache-2.0
"""A plugin of pytest: vLLM's own tests over kvcore, offline, each against its expected outcome.

Loaded with `-p vllm_plugin` in a folder of vLLM's source distribution, without vLLM's conftest,
which reads every model. KVCORE_VLLM_TESTS=own leaves vLLM's manager where it is.
"""

from __future__ import annotations

import logging
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from vllm_models import write_models  # type: ignore[import-not-found] # the folder is on the path
from vllm_outcomes import (  # type: ignore[import-not-found] # the same
    BEYOND,
    OUTCOMES,
    PASSES,
    differences,
    read_outcomes,
    wrongly_listed,
)

os.environ |= {
    "CUDA_VISIBLE_DEVICES": "",
    "HF_HUB_OFFLINE": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_TARGET_DEVICE": "cpu",
}

OWN = os.environ.get("KVCORE_VLLM_TESTS") == "own"
INTERFACE = {
    "BlockPool": {"free_blocks", "hash_block_size", "get_cached_block"},
    "Coordinator": {
        "enable_partial_hash_hits",
        "full_attention_group_id",
        "get_num_blocks_to_allocate",
        "num_reprefillable_tokens",
        "single_type_managers",
    },
}
"""What vLLM's schedulers and its connectors' base classes use of the manager's parts, by class of
the adapter."""


class Verdicts:
    """Collects outcomes, and fails a run in which one differs from what is expected.

    A test that is left out, by -k for example, is taken as expected.
    """

    def __init__(self) -> None:
        self.expected: dict[str, str] = read_outcomes(OUTCOMES)
        if OWN:
            self.expected = dict.fromkeys(self.expected, PASSES)
        self.beyond = set(read_outcomes(BEYOND))
        self.seen: set[str] = set()  # tests that used more than INTERFACE
        self.found: dict[str, bool] = {}
        self.ran: set[str] = set()
        self._now = ""  # the test that runs

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        """Run what has an expected outcome."""
        items[:] = [item for item in items if item.nodeid in self.expected]
        self.found = {item.nodeid: self.expected[item.nodeid] == PASSES for item in items}

    def watch(self, kind: type[Any], names: set[str]) -> None:
        """Note the tests in which others than the adapter use more of a class than these names."""
        read: Any = kind.__getattribute__

        def get(holder: Any, name: str) -> Any:
            if name[0] != "_" and name not in names:
                caller = sys._getframe(1).f_globals["__name__"]
                if not caller.startswith("kvcore_vllm."):
                    self.seen.add(self._now)
            return read(holder, name)

        kind.__getattribute__ = get  # type: ignore[assignment] # for all instances

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """Note which test runs."""
        self._now = nodeid

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Note how each test that runs comes out."""
        if report.when == "setup":
            self.ran.add(report.nodeid)
            self.found[report.nodeid] = True
        self.found[report.nodeid] &= report.passed

    def pytest_sessionfinish(self, session: Any) -> None:
        """Set the exit status to 0 if every outcome is the expected one, else to 1."""
        session.exitstatus = int(bool(self._unexpected()))

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """Write what is unexpected, and how many tests passed."""
        for line in self._unexpected():
            terminalreporter.write_line(line)
        by_interface = [passed for name, passed in self.found.items() if name not in self.beyond]
        terminalreporter.write_line(
            f"{sum(self.found.values())} of {len(self.expected)} of vLLM's tests pass, "
            f"{sum(by_interface)} of {len(self.expected) - len(self.beyond)} of those that use no "
            f"more of the manager than vLLM's scheduler; {len(self.ran)} ran now"
        )

    def _unexpected(self) -> list[str]:
        ran = {name: passed for name, passed in self.found.items() if name in self.ran}
        wrong = [] if OWN else wrongly_listed(self.beyond & self.ran, self.seen, ran)
        return [*differences(self.expected, self.found), *wrong]


def pytest_configure(config: Any) -> None:
    """Put kvcore's manager in the place of vLLM's before a test module is imported."""
    folder = tempfile.TemporaryDirectory()
    config.add_cleanup(folder.cleanup)
    os.environ["VLLM_MODEL_REDIRECT_PATH"] = str(write_models(Path(folder.name)))
    verdicts = Verdicts()
    if not OWN:
        from kvcore_vllm import blocks, coordinator, install
        from kvcore_vllm.short_ways import KVCacheManager
        from vllm.v1.core import kv_cache_manager

        install()
        kv_cache_manager.KVCacheManager = KVCacheManager
        for kind in (blocks.BlockPool, coordinator.Coordinator):
            verdicts.watch(kind, INTERFACE[kind.__name__])
    config.pluginmanager.register(verdicts, "kvcore-verdicts")


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
