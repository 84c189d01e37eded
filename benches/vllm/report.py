# SPDX-License-Identifier: Apache-2.0
"""Report how far two sides that ran the same steps agree; needs no vLLM."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import attrs

Decided = Mapping[str, Any]
"""A side's decisions in a step, by names that both sides have."""


@attrs.define
class Step:
    """A step of both sides. rule: name of the rule that explains a difference, if there is one."""

    number: int
    vllm: Decided
    kvcore: Decided
    rule: str = ""


@attrs.define
class Verdict:
    """The result of a run.

    happened: sums over the steps that are equal. differs: a description of the first step that
    differs, or empty. rule: the rule that explains it, or empty.
    """

    happened: Counter[str] = attrs.field(factory=Counter)
    differs: str = ""
    rule: str = ""


def decisions(planned: Any) -> dict[str, object]:
    """Return the decisions of a schedule, as comparable values."""
    cached = planned.scheduled_cached_reqs
    return {
        "tokens": dict(planned.num_scheduled_tokens),
        "drafts": {name: len(ids) for name, ids in planned.scheduled_spec_decode_tokens.items()},
        "starts": {each.req_id: each.num_computed_tokens for each in planned.scheduled_new_reqs}
        | dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True)),
        "blocks": {
            each.req_id: [list(ids) for ids in each.block_ids]
            for each in planned.scheduled_new_reqs
        }
        | {
            name: ids and [list(each) for each in ids]
            for name, ids in zip(cached.req_ids, cached.new_block_ids, strict=True)
        },
        "begun": sorted(
            {each.req_id for each in planned.scheduled_new_reqs} | set(cached.resumed_req_ids)
        ),
        "preempted": sorted(planned.preempted_req_ids or ()),
        "images": dict(planned.scheduled_encoder_inputs),
        "forgotten images": list(planned.free_encoder_mm_hashes),
        "loads": planned.kv_connector_metadata and planned.kv_connector_metadata.begun,
        "answers": {},
    }


def statistics(outputs: Iterable[Any]) -> dict[str, object]:
    """Return what a scheduler reports of itself with a step's outputs, as comparable values."""
    reported = [each.scheduler_stats for each in outputs if each.scheduler_stats is not None]
    return {
        name: round(value, 6) if isinstance(value, float) else value
        for each in reported
        for name, value in dataclasses.asdict(each).items()
    }


def verdict_of(steps: Iterable[Step]) -> Verdict:
    """Compare a run up to the first step that differs."""
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
            images=sum(map(len, step.vllm.get("images", {}).values())),
            resets=sum(answer is True for _, answer in step.vllm.get("interrupted", ())),
        )
    return verdict


def summary(mode: str, verdicts: Iterable[Verdict], num_steps: int) -> str:
    """Return a summary line of the runs of a mode."""
    every = list(verdicts)
    happened: Counter[str] = Counter()
    for verdict in every:
        happened += verdict.happened
    num_same = sum(not verdict.differs for verdict in every)
    rules = Counter(verdict.rule for verdict in every if verdict.rule)
    decided = "".join(f", {count} by rule {name!r}" for name, count in sorted(rules.items()))
    rarely = "".join(
        f", {happened[name]:,} {what}"
        for name, what in (("resets", "resets of the cache"), ("images", "images computed"))
        if happened[name]
    )
    return (
        f"{mode}: {num_same} of {len(every)} runs of {num_steps} steps are the same{decided}: "
        f"{happened['tokens']:,} tokens scheduled, {happened['drafts']:,} of them drafts; "
        f"{happened['hits']:,} tokens hit, {happened['preemptions']:,} preemptions{rarely}"
    )
