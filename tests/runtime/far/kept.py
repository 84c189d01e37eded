# SPDX-License-Identifier: Apache-2.0
"""Engines that keep their blocks in a directory."""

from pathlib import Path

from kvcore_runtime.engine.engine import Engine
from kvcore_runtime.engine.exchange import Exchange
from kvcore_runtime.far.directory import DirectoryStore
from kvcore_runtime.far.exchange import FarExchange
from kvcore_runtime.far.threaded import ThreadedTier

from kvcore.far.options import FarCounts, FarOptions
from kvcore.far.tier import BlockingStore

OPTIONS = FarOptions(min_fetch_tokens=1, fetch_timeout_s=30, store_timeout_s=30, weights="tiny")


def keep_in(path: Path, engine: Engine) -> Exchange:
    return keep(DirectoryStore(path), engine)


def keep(store: BlockingStore, engine: Engine) -> FarExchange:
    return FarExchange(engine, ThreadedTier(store), OPTIONS)


def settled(engine: Engine) -> FarCounts:
    """Return the counts of an engine whose tier has answered, and is closed."""
    assert isinstance(engine.exchange, FarExchange)
    assert engine.exchange.flush(30)
    engine.exchange.check()
    assert not engine.exchange.staging.used
    engine.exchange.close()
    return engine.exchange.counts
