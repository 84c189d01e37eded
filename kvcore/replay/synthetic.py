# SPDX-License-Identifier: Apache-2.0
"""Generates traces of four kinds of traffic from a seed, in Mooncake's form.

One `random.Random(seed)` decides everything: the same seed gives the same bytes. Session starts are
a Poisson process, lengths are lognormal, choices among shared texts follow Zipf's law. A full chunk
of UNIT tokens has an id that all prompts with this prefix share; the partial chunk at a prompt's
end has its own id. Requests are generated one by one, in the order of their arrival, and only
active sessions are held.
"""

from __future__ import annotations

from array import array
from bisect import bisect
from collections.abc import Callable, Iterable, Iterator
from heapq import heappop, heappush
from itertools import accumulate, count
from random import Random

import attrs
import msgspec

from kvcore.replay.errors import InvalidReplayOption
from kvcore.replay.workload import MOONCAKE_UNIT, TraceRequest
from kvcore.types.arguments import read_count

UNIT = MOONCAKE_UNIT
PROMPT_MAX = 120_000
OUTPUT_MAX = 8_000
SECONDS_PER_OUTPUT = 0.02


@attrs.frozen
class GrowingPrompt:
    """A growing prompt. chunks: the ids of its full chunks."""

    length: int = 0
    chunks: tuple[int, ...] = ()


@attrs.frozen
class Prompt:
    """A request of a session, this many seconds after the previous one, or after its start."""

    after: float
    text: GrowingPrompt
    output_len: int


Session = Iterator["Prompt | Session"]
"""Requests in order; a nested session starts in parallel when it is reached."""


