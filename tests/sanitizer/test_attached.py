# SPDX-License-Identifier: Apache-2.0
"""A sanitizer in a serving engine: what the environment says is done, and the engine goes on."""

from __future__ import annotations

import importlib
import logging
import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from kvcore.sanitizer import AdapterError, CacheGroup, Finding, Sanitizer
from kvcore.sanitizer.attached import Guard, WrongKv

Log = pytest.LogCaptureFixture
Patch = pytest.MonkeyPatch


def make() -> Sanitizer:
    """Return a sanitizer with one request, whose block is not written."""
    sanitizer = Sanitizer([CacheGroup(block_size=2)], 8)
    sanitizer.begin("r0", [1, 2, 3])
    sanitizer.extend("r0", 0, [3, 4])
    return sanitizer


def read_unwritten(sanitizer: Sanitizer) -> list[Finding]:
    return sanitizer.step(0, ["r0"], [2], [1])


def contradict(sanitizer: Sanitizer) -> None:
    sanitizer.begin("r0", [1])


def look_up(_: Sanitizer) -> None:
    raise KeyError("r7")


def double_free(sanitizer: Sanitizer) -> None:
    sanitizer.release(3)
    sanitizer.release(3)


def messages(caplog: Log) -> list[tuple[int, str]]:
    return [(each.levelno, each.getMessage().partition(":")[0]) for each in caplog.records]


def test_a_guard_that_is_off_makes_no_sanitizer(monkeypatch: Patch, caplog: Log) -> None:
    monkeypatch.setenv("KVCORE_SANITIZER", "off")
    guard = Guard(make)
    assert guard.sanitizer is None
    assert guard.observe(read_unwritten) == []
    guard.report([])
    assert caplog.records == []


def test_a_finding_is_logged_and_raised_if_the_environment_says_so(
    monkeypatch: Patch, caplog: Log
) -> None:
    for mode in (None, "log", "raise"):
        monkeypatch.delenv("KVCORE_SANITIZER", raising=False)
        if mode is not None:
            monkeypatch.setenv("KVCORE_SANITIZER", mode)
        guard = Guard(make)
        found = guard.observe(read_unwritten)
        caplog.clear()
        if mode == "raise":
            with pytest.raises(WrongKv) as error:
                guard.report(found)
            assert error.value.finding == found[0]
        else:
            guard.report(found)
        assert messages(caplog) == [(logging.ERROR, "unwritten-read")]


@pytest.mark.parametrize(("wrong", "kind"), [(contradict, AdapterError), (look_up, KeyError)])
def test_an_adapter_that_errs_switches_its_sanitizer_off(
    wrong: Any, kind: type[Exception], monkeypatch: Patch, caplog: Log
) -> None:
    monkeypatch.setenv("KVCORE_SANITIZER", "raise")
    guard = Guard(make)
    with pytest.raises(kind) as error:
        wrong(make())
    assert guard.observe(wrong) == []
    assert guard.sanitizer is None
    assert guard.observe(read_unwritten) == []
    guard.report([])
    [line] = [each.getMessage() for each in caplog.records]
    assert line == f"the sanitizer is off from here on: {kind.__name__}: {error.value}"


def test_a_suspicion_is_logged_once(caplog: Log) -> None:
    guard = Guard(make)
    guard.observe(double_free)
    guard.report([])
    guard.report([])
    assert messages(caplog) == [(logging.WARNING, "double-free")]


class Scheduler:
    """The parts of vLLM's scheduler that the watched one goes on from."""

    def __init__(self) -> None:
        self.requests: dict[str, Any] = {}
        self.connector = None
        group = SimpleNamespace(kv_cache_spec=Attention())
        self.kv_cache_config = SimpleNamespace(kv_cache_groups=[group], num_blocks=8)

    def add_request(self, request: Any) -> None:
        if request.request_id in self.requests:
            self.requests[request.request_id]._all_token_ids += request._all_token_ids
        else:
            self.requests[request.request_id] = request

    def update_from_output(self, planned: Any, _: Any) -> Any:
        return planned


