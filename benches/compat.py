# SPDX-License-Identifier: Apache-2.0
"""Measure what a call of `kvcore.compat` costs over the equivalent calls of the core.

Run: python -m benches.compat [--running 256] [--rounds 15]. Both do the same work in turn; the time
is CPU time of this thread, the least of the rounds. Requests are objects as vLLM's, with their own
hashes or without. In the rows with a star nothing is read but an id, counts and the token that is
new; what those cost over the core is compared with MOST. Adapters decode by `append`, which is
`allocate_slots(request, 1)` without its other arguments.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections.abc import Callable
from hashlib import sha256

import attrs

from kvcore import Config, KVCacheManager, Request
from kvcore.compat import KVCacheManager as Compat

BLOCK_SIZE = 16
PROMPT = 4 * BLOCK_SIZE
NUM_STEPS = 2 * BLOCK_SIZE
MOST = 1.5
"""Microseconds that a call with a star may cost over the core's."""
CALLS = {
    "admit": "first look-up and allocation",
    "begin": "append: a token that begins a block *",
    "inside": "append: a token inside a block *",
    "fill": "append: a token that fills a block *",
    "begin by allocate_slots": "allocate_slots: one that begins a block",
    "inside by allocate_slots": "allocate_slots: one inside a block *",
    "publish": "cache_blocks of a decoded token *",
    "ids": "get_block_ids *",
    "close": "the end of a step, a request *",
    "again": "look-up of a request that rests",
    "preempt": "free, to come back *",
    "free": "free, at its end *",
}


