# SPDX-License-Identifier: Apache-2.0
"""Metrics as a scraper reads them, over HTTP, against counts that the test makes itself."""

from __future__ import annotations

import importlib
import json
import re
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
from kvcore_runtime.errors import PackageMissing
from kvcore_runtime.prometheus import Exporter
from kvcore_runtime.prometheus.errors import InvalidLabel, InvalidNames, NamesTaken
from kvcore_runtime.prometheus.exporter import Names

from kvcore import Config, Group, KVCacheManager, Request
from kvcore.far.options import FarCounts
from kvcore.types.errors import WrongArgument
from tests.conftest import Backend

prometheus = pytest.importorskip("prometheus_client", reason="prometheus-client is not installed")
parser = importlib.import_module("prometheus_client.parser")
DASHBOARD = Path(__file__).parents[3] / "examples/grafana/kvcore.json"
LABELS = {"model_name": "tiny", "engine": "0"}
SIZE, USABLE = 4, 6
ALL: tuple[Names, ...] = get_args(Names)

Scrape = dict[tuple[str, str], float]


@pytest.fixture
def registry() -> Any:
    return prometheus.CollectorRegistry()


def scrape(registry: Any) -> Scrape:
    """Return the scraped metrics: name and the value of the metric's own label -> value."""
    server, thread = prometheus.start_http_server(0, addr="127.0.0.1", registry=registry)
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{server.server_port}/metrics") as answer:
            text = answer.read().decode()
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
    found: Scrape = {}
    for family in parser.text_string_to_metric_families(text):
        for sample in family.samples:
            labels = dict(sample.labels)
            assert {name: labels.pop(name) for name in LABELS} == LABELS
            found[sample.name, " ".join(labels.values())] = sample.value
    return found


def make(backend: Backend, registry: Any, **options: Any) -> tuple[KVCacheManager, Exporter]:
    manager = KVCacheManager(Config(num_blocks=USABLE + 1, block_size=SIZE), backend)
    return manager, Exporter(manager, LABELS, registry, ALL, **options)


def serve(manager: KVCacheManager, name: str, tokens: range) -> None:
    manager.add_request(Request(name, tokens))
    hit = manager.get_computed_blocks(name)
    assert manager.allocate_slots(name, len(tokens) - hit.num_tokens, hit)


def test_every_name_is_scraped_with_its_value(backend: Backend, registry: Any) -> None:
    manager, exporter = make(backend, registry, block_sample_rate=1.0)
    serve(manager, "a", range(10))  # 3 blocks, 2 of them full
    exporter.update(manager.take_batch(), num_running=1, num_waiting=2, num_preempted=0)
    serve(manager, "b", range(13))  # 4 blocks, 2 of them a's
    stats = exporter.update(manager.take_batch(), num_running=2, num_waiting=1, num_preempted=0)
    assert (stats.queries, stats.hits) == (13, 8)
    manager.free("b")
    exporter.update(manager.take_batch(), num_running=1, num_waiting=2, num_preempted=1)
    blocks = {"used": 3.0, "cached": 1.0, "free": 2.0, "quarantined": 0.0}
    assert without_seconds(scrape(registry)) == {
        ("kvcore:usage_ratio", ""): 0.5,
        **{("kvcore:blocks", state): count for state, count in blocks.items()},
        ("kvcore:prefix_queries_total", ""): 23.0,
        ("kvcore:prefix_hits_total", ""): 8.0,
        ("kvcore:requests_running", ""): 1.0,
        ("kvcore:requests_waiting", ""): 2.0,
        ("kvcore:preemptions_total", ""): 1.0,
        ("kvcore:evicted_tokens_total", ""): 0.0,
        ("vllm:kv_cache_usage_perc", ""): 0.5,
        ("vllm:prefix_cache_queries_total", ""): 23.0,
        ("vllm:prefix_cache_hits_total", ""): 8.0,
        ("vllm:num_requests_running", ""): 1.0,
        ("vllm:num_requests_waiting", ""): 2.0,
        ("vllm:num_preemptions_total", ""): 1.0,
        ("sglang:token_usage", ""): 0.5,
        ("sglang:cached_tokens_total", "device"): 8.0,
        ("sglang:num_running_reqs", ""): 1.0,
        ("sglang:num_queue_reqs", ""): 2.0,
        ("sglang:num_retracted_requests_total", ""): 1.0,
        ("sglang:evicted_tokens_total", ""): 0.0,
        ("sglang:kv_used_tokens", ""): 12.0,
        ("sglang:kv_evictable_tokens", ""): 4.0,
        ("sglang:kv_available_tokens", ""): 8.0,
    }


