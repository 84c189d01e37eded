# SPDX-License-Identifier: Apache-2.0
"""One rank of engines with a far tier, in a process of its own.

All ranks keep their slices in the folder `pages`. Stories: `whole` answers all requests, `one` the
first. In the others rank 1 is hurt: `dies` as soon as it has read pages, `late` reads none until
the request was answered, `apart` has no tier, `few` has fewer slots than rank 0, `refuses` carries
out no order to load.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import attrs
import torch
from kvcore_runtime.engine.engine import Engine, EngineOptions
from kvcore_runtime.engine.sequence import GenerationRequest
from kvcore_runtime.far.directory import DirectoryStore
from kvcore_runtime.far.threaded import ThreadedTier
from kvcore_runtime.model.model import tiny_model
from kvcore_runtime.model.sampling import Sampling
from kvcore_runtime.ranks import Leader, RankExchange, RankFollower, connect, shard
from kvcore_runtime.ranks.errors import BadStep
from kvcore_runtime.ranks.step_wire import RankOrder

from kvcore import Config
from kvcore.far.options import FarOptions
from kvcore.far.tier import FarStatus, View

CONFIG = Config(40, 16, hash_seed=b"ranks")
OPTIONS = EngineOptions(token_budget=64, max_sequences=12, guard=True)
FAR = FarOptions(staging_pages=24, min_fetch_tokens=16, fetch_timeout_s=30, store_timeout_s=30)
LATE = attrs.evolve(FAR, fetch_timeout_s=0.5)
WAIT_S = 15.0


def model_requests() -> list[GenerationRequest]:
    """Make four greedy prompts; the first has 70 tokens, of which 64 are in four full blocks."""
    return [
        GenerationRequest(
            request_id=f"r{number}",
            prompt=tuple((b"%d, " % number + b"parrots of this ship " * 5)[: 70 + 9 * number]),
            sampling=Sampling(temperature=0.0, max_tokens=6),
        )
        for number in range(4)
    ]


class HurtStore(DirectoryStore):
    """The store of a rank that is hurt while it reads pages."""

    def __init__(self, folder: Path, story: str) -> None:
        super().__init__(folder / "pages")
        self._folder, self._story = folder, story

    def get(self, names: Sequence[str], views: Sequence[View]) -> list[int | FarStatus]:
        got = super().get(names, views)
        if self._story == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        while self._story == "late" and not (self._folder / "answered").exists():
            time.sleep(0.01)
        return got


def refuse(ticket: int, orders: Sequence[RankOrder]) -> None:
    raise BadStep(reason=f"ticket {ticket} of {len(orders)} pages is not wanted")


def run(folder: Path, rank: int, world: int, story: str) -> None:
    """Be one rank in this process, which may be a fork of the tests' process."""
    sys.stderr = (folder / f"errors{rank}").open("w")
    logging.getLogger("kvcore_runtime").addHandler(logging.StreamHandler())
    with ThreadPoolExecutor(1) as thread:  # a new thread has no threads of torch from before a fork
        thread.submit(_be, folder, rank, world, story).result()


def _be(folder: Path, rank: int, world: int, story: str) -> None:
    torch.set_num_threads(1)
    links = connect(rank, world, f"file://{folder}/meet", timeout_s=WAIT_S)
    model = shard(tiny_model(), rank, world, links.reduce)
    if rank:
        far = attrs.evolve(FAR, staging_pages=9) if story == "few" else FAR
        tier = None if story == "apart" else ThreadedTier(HurtStore(folder, story))
        follower = RankFollower(model, CONFIG, OPTIONS, links, tier=tier, far=far)
        if story == "refuses":
            assert follower._pages is not None
            follower._pages._submit = refuse  # type: ignore[method-assign] # told to
        follower.run()
        return
    tier = ThreadedTier(DirectoryStore(folder / "pages"))
    options = LATE if story == "late" else FAR
    engine = Engine(
        model, CONFIG, OPTIONS, exchange=lambda own: RankExchange(own, tier, links, options)
    )
    assert isinstance(engine.exchange, RankExchange)
    with Leader(engine, links):
        requests = model_requests() if story == "whole" else model_requests()[:1]
        answers: dict[str, tuple[int, ...]] = {}
        for request in requests:  # one after another, so that later ones meet stored blocks
            engine.add_request(request)
            while not engine.is_idle:
                answers |= {each.request_id: each.tokens for each in engine.step()}
                engine.exchange.check()
        num_loaded = engine.exchange.counts.num_loaded
        (folder / "answered").touch()
        assert engine.exchange.flush(WAIT_S)
        end = time.monotonic() + WAIT_S
        while engine.exchange.staging.used and time.monotonic() < end:
            engine.exchange.flush(0.0)
        assert not engine.exchange.staging.used
    engine.exchange.close()
    torch.save((answers, num_loaded, engine.exchange.counts.num_stored), folder / "answers.pt")