class EngineRequest:
    """A request as an engine has it."""

    def __init__(self, name: str, prompt: list[int], *, own_hashes: bool) -> None:
        self.request_id = name
        self.all_token_ids = prompt
        self.num_computed_tokens = 0
        self.ended = False
        if own_hashes:
            self.block_hashes: list[bytes] = []
            self._hash_full()

    @property
    def num_tokens(self) -> int:
        """The number of tokens of prompt and answer."""
        return len(self.all_token_ids)

    def is_finished(self) -> bool:
        """Return whether the request has finished."""
        return self.ended

    def say(self, token: int) -> None:
        """Append the token of a finished step."""
        self.num_computed_tokens = self.num_tokens
        self.all_token_ids.append(token)
        if hasattr(self, "block_hashes"):
            self._hash_full()

    def _hash_full(self) -> None:
        for place in range(len(self.block_hashes), self.num_tokens // BLOCK_SIZE):
            self.block_hashes.append(sha256(f"{self.request_id}/{place}".encode()).digest())


Call = Callable[[EngineRequest], object]
Calls = dict[str, Call]


@attrs.define
class Round:
    """CPU seconds and number of the calls of each kind in one round."""

    seconds: dict[str, float] = attrs.field(factory=lambda: dict.fromkeys(CALLS, 0.0))
    counts: dict[str, int] = attrs.field(factory=lambda: dict.fromkeys(CALLS, 0))

    def clock(
        self, kind: str, call: Call, requests: list[EngineRequest], num_shares: int | None = None
    ) -> None:
        """Time a call with each item. num_shares: total number of requests that the calls serve."""
        start = time.thread_time()
        for request in requests:
            call(request)
        self.seconds[kind] += time.thread_time() - start
        self.counts[kind] += num_shares or len(requests)

    def microseconds(self, kind: str) -> float:
        """Return the microseconds of one call, including the loop around it."""
        return 1e6 * self.seconds[kind] / self.counts[kind]


def measure(
    calls: Calls, name: str, num_running: int, *, own_hashes: bool, append_first: bool = False
) -> Round:
    """Run requests side by side from admission over decoding and preemption to the end.

    name: of the round; no two requests share a prompt. append_first: whether the first block is
    decoded by `append` and the second by `allocate_slots`, or the other way round.
    """
    tokens = [hash(name) % 2**30 + place for place in range(PROMPT)]
    requests = [
        EngineRequest(f"{name}-{number}", [number, *tokens[1:]], own_hashes=own_hashes)
        for number in range(num_running)
    ]
    measured = Round()
    measured.clock("admit", calls["admit"], requests)
    for step in range(NUM_STEPS):
        measured.clock("close", calls["close"], requests[:1], num_shares=num_running)
        for request in requests:
            request.say(step)
        num_tokens = requests[0].num_tokens
        place = "fill" if num_tokens % BLOCK_SIZE == 0 else "inside"
        kind = "begin" if num_tokens % BLOCK_SIZE == 1 else place
        # Each call has a block of its own; the first finds less in the processor's caches.
        if (step < BLOCK_SIZE) != append_first and kind != "fill":
            kind += " by allocate_slots"
        measured.clock(kind, calls[kind], requests)
        measured.clock("publish", calls["publish"], requests)
        measured.clock("ids", calls["ids"], requests)
    calls["close"](requests[0])
    measured.clock("preempt", calls["preempt"], requests)
    for request in requests:
        request.num_computed_tokens = 0
    measured.clock("again", calls["again"], requests)
    for request in requests:
        calls["admit again"](request)
    calls["close"](requests[0])
    for request in requests:
        request.ended, request.num_computed_tokens = True, request.num_tokens
    measured.clock("free", calls["free"], requests)
    return measured


def over_compat(config: Config) -> Calls:
    """Return the calls as an engine written for vLLM makes them."""
    manager = Compat(config, log_stats=False, ends_steps=True)

    def admit(request: EngineRequest) -> None:
        blocks, num_hit = manager.get_computed_blocks(request)
        manager.allocate_slots(request, request.num_tokens - num_hit, num_hit, blocks)

    def append(request: EngineRequest) -> None:
        manager.append(request)

    def decode(request: EngineRequest) -> None:
        manager.allocate_slots(request, 1)

    return {
        "admit": admit,
        "admit again": admit,
        "begin": append,
        "inside": append,
        "fill": append,
        "begin by allocate_slots": decode,
        "inside by allocate_slots": decode,
        "publish": lambda request: manager.cache_blocks(request, request.num_computed_tokens),
        "ids": lambda request: manager.get_block_ids(request.request_id),
        "close": lambda _: manager.step_ends(),
        "again": lambda request: manager.get_computed_blocks(request),
        "preempt": lambda request: manager.free(request),
        "free": lambda request: manager.free(request),
    }


def over_core(config: Config) -> Calls:
    """Return the equivalent calls of the core, one request at a time."""
    manager = KVCacheManager(config)

    def admit(request: EngineRequest) -> None:
        hashes = getattr(request, "block_hashes", None)
        own = None if hashes is None else list(hashes)
        manager.add_request(Request(request.request_id, request.all_token_ids, block_hashes=own))
        admit_again(request)

    def admit_again(request: EngineRequest) -> None:
        hit = manager.get_computed_blocks(request.request_id)
        num_rest = request.num_tokens - hit.num_tokens
        manager.allocate_slots(request.request_id, num_rest, hit)

    def append(request: EngineRequest) -> None:
        manager.append((request.request_id,), request.all_token_ids[-1:])

    def fill(request: EngineRequest) -> None:
        name = request.request_id
        manager.append((name,), request.all_token_ids[-1:])
        if hasattr(request, "block_hashes"):
            manager.add_block_hashes(name, request.block_hashes[-1:])
            manager.cache_blocks(name, request.num_tokens)

    def end(request: EngineRequest) -> None:
        manager.free(request.request_id)
        manager.remove_request(request.request_id)

    return {
        "admit": admit,
        "admit again": admit_again,
        "begin": append,
        "inside": append,
        "begin by allocate_slots": append,
        "inside by allocate_slots": append,
        "fill": fill,
        "publish": lambda request: manager.cache_blocks(
            request.request_id, request.num_computed_tokens
        ),
        "ids": lambda request: manager.get_block_ids(request.request_id),
        "close": lambda _: manager.take_batch(),
        "again": lambda request: manager.get_computed_blocks(request.request_id),
        "preempt": lambda request: manager.free(request.request_id),
        "free": end,
    }


def show(rounds: dict[str, list[Round]]) -> None:
    """Print a row per kind of call, marked if one with a star costs more than it may."""
    for kind, words in CALLS.items():
        ours, cores = (min(each.microseconds(kind) for each in side) for side in rounds.values())
        over = ours - cores
        mark = f"  more than {MOST}" if words.endswith("*") and over > MOST else ""
        print(f"  {words:42}{ours:9.2f}{cores:9.2f}{over:9.2f}{mark}", flush=True)


def main() -> int:
    """Measure with hashes and without."""
    parser = argparse.ArgumentParser(prog="python -m benches.compat", description=__doc__)
    parser.add_argument("--running", type=int, default=256, help="requests, %(default)s")
    parser.add_argument("--rounds", type=int, default=15, help="of each side, %(default)s")
    given = parser.parse_args()
    for own_hashes in (True, False):
        config = Config(given.running * 8 + 1, BLOCK_SIZE)
        sides = {"compat": over_compat(config), "core": over_core(config)}
        rounds: dict[str, list[Round]] = {side: [] for side in sides}
        gc.collect()
        gc.freeze()
        for number in range(given.rounds):
            for side in sides if number % 2 else reversed(sides):
                measured = measure(
                    *(sides[side], f"{number}", given.running),
                    own_hashes=own_hashes,
                    append_first=number // 2 % 2 == 1,
                )
                rounds[side].append(measured)
        gc.unfreeze()
        whose = "requests bring hashes" if own_hashes else "kvcore hashes"
        print(f"{f'us a call, {whose}':44}{'compat':>9}{'core':>9}{'over':>9}")
        show(rounds)
    return 0


if __name__ == "__main__":
    sys.exit(main())
