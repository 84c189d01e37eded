# SPDX-License-Identifier: Apache-2.0
"""What two sides that did the same steps are found to have done alike; needs no vLLM."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import attrs

Decided = Mapping[str, Any]
"""What a side decided in a step, by names that both sides have."""


@attrs.define
class Step:
    """A step of both sides. rule: the name of the rule that explains what differs, if any does."""

    number: int
    vllm: Decided
    kvcore: Decided
    rule: str = ""


@attrs.define
class Verdict:
    """What came of a run.

    happened: sums over the steps that are the same. differs: the first step that is not, in words,
    empty if there is none. rule: the one that explains it, empty if none does.
    """

    happened: Counter[str] = attrs.field(factory=Counter)
    differs: str = ""
    rule: str = ""


def verdict_of(steps: Iterable[Step]) -> Verdict:
    """Go through a run up to the first step that differs."""
    verdict = Verdict()
    for step in steps:
        names = [name for name in step.vllm if step.vllm[name] != step.kvcore[name]]
        if names:
            lines = [f"step {step.number} differs"]
            for name in names:
                lines += [
                    f"  {name}",
                    f"    vLLM:   {step.vllm[name]}",
                    f"    kvcore: {step.kvcore[name]}",
                ]
            verdict.differs = "\n".join(lines)
            verdict.rule = step.rule
            return verdict
        starts = step.vllm["starts"]
        verdict.happened += Counter(
            tokens=sum(step.vllm["tokens"].values()),
            drafts=sum(step.vllm["drafts"].values()),
            hits=sum(starts[name] for name in step.vllm["begun"]),
            preemptions=len(step.vllm["preempted"]),
        )
    return verdict


def summary(mode: str, verdicts: Iterable[Verdict], num_steps: int) -> str:
    """One line on the runs of a mode."""
    every = list(verdicts)
    happened: Counter[str] = Counter()
    for verdict in every:
        happened += verdict.happened
    num_same = sum(not verdict.differs for verdict in every)
    rules = Counter(verdict.rule for verdict in every if verdict.rule)
    decided = "".join(f", {count} by rule {name!r}" for name, count in sorted(rules.items()))
    return (
        f"{mode}: {num_same} of {len(every)} runs of {num_steps} steps are the same{decided}: "
        f"{happened['tokens']:,} tokens scheduled, {happened['drafts']:,} of them drafts; "
        f"{happened['hits']:,} tokens hit, {happened['preemptions']:,} preemptions"
    )
