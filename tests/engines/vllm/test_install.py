# SPDX-License-Identifier: Apache-2.0
"""The adapter for vLLM: its two ways in, undoing them, and the releases that it refuses."""

from __future__ import annotations

import inspect
import subprocess
import sys
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest

from tests.engines.vllm.environment import ABSENT, ADAPTER

pytest.importorskip("vllm", reason=ABSENT)

import tomllib

import kvcore_vllm
import vllm
from kvcore_vllm import NotServed, pinned
from kvcore_vllm.blocks import BlockPool, Blocks
from kvcore_vllm.coordinator import Coordinator
from kvcore_vllm.install import load
from kvcore_vllm.manager import KVCacheManager
from vllm.config import SchedulerConfig
from vllm.v1.core.sched import scheduler as place
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

from tests.engines.vllm.engine import make_engine, run

pytestmark = pytest.mark.vllm
OWN = place.KVCacheManager


def test_a_scheduler_by_name_has_kvcores_manager_and_leaves_vllm_as_it_was() -> None:
    for is_async, kind in ((False, Scheduler), (True, AsyncScheduler)):
        scheduler = make_engine(kvcore_vllm.Scheduler, is_async=is_async)
        assert isinstance(scheduler, kind)
        assert isinstance(scheduler.kv_cache_manager, KVCacheManager)
        assert place.KVCacheManager is OWN
        assert type(make_engine(kind, is_async=is_async).kv_cache_manager) is OWN
    named = SchedulerConfig(
        max_model_len=64, is_encoder_decoder=False, scheduler_cls="kvcore_vllm.Scheduler"
    )
    assert named.get_scheduler_cls() is kvcore_vllm.Scheduler is not kvcore_vllm.AsyncScheduler


def test_the_plugin_does_nothing_unless_the_variable_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = tomllib.loads((ADAPTER / "pyproject.toml").read_text())["project"]["entry-points"]
    ((group, plugins),) = entry.items()
    assert group == "vllm.general_plugins"
    plugin = EntryPoint("kvcore", plugins["kvcore"], group).load()
    assert plugin is load
    for value in (None, "0"):
        if value is not None:
            monkeypatch.setenv("KVCORE_VLLM", value)
        plugin()
        assert place.KVCacheManager is OWN
    monkeypatch.setenv("KVCORE_VLLM", "yes")
    with pytest.raises(NotServed, match=r"^KVCORE_VLLM='yes' is neither 0 nor 1$"):
        plugin()
    monkeypatch.setenv("KVCORE_VLLM", "1")
    plugin()
    plugin()
    try:
        scheduler = make_engine(Scheduler)
        assert isinstance(scheduler.kv_cache_manager, KVCacheManager)
        assert run(scheduler, {"r": list(range(20))}) == {"r": 3}
    finally:
        kvcore_vllm.uninstall()
    assert place.KVCacheManager is OWN


def test_the_shadow_alone_installs_itself_unless_the_plugin_is_off(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("KVCORE_SHADOW", "1")
    monkeypatch.setenv("KVCORE_VLLM", "0")
    load()
    assert place.KVCacheManager is OWN
    monkeypatch.delenv("KVCORE_VLLM")
    load()
    try:
        managers = make_engine(Scheduler).kv_cache_manager
        assert isinstance(managers.kvcore, KVCacheManager)
    finally:
        kvcore_vllm.uninstall()
    assert place.KVCacheManager is OWN


def test_the_package_is_imported_without_vllm(tmp_path: Path) -> None:
    code = "import sys, kvcore_vllm; sys.exit('vllm' in sys.modules)"
    script = tmp_path / "script.py"
    script.write_text(code)
    assert subprocess.run([sys.executable, str(script)], check=False).returncode == 0


def test_a_second_install_and_an_uninstall_of_nothing_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(NotServed, match="is not installed: there is nothing to undo"):
        kvcore_vllm.uninstall()
    with kvcore_vllm.installed():
        with pytest.raises(NotServed, match=r"is installed: call uninstall\(\) first"):
            kvcore_vllm.install()
        with monkeypatch.context() as patch:
            patch.setattr(place, "KVCacheManager", object)
            with pytest.raises(NotServed, match="KVCacheManager was replaced after install"):
                kvcore_vllm.uninstall()
    assert place.KVCacheManager is OWN


def test_another_vllm_is_refused_in_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm, "__version__", "0.34.0")
    sentence = "^kvcore_vllm serves vLLM 0.33.0; this is 0.34.0$"
    for way_in in (kvcore_vllm.install, lambda: kvcore_vllm.Scheduler):
        with pytest.raises(NotServed, match=sentence):
            way_in()
    assert place.KVCacheManager is OWN


def test_the_release_is_as_pinned_and_a_difference_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert list(pinned.differences()) == []
    monkeypatch.setattr(OWN, "free", lambda self, name: (self, name))
    monkeypatch.setattr(OWN, "seize", lambda self: self, raising=False)
    with pytest.raises(NotServed) as refused:
        kvcore_vllm.install()
    where = "v1.core.kv_cache_manager.KVCacheManager"
    assert str(refused.value) == (
        f"this vLLM 0.33.0 is not as released: {where}.free took (self request), takes"
        f" (self name); {where}.seize is new, takes (self)"
    )


def test_a_field_that_is_gone_is_a_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    fields = {"v1.kv_cache_interface.KVCacheConfig": "num_blocks num_pages"}
    monkeypatch.setattr(pinned, "FIELDS", fields)
    assert list(pinned.differences()) == ["v1.kv_cache_interface.KVCacheConfig has no num_pages"]


@pytest.mark.parametrize(
    ("ours", "path"),
    [
        (KVCacheManager, "v1.core.kv_cache_manager.KVCacheManager"),
        (Blocks, "v1.core.kv_cache_manager.KVCacheBlocks"),
        (BlockPool, "v1.core.block_pool.BlockPool"),
        (Coordinator, "v1.core.kv_cache_coordinator.KVCacheCoordinator"),
    ],
)
def test_each_method_takes_what_the_release_gives_it(ours: Any, path: str) -> None:
    for name, parameters in pinned.PARAMETERS[path].items():
        method = getattr(ours, name, None)
        if name != "__init__" and inspect.isfunction(method):
            assert list(inspect.signature(method).parameters) == parameters.split(), name
        if path == pinned.WHOLE and name != "get_block_ids":
            assert method is not None, f"{name} is missing"
