# SPDX-License-Identifier: Apache-2.0
"""Exports the counts of one manager to Prometheus.

The engine's thread adds numbers; metrics are made of them when a scraper asks. A value that the
exporter was never given is absent there, not 0.
"""

from __future__ import annotations

import re
import threading
import time
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from kvcore import BlockObserver, KVCacheManager, PrefixCacheStats
from kvcore.types.commands import Batch
from kvcore_runtime.prometheus.block_counts import BlockCounts
from kvcore_runtime.prometheus.errors import InvalidLabel, InvalidNames, NamesTaken, load_client
from kvcore_runtime.prometheus.names import METRICS, Kind, Metric

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry
    from prometheus_client.core import Metric as Family

    from kvcore_runtime.far.exchange import FarExchange

Names = Literal["kvcore", "vllm", "sglang"]
BOUNDS = (
    *(0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0),
    *(10.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1200.0, 1800.0),
)
"""Upper bounds of the buckets of seconds: those of vLLM 0.33 for blocks."""

_LABEL = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]*")
_OWN_LABELS = {label for each in METRICS.values() for metric in each for label in metric.labels}


class _Seconds:
    """A histogram of seconds."""

    def __init__(self) -> None:
        self.counts = [0] * (len(BOUNDS) + 1)
        self.total = 0.0

    def add(self, seconds: Iterable[float]) -> None:
        for each in seconds:
            self.counts[bisect_left(BOUNDS, each)] += 1
            self.total += each

    def buckets(self) -> list[tuple[str, float]]:
        """Pair each upper bound with the number of values up to it."""
        pairs, num_so_far = [], 0
        for bound, count in zip((*map(str, BOUNDS), "+Inf"), self.counts, strict=True):
            num_so_far += count
            pairs.append((bound, float(num_so_far)))
        return pairs