def test_an_idle_engine_has_no_running_request_and_no_used_block(
    backend: Backend, registry: Any
) -> None:
    manager, exporter = make(backend, registry)
    serve(manager, "a", range(10))
    exporter.update(manager.take_batch(), num_running=1)
    manager.free("a")
    assert scrape(registry)["kvcore:blocks", "used"] == 3, "as the last step left it"
    exporter.rest()
    found = scrape(registry)
    states = {name: found["kvcore:blocks", name] for name in ("used", "cached", "free")}
    assert states == {"used": 0, "cached": 2, "free": 4}
    assert (found["kvcore:usage_ratio", ""], found["kvcore:requests_running", ""]) == (0, 0)
    assert ("kvcore:requests_waiting", "") not in found, "nobody has told it"
    serve(manager, "b", range(100, 100 + SIZE * USABLE))
    exporter.update(manager.take_batch(), num_running=1)
    found = scrape(registry)
    assert found["kvcore:blocks", "used"] == USABLE
    assert found["kvcore:evicted_tokens_total", ""] == 2 * SIZE


def without_seconds(found: Scrape) -> Scrape:
    """Return the lines without the histograms."""
    return {key: value for key, value in found.items() if "seconds" not in key[0]}


def test_lives_of_blocks_are_histograms(registry: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    manager, exporter = make("python", registry, block_sample_rate=1.0)
    clock = iter((1.0, 1.5, 4.0))
    monkeypatch.setattr("kvcore_runtime.prometheus.exporter.time.monotonic", lambda: next(clock))
    serve(manager, "a", range(SIZE * USABLE))
    exporter.update(manager.take_batch())  # at 1.0 all blocks are allocated
    manager.free("a")
    exporter.update(manager.take_batch())  # at 1.5 they are free
    serve(manager, "b", range(100, 100 + SIZE * USABLE))
    exporter.update(manager.take_batch())  # at 4.0 all are evicted
    found = scrape(registry)
    for prefix in ("kvcore:", "vllm:kv_"):
        assert found[f"{prefix}block_lifetime_seconds_count", ""] == USABLE
        assert found[f"{prefix}block_lifetime_seconds_sum", ""] == USABLE * 3.0
        assert found[f"{prefix}block_lifetime_seconds_bucket", "2.0"] == 0
        assert found[f"{prefix}block_lifetime_seconds_bucket", "5.0"] == USABLE
        assert found[f"{prefix}block_idle_before_evict_seconds_sum", ""] == USABLE * 2.5
        assert found[f"{prefix}block_reuse_gap_seconds_count", ""] == 0
    assert found["kvcore:evicted_tokens_total", ""] == SIZE * USABLE


def test_what_was_never_told_is_absent(backend: Backend, registry: Any) -> None:
    manager, exporter = make(backend, registry)
    exporter.update(manager.take_batch())
    names = {name for name, _ in scrape(registry)}
    assert not [name for name in names if "seconds" in name or "created" in name]
    for absent in ("requests_running", "requests_waiting", "preemptions_total"):
        assert f"kvcore:{absent}" not in names
    assert "kvcore:prefix_hits_total" in names


class Far:
    """The part of an exchange with a far tier that the exporter reads."""

    is_up = False

    def __init__(self) -> None:
        self.counts = FarCounts(num_queried=96, num_hits=64)
        self.counts.pages.update({("store", "ok"): 3, ("load", "ok"): 4, ("load", "damaged"): 1})
        self.counts.dropped["busy"] = 2
        self.counts.seconds["load"] = 0.25


def test_a_far_tier_is_scraped(registry: Any) -> None:
    manager, exporter = make("python", registry)
    far: Any = Far()
    exporter.update(manager.take_batch(), far=far)
    found = {key: value for key, value in scrape(registry).items() if is_far(*key)}
    assert found == {
        ("kvcore:far_queries_total", ""): 96,
        ("kvcore:far_hits_total", ""): 64,
        ("kvcore:far_up", ""): 0,
        ("kvcore:far_pages_total", "store ok"): 3,
        ("kvcore:far_pages_total", "load ok"): 4,
        ("kvcore:far_pages_total", "load damaged"): 1,
        ("kvcore:far_seconds_total", "find"): 0,
        ("kvcore:far_seconds_total", "load"): 0.25,
        ("kvcore:far_seconds_total", "store"): 0,
        ("kvcore:far_dropped_total", "busy"): 2,
        ("vllm:external_prefix_cache_queries_total", ""): 96,
        ("vllm:external_prefix_cache_hits_total", ""): 64,
        ("sglang:cached_tokens_total", "storage"): 64,
        ("sglang:prefetched_tokens_total", ""): 64,
        ("sglang:backuped_tokens_total", ""): 3 * SIZE,
    }


def is_far(name: str, label: str) -> bool:
    words = ("far_", "external", "prefetched", "backuped")
    return label == "storage" or any(each in name for each in words)


def test_groups_of_several_sizes_have_no_tokens_by_state(registry: Any) -> None:
    config = Config(num_blocks=9, groups=(Group(4), Group(8)))
    Exporter(KVCacheManager(config), LABELS, registry, ALL)
    names = {name for name, _ in scrape(registry)}
    assert "sglang:kv_used_tokens" not in names
    assert "kvcore:blocks" in names


def test_every_query_of_the_dashboard_names_a_metric(registry: Any) -> None:
    manager, exporter = make("python", registry, block_sample_rate=1.0)
    far: Any = Far()
    exporter.update(manager.take_batch(), num_running=0, num_waiting=0, num_preempted=0, far=far)
    exported = {name for name, _ in scrape(registry)}
    queries = list(expressions(json.loads(DASHBOARD.read_text())))
    assert len(queries) >= 8
    for query in queries:
        named = re.findall(r"kvcore:[a-z_]+", query)
        assert named, query
        assert set(named) <= exported, query


def expressions(value: Any) -> Iterator[str]:
    """Yield the queries of a dashboard, wherever they stand in it."""
    if isinstance(value, dict):
        if value.get("type") != "datasource":
            yield from (each for key, each in value.items() if key in ("expr", "query"))
        for each in value.values():
            yield from expressions(each)
    elif isinstance(value, list):
        for each in value:
            yield from expressions(each)


def test_one_exporter_per_registry_and_none_after_its_close(registry: Any) -> None:
    manager, exporter = make("python", registry)
    with pytest.raises(NamesTaken, match="kvcore:usage_ratio"):
        Exporter(manager, LABELS, registry)
    exporter.close()
    exporter.close()
    assert scrape(registry) == {}
    Exporter(manager, LABELS, registry)


@pytest.mark.parametrize(
    ("labels", "reason"),
    [
        ({"model-name": "m"}, "letters, digits and underscores"),
        ({"__name__": "m"}, "letters, digits and underscores"),
        ({"state": "m"}, "has a label of this name"),
        ({"le": "m"}, "has a label of this name"),
        ({"engine": 0}, "its value is 0, expected text"),
    ],
)
def test_labels_are_checked(labels: dict[str, Any], reason: str, registry: Any) -> None:
    with pytest.raises(InvalidLabel, match=reason):
        Exporter(KVCacheManager(Config(4)), labels, registry)


def test_misuse_changes_nothing(registry: Any) -> None:
    manager = KVCacheManager(Config(4))
    names: Any
    for names in ("kvcore", (), ("trt",)):
        with pytest.raises(InvalidNames, match="kvcore"):
            Exporter(manager, LABELS, registry, names)
    with pytest.raises(WrongArgument, match="sample_rate"):
        Exporter(manager, LABELS, registry, block_sample_rate=2.0)
    assert scrape(registry) == {}


def test_without_the_package_one_sentence_says_how_to_get_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    module = importlib.import_module("kvcore_runtime.prometheus.exporter")
    with pytest.raises(PackageMissing, match=r"pip install 'kvcore-runtime\[prometheus\]'"):
        module.Exporter(KVCacheManager(Config(4)))
