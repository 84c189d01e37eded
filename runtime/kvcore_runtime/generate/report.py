# SPDX-License-Identifier: Apache-2.0
"""The report of a run: the answers, a table of figures, and both as JSON."""

import textwrap
from collections.abc import Callable, Mapping
from typing import Any

import attrs

from kvcore_runtime.engine.engine import Engine
from kvcore_runtime.far.exchange import FarExchange
from kvcore_runtime.generate.conversation import Answer, Held, RefusedTurn

WIDTH = 96
TABLE = {
    "prompt tokens": "{prompt_tokens}",
    "tokens reused": "{prompt_tokens_reused} ({reused:.0%}), {recompute_tokens_reused} more after "
    "preemption",
    "hits inside": "{hits_inside} ended inside a block, at multiples of {hash_block_size} tokens",
    "tokens computed": "{computed_tokens}",
    "tokens generated": "{generated_tokens} in {answers}",
    "evictions": "{evictions}",
    "copies on write": "{copies_on_write}",
    "blocks swapped": "{blocks_swapped_out} out, {blocks_swapped_in} in",
    "preemptions": "{by_swap}{preemptions_by_recompute} by recompute",
    "drafts": "{drafts}, {drafts_accepted} accepted",
    "blocks in files": "{blocks_stored} stored, {blocks_loaded} loaded, {pages_failed} failed, "
    "{pages_dropped} dropped",
    "in flight": "{steps_overlapped} of {counted_steps} planned while another ran, "
    "{batches_cancelled} cancelled",
    "waits": "{stalls} for tokens in flight, {waits_for_blocks} for blocks",
    "published": "when {publish}",
    "pool": "{num_blocks} blocks of {block_size} tokens{host_blocks}",
    "pool in use": "peak {peak_usage:.0%}, mean {mean_usage:.0%}",
    "speed": "{tokens_per_second:.1f} tokens/s ({seconds:.1f} s, {counted_steps})",
    "manager": "{manager_share:.2%} of the time, {manager_us_per_step:.0f} us per step ({backend})",
}
"""The rows of the table of figures, and how each is written."""

NEEDS: dict[str, Callable[[Mapping[str, Any]], object]] = {
    "hits inside": lambda summary: summary["hash_block_size"] < summary["block_size"],
    "blocks swapped": lambda summary: summary["num_host_blocks"],
    "drafts": lambda summary: summary["drafting"],
    "blocks in files": lambda summary: summary["keeps_files"],
    "in flight": lambda summary: summary["max_in_flight"],
    "waits": lambda summary: summary["max_in_flight"],
    "published": lambda summary: summary["max_in_flight"] or summary["publish"] != "scheduled",
}
"""Rows of features: when the feature was on."""


def summarise(engine: Engine, held: Held) -> dict[str, Any]:
    """Return the figures of a finished run by name; drains the manager's statistics.

    prompt_tokens_reused: cached when a request was first admitted; recompute_tokens_reused: when it
    came back from preemption. hits_inside: hits that ended inside a block. drafting: whether tokens
    were guessed; drafts: how many. keeps_files: whether blocks were kept in files. blocks_stored:
    in files, those too that were there already; blocks_loaded: from files; pages_failed: stores and
    fetches that were answered otherwise; pages_dropped: those that were not asked for.
    steps_overlapped: planned while another was computed; stalls: plans with nothing to do before a
    batch in flight was completed; waits_for_blocks: plans in which a sequence waited for such a
    batch's blocks. Usages and shares are 0.0 to 1.0, times seconds unless the name says.
    """
    config, metrics = engine.manager.config, engine.metrics
    stats = engine.manager.take_stats()
    kept = engine.exchange.counts if isinstance(engine.exchange, FarExchange) else None
    return {
        "backend": engine.manager.backend,
        "num_blocks": config.num_usable_blocks,
        "block_size": config.block_size,
        "num_host_blocks": config.num_host_blocks,
        "num_answers": len(held.answers),
        "num_refused": len(held.refusals),
        "prompt_tokens": metrics.num_prompt_tokens,
        "prompt_tokens_reused": stats.hits,
        "recompute_tokens_reused": stats.preempted_hits,
        "hits_inside": engine.scheduler.num_hits_inside,
        "hash_block_size": config.hash_block_size,
        "computed_tokens": metrics.num_computed_tokens,
        "generated_tokens": metrics.num_generated_tokens,
        "evictions": metrics.num_evictions,
        "copies_on_write": metrics.num_copies,
        "blocks_swapped_out": metrics.num_blocks_out,
        "blocks_swapped_in": metrics.num_blocks_in,
        "preemptions_by_swap": engine.scheduler.preemptions.by_swap,
        "preemptions_by_recompute": engine.scheduler.preemptions.by_recompute,
        "drafting": engine.options.drafter is not None,
        "drafts": metrics.num_drafts,
        "drafts_accepted": metrics.num_accepted_drafts,
        "keeps_files": kept is not None,
        "blocks_stored": kept.num_stored if kept else 0,
        "blocks_loaded": kept.num_loaded if kept else 0,
        "pages_failed": kept.num_failed if kept else 0,
        "pages_dropped": kept.dropped.total() if kept else 0,
        "max_in_flight": config.max_in_flight,
        "publish": config.publish,
        "steps_overlapped": metrics.num_overlapped,
        "stalls": metrics.num_stalls,
        "waits_for_blocks": engine.scheduler.num_waits,
        "batches_cancelled": metrics.num_cancelled,
        "peak_usage": metrics.peak_usage,
        "mean_usage": metrics.mean_usage,
        "steps": metrics.num_steps,
        "seconds": metrics.seconds,
        "tokens_per_second": metrics.tokens_per_second,
        "manager_share": metrics.manager_share,
        "manager_us_per_step": metrics.manager_us_per_step,
    }


