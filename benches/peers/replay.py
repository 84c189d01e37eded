# SPDX-License-Identifier: Apache-2.0
"""Replay a list of operations through one peer, and measure its cost.

Uses the standard library only. CPU time of this thread is read twice per step. Objects that an
engine has anyway are made before the clock starts: prompts as the lists or buffers that a tokenizer
gives, the tokens of each step as a sampler gives them. The garbage collector is frozen once and
then runs, as in vLLM's engine. The first prefill of a request looks up; a hit that goes past the
chunk leaves one token to compute, so that every peer holds its hits from then on.
"""

from __future__ import annotations

import array
import gc
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from benches.peers.work import ADD, DECODE, FINISH, PREEMPT, PREFILL, Decode, Work

MEGABYTE = 1_000_000


class Peer(Protocol):
    """One block manager under the operations of the list. hits: tokens of each look-up."""

    hits: list[int]

    def add(self, request: int, prompt: Any) -> None:
        """Add a request."""

    def prefill(self, request: int, end: int) -> None:
        """Allocate up to `end`, after a look-up if the request holds nothing."""

    def decode(self, decode: Decode) -> None:
        """Append a token to each request."""

    def preempt(self, request: int) -> None:
        """Free the blocks, keep the tokens."""

    def finish(self, request: int) -> None:
        """Free the blocks and forget the request."""

    def end_step(self) -> None:
        """Hand the batch to the device."""


@dataclass(frozen=True)
class Maker:
    """Makes a peer. prompt: converts a prompt for it, before the clock starts."""

    make: Callable[[Work], Peer]
    prompt: Callable[[array.array[int]], Sequence[int]] = array.array.tolist


class Null:
    """A peer that does nothing, to measure the driver."""

    def __init__(self) -> None:
        self.hits: list[int] = []

    def add(self, request: int, prompt: Any) -> None:
        pass

    def prefill(self, request: int, end: int) -> None:
        pass

    def decode(self, decode: Decode) -> None:
        pass

    def preempt(self, request: int) -> None:
        pass

    def finish(self, request: int) -> None:
        pass

    def end_step(self) -> None:
        pass


def replay(maker: Maker, work: Work) -> dict[str, Any]:
    """Return the seconds of each step, hits, and the manager's megabytes before and after."""
    prompts = [maker.prompt(prompt) for prompt in work.prompts]
    gc.collect()
    bare = resident()
    peer = maker.make(work)
    gc.collect()
    made = resident()
    gc.freeze()
    steps = run(peer, work, prompts)
    gc.collect()
    return {
        "steps": steps,
        "hits": peer.hits,
        "memory": [made - bare, resident() - bare],
    }


def run(peer: Peer, work: Work, prompts: list[Sequence[int]]) -> list[float]:
    """Replay the whole list; returns the CPU seconds of each step."""
    decodes = work.decodes
    clock = time.thread_time
    times = []
    for step in work.steps:
        start = clock()
        for code, request, end in step:
            if code == DECODE:
                peer.decode(decodes[request])
            elif code == PREFILL:
                peer.prefill(request, end)
            elif code == ADD:
                peer.add(request, prompts[request])
            elif code == FINISH:
                peer.finish(request)
            elif code == PREEMPT:
                peer.preempt(request)
        peer.end_step()
        times.append(clock() - start)
    return times


def resident() -> float:
    """Return the resident megabytes of this process; 0 if the system does not report them."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        return 0.0
    return pages * os.sysconf("SC_PAGE_SIZE") / MEGABYTE