class Exporter:
    """The metrics of one manager, in a registry of prometheus_client.

    manager: the exporter takes its statistics, so nothing else may call its `take_stats`. labels:
    of every metric, name to value; dashboards for vLLM expect `model_name` and `engine`. registry:
    of prometheus_client, its global one if None; one exporter per registry. names: the naming
    schemes of the metrics, any of "kvcore", "vllm" and "sglang". block_sample_rate: share of the
    blocks whose lifetimes are followed, 0.0 to 1.0. Above 0.0 every command of a batch becomes an
    object, since `BlockObserver` reads objects; 0.0 leaves these metrics out. Raises PackageMissing
    without prometheus-client, InvalidLabel, InvalidNames, NamesTaken, WrongArgument.
    """

    def __init__(
        self,
        manager: KVCacheManager,
        labels: Mapping[str, str] | None = None,
        registry: CollectorRegistry | None = None,
        names: Sequence[Names] = ("kvcore",),
        *,
        block_sample_rate: float = 0.0,
    ) -> None:
        client = load_client()
        self._families: dict[Kind, Any] = {
            "gauge": client.core.GaugeMetricFamily,
            "counter": client.core.CounterMetricFamily,
            "histogram": client.core.HistogramMetricFamily,
        }
        self._metrics = _metrics(names)
        self._labels = _read_labels(labels or {})
        self._manager = manager
        self._observer = BlockObserver(block_sample_rate) if block_sample_rate != 0.0 else None
        self._blocks = BlockCounts(manager)
        self._lock = threading.Lock()
        self._values: dict[str, int | float] = dict.fromkeys(("queries", "hits"), 0)
        self._tables: dict[str, dict[tuple[str, ...], int | float]] = {}
        self._seconds = {name: _Seconds() for name in ("lifetime", "idle", "reuse_gap")}
        self.registry: CollectorRegistry = client.REGISTRY if registry is None else registry
        try:
            self.registry.register(self)
        except ValueError as error:
            raise NamesTaken(reason=str(error)) from None

    def update(
        self,
        batch: Batch,
        *,
        num_running: int | None = None,
        num_waiting: int | None = None,
        num_preempted: int | None = None,
        far: FarExchange | None = None,
    ) -> PrefixCacheStats:
        """Add one step, after `take_batch`. O(commands of the batch); never waits for a scraper.

        batch: the one just taken; every batch must be passed, in order. num_running, num_waiting:
        requests at present. num_preempted: requests that this step preempted. far: the engine's
        exchange. Takes and returns the manager's statistics of look-ups.
        """
        stats = self._manager.take_stats()
        with self._lock:
            self._values["queries"] += stats.queries
            self._values["hits"] += stats.hits
            for name, count in (("running", num_running), ("waiting", num_waiting)):
                if count is not None:
                    self._values[name] = count
            if num_preempted is not None:
                self._values["preemptions"] = self._values.get("preemptions", 0) + num_preempted
            self._blocks.update(batch)
            if far is not None:
                self._note_far(far)
            if self._observer is not None:
                self._note_lives(self._observer, batch)
        return stats

    def rest(self, far: FarExchange | None = None) -> None:
        """Show that no request runs or waits, once the engine has become idle.

        Until then the metrics show the last step, in which the last requests still had blocks.
        Walks the pool. far: the engine's exchange, which may have stored pages since.
        """
        with self._lock:
            self._values |= dict.fromkeys({"running", "waiting"} & self._values.keys(), 0)
            self._blocks.rest()
            if far is not None:
                self._note_far(far)

    def close(self) -> None:
        """Remove the metrics from the registry. A second call does nothing."""
        try:
            self.registry.unregister(self)
        except KeyError:
            return

    def collect(self) -> Iterator[Family]:
        """Yield the metrics as they are now, for the registry."""
        with self._lock:
            values = self._values | self._block_values()
            tables = dict(self._tables)
            seconds = {name: (each.buckets(), each.total) for name, each in self._seconds.items()}
        if self._observer is None:
            seconds = {}
        names, label_values = list(self._labels), list(self._labels.values())
        for metric in self._metrics:
            family = self._families[metric.kind](
                metric.name, metric.help, labels=[*names, *metric.labels]
            )
            for part, own in metric.parts:
                if part in values:
                    family.add_metric([*label_values, *own], values[part])
                elif part in seconds:
                    buckets, total = seconds[part]
                    family.add_metric([*label_values, *own], buckets, sum_value=total)
            for own, value in tables.get(metric.table or "", {}).items():
                family.add_metric([*label_values, *own], value)
            if family.samples:
                yield family

    def describe(self) -> Iterator[Family]:
        """Yield the names of all metrics for the registry, including those without a value yet."""
        for metric in self._metrics:
            yield self._families[metric.kind](metric.name, metric.help)

    def _block_values(self) -> dict[str, int | float]:
        states = self._blocks.states()
        config = self._manager.config
        counts = {"used": states.used, "cached": states.cached, "free": states.free}
        sizes = {group.block_size for group in config.groups}
        size = sizes.pop()
        tokens = {} if sizes else {f"{name}_tokens": size * n for name, n in counts.items()}
        in_use = states.used + states.quarantined
        return {
            **counts,
            **tokens,
            "quarantined": states.quarantined,
            "usage": in_use / config.num_usable_blocks,
            "evicted_tokens": self._blocks.num_evicted_tokens,
        }

    def _note_far(self, far: FarExchange) -> None:
        counts, sizes = far.counts, {group.block_size for group in self._manager.config.groups}
        self._values["far_queries"] = counts.num_queried
        self._values["far_hits"] = counts.num_hits
        self._values["far_up"] = int(far.is_up)
        if len(sizes) == 1:
            self._values["far_stored"] = counts.num_stored * sizes.pop()
        self._tables["far_pages"] = {
            (op, end): number for (op, end), number in counts.pages.items()
        }
        self._tables["far_seconds"] = {(name,): total for name, total in counts.seconds.items()}
        self._tables["far_dropped"] = {(why,): number for why, number in counts.dropped.items()}

    def _note_lives(self, observer: BlockObserver, batch: Batch) -> None:
        observer.observe(batch, time.monotonic())
        for life in observer.take_lives():
            self._seconds["lifetime"].add([life.seconds])
            self._seconds["idle"].add([life.idle_seconds])
            self._seconds["reuse_gap"].add(life.reuse_gaps)


def _metrics(names: Sequence[Names]) -> list[Metric]:
    if isinstance(names, str) or not names or not set(names) <= METRICS.keys():
        raise InvalidNames(names=names, known=list(METRICS))
    return [metric for name in dict.fromkeys(names) for metric in METRICS[name]]


def _read_labels(labels: Mapping[str, str]) -> dict[str, str]:
    for name, value in labels.items():
        if not isinstance(name, str) or not _LABEL.fullmatch(name) or name.startswith("__"):
            raise InvalidLabel(name=name, reason="expected letters, digits and underscores")
        if name in _OWN_LABELS or name == "le":
            raise InvalidLabel(name=name, reason="a metric has a label of this name")
        if not isinstance(value, str):
            raise InvalidLabel(name=name, reason=f"its value is {value!r}, expected text")
    return dict(labels)
