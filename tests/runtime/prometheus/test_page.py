# SPDX-License-Identifier: Apache-2.0
"""docs/cluster/metrics.md names all metrics, and its programs run.

Their observer serves the reference engine.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from kvcore_runtime.engine.engine import Engine, EngineOptions
from kvcore_runtime.model.model import tiny_model
from kvcore_runtime.prometheus import Exporter
from kvcore_runtime.prometheus.names import METRICS

from kvcore import Config
from tests.conftest import Backend
from tests.runtime.model.questions import requests

prometheus = pytest.importorskip("prometheus_client", reason="prometheus-client is not installed")
PAGE = Path(__file__).parents[3] / "docs/cluster/metrics.md"


def test_the_programs_of_the_page_run(backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvcore.manager.default_backend", lambda: backend)
    programs = re.findall(
        r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL
    )
    assert len(programs) == 3
    page: dict[str, Any] = {"__name__": "__page__", "tracer": Mock()}
    exec(compile("\n".join(programs), PAGE.name, "exec"), page)
    options = EngineOptions(backend=backend, token_budget=64, on_span=page["on_span"])
    engine = Engine(tiny_model(invariant=True), Config(19), options, observe=page["observe"])
    registry = prometheus.CollectorRegistry()
    page["exporter"] = Exporter(engine.manager, registry=registry)
    taken = engine.manager.take_stats
    queries: list[int] = []

    def take_stats() -> Any:
        stats = taken()
        queries.append(stats.queries)
        return stats

    monkeypatch.setattr(engine.manager, "take_stats", take_stats)
    for request in requests():
        engine.add_request(request)
    while not engine.is_idle:
        engine.step()
    assert page["tracer"].start_span.call_args_list[0].args == ("kvcore.step",)
    assert page["tracer"].start_span.return_value.end.call_count == engine.metrics.num_steps
    values = registry.get_sample_value
    assert values("kvcore:prefix_queries_total") == sum(queries) > 0
    assert values("kvcore:requests_waiting") == 0
    evicted = values("kvcore:evicted_tokens_total")
    assert evicted == 16 * engine.metrics.num_evictions > 0


def test_the_table_of_the_page_names_all_metrics() -> None:
    rows = re.findall(r"^\| (`kvcore:.*)\|$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    columns = zip(*(row.split("|")[:3] for row in rows), strict=True)
    for (family, metrics), column in zip(METRICS.items(), columns, strict=True):
        named = {
            re.sub(r"^(\w+:)?", f"{family}:", each)
            for each in re.findall(r"`([^`{]+)[^`]*`", " ".join(column))
        }
        total = {"counter": "_total"}
        assert named == {each.name + total.get(each.kind, "") for each in metrics}