def format_table(summary: Mapping[str, Any]) -> str:
    """Format the figures as a table of two columns, without those of features that were off."""
    reused, prompts = summary["prompt_tokens_reused"], summary["prompt_tokens"]
    more = {
        "reused": reused / prompts if prompts else 0.0,
        "answers": format_count(summary["num_answers"], "answers"),
        "counted_steps": format_count(summary["steps"], "steps"),
    }
    has_host = summary["num_host_blocks"] > 0
    more["by_swap"] = f"{summary['preemptions_by_swap']} by swap, " if has_host else ""
    more["host_blocks"] = f", {summary['num_host_blocks']} host blocks" if has_host else ""
    shown = [name for name in TABLE if name not in NEEDS or NEEDS[name](summary)]
    width = max(map(len, shown))
    rows = ((name, TABLE[name].format_map({**summary, **more})) for name in shown)
    return "\n".join(f"{name:<{width}}  {value}" for name, value in rows)


def format_count(count: int, name: str) -> str:
    """Format a number with what it counts. name: begins with a plural, as in "copies on write"."""
    if count != 1:
        return f"{count} {name}"
    noun, space, rest = name.partition(" ")
    one = f"{noun[:-3]}y" if noun.endswith("ies") else noun.removesuffix("s")
    return f"1 {one}{space}{rest}"


def format_refusal(refusal: RefusedTurn) -> str:
    """Format an unanswered question, with the reason."""
    return f"-- {refusal.request_id}: refused\n   {refusal.reason}"


def format_answer(answer: Answer) -> str:
    """Format a question with its answer."""
    tokens = len(answer.completion.tokens)
    several = answer.prompt.num_samples > 1
    sample = f", sample {answer.completion.sample + 1}" if several else ""
    head = (
        f"-- {answer.request.request_id}{sample}: {len(answer.request.prompt)} prompt tokens, "
        f"{tokens} generated ({answer.completion.reason.value})"
    )
    lines = [head]
    for sign, text in ((">", answer.prompt.turns[answer.turn]), (" ", answer.text.strip())):
        for line in _printable(text).splitlines():
            lines += textwrap.wrap(line, WIDTH, initial_indent=f" {sign} ", subsequent_indent="   ")
    return "\n".join(lines)


def _printable(text: str) -> str:
    """Replace characters that a terminal cannot show by dots, since random models write them."""
    shown = (c == "\n" or (c.isprintable() and c != "\ufffd") for c in text)
    return "".join(c if good else "\u00b7" for c, good in zip(text, shown, strict=True))


def as_json(
    summary: Mapping[str, Any],
    held: Held,
    verified: Mapping[str, Any] | None,
    not_exercised: str | None = None,
) -> dict[str, Any]:
    """Return a run as plain data.

    verified: None if not requested. not_exercised: required events that did not happen.
    """
    return {
        "answers": [
            {
                "prompt": each.prompt.prompt_id,
                "turn": each.turn,
                "sample": each.completion.sample,
                "prompt_tokens": len(each.request.prompt),
                "tokens": list(each.completion.tokens),
                "reason": each.completion.reason.value,
                "text": each.text,
            }
            for each in held.answers
        ],
        "interrupted": held.interrupted,
        "refused": [attrs.asdict(each) for each in held.refusals],
        "summary": dict(summary),
        "verified": verified,
        "not_exercised": not_exercised,
    }