class Attention:
    block_size = 2


@pytest.fixture
def vllm(monkeypatch: Patch) -> Iterator[Any]:
    """Yield the adapter over the scheduler above."""
    names: dict[str, dict[str, Any]] = {
        "vllm": {"__version__": "0.33.0"},
        "vllm.v1.core.sched.async_scheduler": {"AsyncScheduler": Scheduler},
        "vllm.v1.core.sched.scheduler": {"Scheduler": Scheduler},
        "vllm.v1.kv_cache_interface": {
            "FullAttentionSpec": Attention,
            "MambaSpec": type("MambaSpec", (), {}),
            "SlidingWindowSpec": type("SlidingWindowSpec", (), {}),
        },
    }
    parents = {name.rpartition(".")[0] for name in names} | {"vllm.v1", "vllm.v1.core"}
    for name in sorted(parents - {""} | names.keys()):
        module = ModuleType(name)
        module.__path__ = []
        vars(module).update(names.get(name, {}))
        monkeypatch.setitem(sys.modules, name, module)
    before = sys.modules.pop("kvcore.sanitizer.engines.vllm.scheduler", None)
    yield importlib.import_module("kvcore.sanitizer.engines.vllm.scheduler")
    del sys.modules["kvcore.sanitizer.engines.vllm.scheduler"]
    if before is not None:
        sys.modules["kvcore.sanitizer.engines.vllm.scheduler"] = before


def requested(tokens: list[int]) -> Any:
    """Return a request of vLLM's, or the next part of its prompt."""
    empty: dict[str, Any] = {"lora_request": None, "cache_salt": None, "prompt_embeds": None}
    return SimpleNamespace(request_id="r0", _all_token_ids=tokens, mm_features=[], **empty)


def planned(start: int, count: int, *blocks: int) -> Any:
    """Return a scheduler's output that makes a request run."""
    new = SimpleNamespace(req_id="r0", block_ids=[list(blocks)], num_computed_tokens=start)
    cached = SimpleNamespace(
        new_block_ids=[], resumed_req_ids=(), req_ids=[], num_computed_tokens=[]
    )
    return SimpleNamespace(
        finished_req_ids=(),
        preempted_req_ids=(),
        new_block_ids_to_zero=(),
        kv_cache_block_copies=(),
        scheduled_new_reqs=[new],
        scheduled_cached_reqs=cached,
        num_scheduled_tokens={"r0": count},
        scheduled_spec_decode_tokens={},
    )


def test_a_scheduler_that_is_off_keeps_no_requests(vllm: Any, monkeypatch: Patch) -> None:
    monkeypatch.setenv("KVCORE_SANITIZER", "off")
    scheduler = vllm.Scheduler()
    scheduler.add_request(requested([1, 2, 3]))
    assert scheduler._arrived == {}


def test_a_scheduler_that_goes_off_forgets_its_requests(vllm: Any) -> None:
    scheduler = vllm.Scheduler()
    scheduler.add_request(requested([1, 2, 3]))
    assert scheduler._arrived.keys() == {"r0"}
    scheduler.update_from_output(planned(0, 3, 3, 99), None)
    assert scheduler._guard.sanitizer is None
    scheduler.add_request(requested([4]))
    scheduler.add_request(SimpleNamespace(request_id="r1"))
    assert scheduler._arrived == {}


def test_the_parts_of_a_streamed_prompt_are_one_request(vllm: Any, monkeypatch: Patch) -> None:
    monkeypatch.setenv("KVCORE_SANITIZER", "raise")
    scheduler = vllm.Scheduler()
    scheduler.add_request(requested([1, 2, 3]))
    scheduler.add_request(requested([4]))
    scheduler.update_from_output(planned(0, 4, 3, 4), None)
    assert list(scheduler._guard.sanitizer._names.live["r0"].tokens) == [1, 2, 3, 4]
    scheduler.add_request(requested([5]))
    scheduler.update_from_output(planned(4, 1, 3, 4, 5), None)
    assert scheduler._arrived == {}
    assert scheduler._guard.sanitizer.findings == []
