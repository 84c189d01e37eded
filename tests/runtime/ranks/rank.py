# SPDX-License-Identifier: Apache-2.0
"""One rank of the tests' engines, in a process of its own.

Writes what it reports and its final state into a folder. Stories: `whole` answers all requests;
`endless` goes on until something is wrong; `small` has followers whose cache lacks blocks.
"""

from __future__ import annotations

import logging
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import attrs
import torch
from kvcore_runtime.engine.engine import Engine, EngineOptions
from kvcore_runtime.engine.sequence import GenerationRequest
from kvcore_runtime.model.model import tiny_config, tiny_model
from kvcore_runtime.model.sampling import Sampling
from kvcore_runtime.ranks import Leader, RankFollower, connect, pad_heads, shard

from kvcore import Config

CONFIG = Config(14, 16, num_host_blocks=20, hash_seed=b"ranks")
OPTIONS = EngineOptions(token_budget=64, max_sequences=12, guard=True)
SHAPE = attrs.evolve(tiny_config(), intermediate_size=132)  # divides by 2 and by 3
TIMEOUT_S = 15.0
SYSTEM = b"You are the parrot of this ship. "


def model_requests() -> list[GenerationRequest]:
    """Make sixteen greedy prompts of three beginnings; some ask for two samples."""
    return [
        GenerationRequest(
            request_id=f"r{number}",
            prompt=tuple(SYSTEM[number % 3 :] + b"Say %d words!" % (number // 3)),
            sampling=Sampling(temperature=0.0, max_tokens=6 + number),
            num_samples=1 + number % 2,
        )
        for number in range(16)
    ]


def run(folder: Path, rank: int, world: int, story: str) -> None:
    """Be one rank in this process, which may be a fork of the tests' process."""
    sys.stderr = (folder / f"errors{rank}").open("w")
    logging.getLogger("kvcore_runtime").addHandler(logging.StreamHandler())
    with ThreadPoolExecutor(1) as thread:  # a new thread has no threads of torch from before a fork
        thread.submit(_follow, folder, rank, world, story).result()


def _follow(folder: Path, rank: int, world: int, story: str) -> None:
    """Be one rank until the end of its story."""
    torch.set_num_threads(1)
    links = connect(rank, world, f"file://{folder}/meet", timeout_s=TIMEOUT_S)
    whole = pad_heads(tiny_model(config=SHAPE), world)
    model = shard(whole, rank, world, links.reduce)
    (folder / f"ready{rank}").touch()
    if rank:
        config = attrs.evolve(CONFIG, num_blocks=9) if story == "small" else CONFIG
        follower = RankFollower(model, config, OPTIONS, links)
        follower.run()
        torch.save(follower.runtime.tables.blocks, folder / f"tables{rank}.pt")
        return
    spans: Counter[str] = Counter()
    options = attrs.evolve(OPTIONS, on_span=lambda name, *_: spans.update([name]))
    engine = Engine(model, CONFIG, options)
    with Leader(engine, links) as leader:
        answers: dict[str, tuple[int, ...]] = {}
        number = 0
        while story == "endless" or not number:
            for request in model_requests()[: 4 if story == "endless" else None]:
                engine.add_request(
                    attrs.evolve(request, request_id=f"{number}.{request.request_id}")
                )
            answers |= {f"{each.request_id}#{each.sample}": each.tokens for each in engine.run()}
            number += 1
            (folder / "running").touch()
        metrics = engine.metrics
        counts = (metrics.num_blocks_out, metrics.num_copies, metrics.num_evictions)
        reported = leader.num_steps, leader.num_bytes, dict(spans)
    torch.save((answers, counts, reported), folder / "answers.pt")
    torch.save(engine.runtime.tables.blocks, folder / "tables0.pt")
