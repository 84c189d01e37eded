# SPDX-License-Identifier: Apache-2.0
"""Counts the facts of a trace without replaying it.

One request is held at a time; only the tree of distinct prefixes grows. Percentiles are read from
buckets that are 1.6 % wide, totals are exact.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import attrs

from kvcore.replay.bounds.ideal import Ideal
from kvcore.replay.bounds.prefix_tree import PrefixTree
from kvcore.replay.costs import Histogram
from kvcore.replay.report_text import counted, percent, span
from kvcore.replay.summary import share
from kvcore.replay.workload import TraceRequest


@attrs.frozen
class LengthFacts:
    """Tokens of the prompts, or of the outputs, of a trace."""

    total: int
    median: int
    p99: int
    most: int


@attrs.frozen(kw_only=True)
class Facts:
    """The facts of a trace. seconds: from the first to the last arrival. unit: tokens per id.

    repeated_ids: those of num_ids whose prefix occurred before. ideal_hit_tokens: of an unlimited
    cache with blocks of block_size tokens. interrupted: the counts are incomplete.
    """

    name: str
    requests: int
    skipped_lines: int
    interrupted: bool
    seconds: float
    prompts: LengthFacts
    outputs: LengthFacts
    unit: int
    num_ids: int
    repeated_ids: int
    block_size: int
    ideal_hit_tokens: int


class Counting:
    """Facts while they are counted."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._tree = PrefixTree()
        self._ideal = Ideal(block_size, self._tree)
        self._prompts, self._outputs = Histogram(), Histogram()
        self._seconds, self._unit, self._num_ids = 0.0, 0, 0

    def read(self, requests: Iterable[TraceRequest]) -> None:
        """Count requests; the counts stay even if reading ends with an error."""
        for each in requests:
            self._ideal.look_up(each.hash_ids, each.prompt_len, each.unit)
            self._prompts.add(each.prompt_len)
            self._outputs.add(each.output_len)
            self._num_ids += len(each.hash_ids)
            self._seconds, self._unit = each.arrival, each.unit

    def facts(self, name: str, skipped_lines: int, *, interrupted: bool = False) -> Facts:
        """Return the counts so far."""
        return Facts(
            name=name,
            requests=self._prompts.count,
            skipped_lines=skipped_lines,
            interrupted=interrupted,
            seconds=self._seconds,
            prompts=_lengths(self._prompts),
            outputs=_lengths(self._outputs),
            unit=self._unit,
            num_ids=self._num_ids,
            repeated_ids=self._num_ids - len(self._tree),
            block_size=self._block_size,
            ideal_hit_tokens=self._ideal.hit_tokens,
        )


def to_lines(facts: Facts) -> Iterator[str]:
    """Yield the facts as lines for people."""
    skipped = f"; {counted(facts.skipped_lines, 'bad line')} skipped" if facts.skipped_lines else ""
    cut = "interrupted: " if facts.interrupted else ""
    requests = counted(facts.requests, "request")
    yield f"{cut}{facts.name}: {requests} in {span(facts.seconds)}{skipped}"
    yield f"prompts   {_in_words(facts.prompts)}"
    yield f"answers   {_in_words(facts.outputs)}"
    repeated = percent(share(facts.repeated_ids, facts.num_ids))
    ids = f"{facts.num_ids:,} of {facts.unit:,} tokens"
    yield f"ids       {ids}; {facts.repeated_ids:,} repeat a prefix that came before: {repeated}"
    found = percent(share(facts.ideal_hit_tokens, facts.prompts.total))
    blocks = f"blocks of {counted(facts.block_size, 'token')}"
    yield f"ideal     {found} of the prompt tokens: an unlimited cache with {blocks}"


def _lengths(values: Histogram) -> LengthFacts:
    half, most = values.percentile(0.5), values.percentile(0.99)
    return LengthFacts(values.total, round(half), round(most), values.worst)


def _in_words(lengths: LengthFacts) -> str:
    return (
        f"{lengths.total:,} tokens; median {lengths.median:,}, 99 % within {lengths.p99:,}, "
        f"longest {lengths.most:,}"
    )
