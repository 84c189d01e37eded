# SPDX-License-Identifier: Apache-2.0
"""Record one list of operations that every block manager can replay.

Run: python -m benches.record TRACE --blocks 16384 --out FILE. Instead of TRACE: --kind turns for a
generated trace, --decode 1024 for this many requests that decode at once, --made 1 for a small list
in which requests continue earlier ones.

The list is recorded as if no blocks were shared: preemptions and chunks follow from the number of
blocks that a pool without sharing needs, and a manager that shares needs less.
Everything is deterministic: equal arguments give equal bytes. One `hash_id` of the trace stands for
512 fixed tokens; no two requests share output tokens.

The file is little-endian u32 words: MAGIC, VERSION, block size, blocks of the pool, requests,
words of tokens, words of operations; for each request its prompt length and output length; the
tokens of all requests, prompt then output; the operations, each a code and its arguments.
"""

from __future__ import annotations

import argparse
import array
import hashlib
import sys
from collections.abc import Iterable, Sequence
from itertools import islice
from pathlib import Path

import attrs

from benches.peers.work import ADD, DECODE, FINISH, MAGIC, PREEMPT, PREFILL, STEP, VERSION
from kvcore.replay.request_trace import TraceReader
from kvcore.replay.synthetic import KINDS, generate
from kvcore.replay.workload import TraceRequest

VOCABULARY = 128_000
MADE_UP_SEED = 1
DECODE_STEPS = 128
MADE_REQUESTS = 120
MADE_BACK = 6
MADE_PROMPT = 40
MADE_OUTPUT = 24
DECODE_PROMPT = 500
DECODE_PROMPT_SPREAD = 64


@attrs.frozen
class Recorded:
    """One request of the list: its tokens, prompt first."""

    tokens: array.array[int]
    prompt_len: int

    @property
    def output_len(self) -> int:
        """The number of tokens that are decoded one by one."""
        return len(self.tokens) - self.prompt_len


