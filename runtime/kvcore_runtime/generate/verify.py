# SPDX-License-Identifier: Apache-2.0
"""Proves an engine's answers by computing the prompts again, each from one contiguous cache.

This path uses no blocks, tables or manager. With a model in invariant mode it must give the same
tokens, and the same logits bit for bit if the engine kept them.
"""

from collections.abc import Callable, Sequence

import attrs
import torch

from kvcore_runtime.engine.engine import Engine
from kvcore_runtime.errors import KvcoreRuntimeError
from kvcore_runtime.generate.conversation import Answer
from kvcore_runtime.model.contiguous import Decode, Generation, generate_reference
from kvcore_runtime.model.model import Llama
from kvcore_runtime.model.sampling import derive_seed

GROUP = 32
"""Answers computed in one lock-step batch; bounds the memory of the contiguous caches."""
SWAPS = ("blocks swapped out", "blocks swapped in", "preemptions by swap")
"""What cannot happen without a host tier."""


class NotVerified(KvcoreRuntimeError):
    """An answer, or the state after it, is wrong."""


class NotExercised(KvcoreRuntimeError):
    """A required event did not happen; the answers may still be right."""


def verify_answers(
    model: Llama,
    answers: Sequence[Answer],
    *,
    decode: Decode | None = None,
    progress: Callable[[int], object] | None = None,
) -> dict[str, int]:
    """Compute all answers again from contiguous caches; return counts of what was equal, by name.

    progress: called with the number of answers just compared. Raises NotVerified at the first
    difference.
    """
    num_tokens = num_logits = 0
    for start in range(0, len(answers), GROUP):
        group = answers[start : start + GROUP]
        references = generate_reference(
            model,
            [each.request.prompt for each in group],
            [
                attrs.evolve(
                    each.request.sampling,
                    seed=derive_seed(each.request.sampling.seed, each.completion.sample),
                )
                for each in group
            ],
            decode=decode,
            keep_logits=any(each.completion.logits is not None for each in group),
        )
        for answer, reference in zip(group, references, strict=True):
            num_tokens += len(reference.tokens)
            num_logits += _compare(answer, reference)
        if progress is not None:
            progress(len(group))
    counts = {"answers equal to a contiguous cache's": len(answers), "tokens": num_tokens}
    return counts | ({"rows of logits bit by bit": num_logits} if num_logits else {})


def verify_drained(engine: Engine) -> None:
    """Check that a finished engine holds nothing and its manager's state is sound.

    Raises NotVerified, or InvariantViolation of the manager.
    """
    manager = engine.manager
    manager.check()
    for tier, num_free, num_blocks in (
        ("device", manager.num_free_blocks, manager.config.num_usable_blocks),
        ("host", manager.num_free_host_blocks, manager.config.num_host_blocks),
    ):
        if num_free != num_blocks:
            raise NotVerified(
                f"all requests are done, but {num_blocks - num_free} of {num_blocks} "
                f"{tier} blocks are still held",
                tier=tier,
                num_held=num_blocks - num_free,
                num_blocks=num_blocks,
            )


def verify_pressure(engine: Engine, *, refused: bool = False) -> dict[str, int]:
    """Count the events that a small pool must cause; each must happen at least once.

    refused: whether a prompt never fitted; then the pool is not reported as too large. Raises
    NotExercised, which names the missing events, with a reason if known.
    """
    metrics, preemptions = engine.metrics, engine.scheduler.preemptions
    happened = {
        "evictions": metrics.num_evictions,
        "copies on write": metrics.num_copies,
        "blocks swapped out": metrics.num_blocks_out,
        "blocks swapped in": metrics.num_blocks_in,
        "preemptions by swap": preemptions.by_swap,
        "preemptions by recompute": preemptions.by_recompute,
    }
    config = engine.manager.config
    if config.hash_block_size < config.block_size:
        happened["hits inside a block"] = engine.scheduler.num_hits_inside
    missing = [name for name, count in happened.items() if count == 0]
    if missing:
        unexplained, reasons = missing, []
        if config.num_host_blocks == 0:
            unexplained = [name for name in missing if name not in SWAPS]
            reasons = ["there is no host tier to swap to"]
        if unexplained and not refused:
            reasons.append("the pool is too large, or the prompts too few")
        why = f": {'; '.join(reasons)}" if reasons else ""
        raise NotExercised(f"there were no {', no '.join(missing)}{why}")
    return happened


def _compare(answer: Answer, reference: Generation) -> int:
    """Raise NotVerified unless both are equal; return the number of compared rows of logits."""
    request, sample = answer.request.request_id, answer.completion.sample
    name = f"{request!r}, sample {sample}"
    tokens = answer.completion.tokens
    if tokens != reference.tokens:
        pairs = zip(tokens, reference.tokens, strict=False)
        shorter = min(len(tokens), len(reference.tokens))
        place = next((i for i, (mine, other) in enumerate(pairs) if mine != other), shorter)
        raise NotVerified(
            f"the answer to {name} differs from the contiguous one from token {place} on",
            request=request,
            sample=sample,
            token=place,
        )
    if answer.completion.reason is not reference.reason:
        raise NotVerified(
            f"the answer to {name} ends for another reason than the contiguous one",
            request=request,
            sample=sample,
        )
    logits = answer.completion.logits
    if logits is None or reference.logits is None:
        return 0
    if not torch.equal(logits, reference.logits):
        place = int((logits != reference.logits).any(dim=1).nonzero()[0])
        raise NotVerified(
            f"the logits behind token {place} of the answer to {name} differ in bits",
            request=request,
            sample=sample,
            token=place,
        )
    return len(tokens)