class SessionWriter:
    """What sessions write: random numbers, and ids for new text."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self._ids = count()

    def length(self, median: float, spread: float, most: int) -> int:
        """Draw a number of tokens from 1 to `most`. spread: of its logarithm."""
        return max(1, min(most, round(median * self.random.lognormvariate(0.0, spread))))

    def extend(self, text: GrowingPrompt, num_tokens: int) -> GrowingPrompt:
        """Append new tokens to a text; extending a text twice gives two different texts."""
        length = text.length + num_tokens
        new = length // UNIT - len(text.chunks)
        return GrowingPrompt(length, text.chunks + tuple(next(self._ids) for _ in range(new)))

    def ids(self, text: GrowingPrompt) -> array[int]:
        """Return the ids of a text as a prompt."""
        tail = (next(self._ids),) if text.length % UNIT else ()
        return array("Q", text.chunks + tail)

    def pick(self, texts: list[GrowingPrompt]) -> int:
        """Draw the index of a text, earlier ones more often."""
        weights = list(accumulate(1 / (place + 1) for place in range(len(texts))))
        return bisect(weights, self.random.random() * weights[-1])


def shared(writer: SessionWriter) -> Callable[[], Session]:
    """Make sessions of one question after one of a few system prompts."""
    systems = [writer.extend(GrowingPrompt(), writer.length(2500, 0.6, 16_000)) for _ in range(8)]

    def session() -> Session:
        question = writer.length(400, 1.0, 16_000)
        text = writer.extend(systems[writer.pick(systems)], question)
        yield Prompt(0.0, text, writer.length(250, 0.8, OUTPUT_MAX))

    return session


def turns(writer: SessionWriter) -> Callable[[], Session]:
    """Make conversations: each prompt is the last one, its answer and a new message."""
    systems = [writer.extend(GrowingPrompt(), writer.length(900, 0.4, 4_000)) for _ in range(3)]

    def session() -> Session:
        text, after = systems[writer.pick(systems)], 0.0
        while True:
            text = writer.extend(text, writer.length(250, 1.2, 32_000))
            if text.length > PROMPT_MAX:
                return
            output_len = writer.length(300, 0.7, OUTPUT_MAX)
            yield Prompt(after, text, output_len)
            if writer.random.random() < 0.18:
                return
            text = writer.extend(text, output_len)
            reading = 20 * writer.random.lognormvariate(0.0, 1.0)
            after = output_len * SECONDS_PER_OUTPUT + reading

    return session


def agents(writer: SessionWriter) -> Callable[[], Session]:
    """Make sessions of agents that call tools step by step, and branch to try several ways at
    once.
    """
    systems = [writer.extend(GrowingPrompt(), writer.length(5000, 0.5, 20_000)) for _ in range(4)]

    def work(text: GrowingPrompt, goes_on: float, branches: float) -> Session:
        after = 0.0
        while text.length < PROMPT_MAX - OUTPUT_MAX:
            output_len = writer.length(120, 0.8, 2_000)
            yield Prompt(after, text, output_len)
            if writer.random.random() >= goes_on:
                return
            text = writer.extend(text, output_len)
            if writer.random.random() < branches:
                for _ in range(1 + int(3 * writer.random.random())):
                    yield work(writer.extend(text, writer.length(80, 0.5, 1_000)), 0.6, 0.0)
            text = writer.extend(text, writer.length(600, 1.1, 12_000))
            tool = writer.random.lognormvariate(0.0, 1.0)
            after = output_len * SECONDS_PER_OUTPUT + tool

    def session() -> Session:
        task = writer.extend(systems[writer.pick(systems)], writer.length(300, 0.8, 4_000))
        return work(task, 0.9, 0.15)

    return session


def documents(writer: SessionWriter) -> Callable[[], Session]:
    """Make sessions of questions about documents, some more popular than others; sometimes a new
    document replaces one.
    """

    def document() -> GrowingPrompt:
        return writer.extend(GrowingPrompt(), writer.length(9000, 0.8, PROMPT_MAX - 2_000))

    shelf = [document() for _ in range(60)]

    def session() -> Session:
        place = writer.pick(shelf)
        if writer.random.random() < 0.05:
            shelf[place] = document()
        text = writer.extend(shelf[place], writer.length(60, 0.7, 2_000))
        yield Prompt(0.0, text, writer.length(200, 0.8, OUTPUT_MAX))

    return session


KINDS: dict[str, Callable[[SessionWriter], Callable[[], Session]]] = {
    kind.__name__: kind for kind in (shared, turns, agents, documents)
}
SESSIONS_PER_SECOND = {"shared": 4.0, "turns": 0.6, "agents": 0.25, "documents": 1.5}


def generate(
    kind: str, num_requests: int, seed: int, *, sessions_per_second: float | None = None
) -> Iterator[TraceRequest]:
    """Yield the requests of a generated trace, by arrival.

    kind: of KINDS. seed: at least 0. sessions_per_second: on average; the kind's own if None.
    Raises InvalidReplayOption, InvalidCount.
    """
    if kind not in KINDS:
        reason = f"must be one of {', '.join(KINDS)}"
        raise InvalidReplayOption(name="kind", value=kind, reason=reason)
    most, seed = read_count("num_requests", num_requests, 1), read_count("seed", seed)
    rate = SESSIONS_PER_SECOND[kind] if sessions_per_second is None else sessions_per_second
    if not 0 < rate < float("inf"):
        reason = "must be above 0, and finite"
        raise InvalidReplayOption(name="sessions_per_second", value=rate, reason=reason)
    return _generate(KINDS[kind], most, seed, rate)


def to_lines(requests: Iterable[TraceRequest]) -> Iterator[bytes]:
    """Yield each request as a line of Mooncake JSONL."""
    for request in requests:
        row = {
            "timestamp": round(request.arrival * 1000),
            "input_length": request.prompt_len,
            "output_length": request.output_len,
            "hash_ids": list(request.hash_ids),
        }
        yield msgspec.json.encode(row) + b"\n"


def _generate(
    kind: Callable[[SessionWriter], Callable[[], Session]], most: int, seed: int, rate: float
) -> Iterator[TraceRequest]:
    writer = SessionWriter(seed)
    start = kind(writer)
    upcoming: list[tuple[float, int, Prompt, Session]] = []
    order = count()

    def go_on(session: Session, now: float) -> None:
        for each in session:
            if isinstance(each, Prompt):
                heappush(upcoming, (now + each.after, next(order), each, session))
                return
            go_on(each, now)

    line, next_start = 0, 0.0
    while line < most:
        while not upcoming or next_start <= upcoming[0][0]:
            go_on(start(), next_start)
            next_start += writer.random.expovariate(rate)
        now, _, prompt, session = heappop(upcoming)
        line += 1
        arrival = round(now * 1000) / 1000
        ids = writer.ids(prompt.text)
        yield TraceRequest(line, arrival, prompt.text.length, prompt.output_len, ids, UNIT)
        go_on(session, now)