@attrs.frozen
class Limits:
    """The limits of the recording scheduler."""

    num_blocks: int
    block_size: int
    token_budget: int
    num_running_max: int

    @property
    def usable(self) -> int:
        """The number of blocks that hold tokens: managers keep one as padding."""
        return self.num_blocks - 1

    def blocks(self, num_tokens: int) -> int:
        """Return how many blocks num_tokens tokens fill."""
        return -(-num_tokens // self.block_size)


def expand(kind: str, number: int, num_tokens: int) -> array.array[int]:
    """Return tokens that depend only on kind and number, equal on every machine."""
    raw = array.array("I", hashlib.shake_128(f"{kind} {number}".encode()).digest(4 * num_tokens))
    if sys.byteorder == "big":
        raw.byteswap()
    return array.array("I", [word % VOCABULARY for word in raw])


def traced(requests: Iterable[TraceRequest]) -> list[Recorded]:
    """Return the requests of a trace, with tokens."""
    expanded: dict[int, array.array[int]] = {}
    recorded = []
    for number, request in enumerate(requests):
        prompt = array.array("I")
        for hash_id in request.hash_ids:
            if hash_id not in expanded:
                expanded[hash_id] = expand("prompt", hash_id, request.unit)
            prompt.extend(expanded[hash_id])
        del prompt[request.prompt_len :]
        output = expand("output", number, max(1, request.output_len))
        recorded.append(Recorded(prompt + output, len(prompt)))
    return recorded


def made(seed: int) -> list[Recorded]:
    """Make requests, most of which begin as an earlier one, some with its whole answer."""
    numbers = iter(expand("numbers", seed, 4 * MADE_REQUESTS))
    requests: list[Recorded] = []
    for number in range(MADE_REQUESTS):
        start = array.array("I")
        back, keep = next(numbers) % MADE_BACK, next(numbers)
        if back < len(requests) and back:
            start = requests[-back].tokens
            start = start[: keep % MADE_PROMPT] if keep % 2 else start[: 2 * MADE_PROMPT]
        prompt_len = len(start) + 1 + next(numbers) % MADE_PROMPT
        output_len = 1 + next(numbers) % MADE_OUTPUT
        more = expand(f"made {seed}", number, prompt_len - len(start) + output_len)
        requests.append(Recorded(start + more, prompt_len))
    return requests


def decoding(count: int) -> list[Recorded]:
    """Make requests with different prompts of 500 to 563 tokens, for DECODE_STEPS steps."""
    return [
        Recorded(expand("decode", number, length + DECODE_STEPS), length)
        for number in range(count)
        for length in [DECODE_PROMPT + number * 37 % DECODE_PROMPT_SPREAD]
    ]


class Recorder:
    """A continuous-batching scheduler on a pool without sharing that records its operations.

    A request claims the blocks of all its tokens when it is admitted, so only decoding can run out
    of blocks; the newest request is then preempted.
    """

    def __init__(self, requests: Sequence[Recorded], limits: Limits) -> None:
        self.requests = requests
        self.limits = limits
        self.operations = array.array("I")
        self.free = limits.usable
        self.known = [request.prompt_len for request in requests]  # tokens, outputs so far included
        self.computed = [0] * len(requests)
        self.added: set[int] = set()
        self.running: list[int] = []
        self.waiting = list(range(len(requests)))[::-1]  # the next one is last

    def claim(self, number: int) -> int:
        """Return the number of blocks for all tokens of a request."""
        return self.limits.blocks(self.known[number])

    def preempt_newest(self) -> None:
        """Free the blocks of the newest request and put it at the front of the queue."""
        victim = self.running.pop()
        self.free += self.claim(victim)
        self.computed[victim] = 0
        self.waiting.append(victim)
        self.operations.extend([PREEMPT, victim])

    def decode(self) -> int:
        """Decode a token for each request whose tokens are all computed; returns their number."""
        while True:
            ready = [n for n in self.running if self.computed[n] == self.known[n]]
            needed = sum(self.known[n] % self.limits.block_size == 0 for n in ready)
            if needed <= self.free:
                break
            self.preempt_newest()
        self.free -= needed
        for number in ready:
            self.known[number] += 1
            self.computed[number] += 1
        if ready:
            self.operations.extend([DECODE, len(ready), *ready])
        return len(ready)

    def prefill(self, number: int, budget: int) -> int:
        """Prefill one chunk of a running request; returns the tokens taken from the budget."""
        start = self.computed[number]
        end = min(self.known[number], start + budget)
        if end > start:
            self.operations.extend([PREFILL, number, end])
            self.computed[number] = end
        return end - start

    def admit(self, budget: int) -> None:
        """Admit those that fit as a whole, oldest first, and start their prefill."""
        while self.waiting and budget and len(self.running) < self.limits.num_running_max:
            number = self.waiting[-1]
            if self.claim(number) > self.free:
                break
            self.waiting.pop()
            self.free -= self.claim(number)
            if number not in self.added:
                self.added.add(number)
                self.operations.extend([ADD, number])
            self.running.append(number)
            budget -= self.prefill(number, budget)

    def finish(self) -> None:
        """Remove requests that have all their tokens, after the step that computed the last one."""
        for number in [n for n in self.running if self.known[n] == len(self.requests[n].tokens)]:
            self.free += self.claim(number)
            self.running.remove(number)
            self.operations.extend([FINISH, number])

    def step(self, *, decode_alone: bool) -> None:
        """Run one step; with `decode_alone`, decode nothing until every prompt is computed."""
        self.finish()
        budget = self.limits.token_budget
        in_prefill = any(self.computed[n] < self.known[n] for n in self.running)
        if not (decode_alone and (self.waiting or in_prefill)):
            budget -= self.decode()
        for number in list(self.running):
            budget -= self.prefill(number, budget)
        self.admit(budget)
        self.operations.append(STEP)


def record(
    requests: Sequence[Recorded], limits: Limits, *, decode_alone: bool = False
) -> array.array[int]:
    """Return the words of the whole file."""
    fitting = [r for r in requests if limits.blocks(len(r.tokens)) <= limits.usable]
    recorder = Recorder(fitting, limits)
    while recorder.waiting or recorder.running:
        recorder.step(decode_alone=decode_alone)
    num_tokens = sum(len(request.tokens) for request in fitting)
    operations = recorder.operations
    words = array.array("I", [MAGIC, VERSION, limits.block_size, limits.num_blocks])
    words.extend([len(fitting), num_tokens, len(operations)])
    for request in fitting:
        words.extend([request.prompt_len, request.output_len])
    for request in fitting:
        words.extend(request.tokens)
    return words + operations


def write(path: Path, words: array.array[int]) -> None:
    """Write the file in its own byte order, whatever the machine's."""
    path.parent.mkdir(parents=True, exist_ok=True)
    stored = words[:]
    if sys.byteorder == "big":
        stored.byteswap()
    path.write_bytes(stored.tobytes())


def main(arguments: Sequence[str] | None = None) -> None:
    """Record the requested list and print a summary."""
    parser = argparse.ArgumentParser(prog="python -m benches.record", description=__doc__)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument(
        "trace", type=Path, nargs="?", help="a trace in Mooncake's or Bailian's JSONL"
    )
    source.add_argument("--kind", choices=KINDS, help="the kind of a generated trace")
    source.add_argument("--decode", type=int, metavar="N", help="requests that decode at once")
    source.add_argument("--made", type=int, metavar="SEED", help="the seed of a small list")
    parser.add_argument("--requests", type=int, default=300, help="requests of the trace")
    parser.add_argument(
        "--blocks", type=int, help="blocks of the pool (16384; with --decode 64 per request)"
    )
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--budget", type=int, default=8192, help="tokens per step")
    parser.add_argument("--max-running", type=int, help="running requests (256; with --decode N)")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args(arguments)
    limits = Limits(
        options.blocks or (64 * options.decode if options.decode else 16_384),
        options.block_size,
        options.budget,
        options.max_running or options.decode or 256,
    )
    if options.decode:
        requests = decoding(options.decode)
    elif options.made is not None:
        requests = made(options.made)
    elif options.kind:
        requests = traced(generate(options.kind, options.requests, MADE_UP_SEED))
    else:
        requests = traced(islice(TraceReader(options.trace), options.requests))
    words = record(requests, limits, decode_alone=options.decode is not None)
    write(options.out, words)
    left_out = len(requests) - words[4]
    print(
        f"{options.out}: {words[4]} requests ({left_out} larger than the pool left out), "
        f"{words[5]} tokens, {words[6]} words of operations"
    )


if __name__ == "__main__":
    main()
