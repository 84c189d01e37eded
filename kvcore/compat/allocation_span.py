# SPDX-License-Identifier: Apache-2.0
"""Finds where an allocation begins and ends if engine and core count differently.

The engine's count decides what is computed, the core's what has slots. The engine counts more if it
continues from drafts before it knows whether they were accepted: those get new slots. It counts
less if a load failed: it computes those tokens again in the blocks that the request holds, since an
engine's own table only grows. The keys of such blocks are no longer findable; complete blocks are
published again when the step is over. If a request holds nothing but has a count, its tokens were
computed by another process: they are external. If external tokens fill a request, its last token is
computed here (X-06), although its slot exists for the load.
"""

from __future__ import annotations

from kvcore.compat.errors import BehindWindow
from kvcore.compat.registered_request import RegisteredRequest
from kvcore.compat.steps import Steps
from kvcore.manager import KVCacheManager as Core
from kvcore.types.engine_counts import AllocationSpan, RequestCounts, TokenCounts
from kvcore.types.errors import BeyondComputed, InvalidCount
from kvcore.types.groups import skipped_blocks
from kvcore.types.values import KVCacheBlocks as CoreBlocks


def find_span(
    core: Core, steps: Steps, known: RegisteredRequest, seen: RequestCounts, counts: TokenCounts
) -> AllocationSpan:
    """Return the span of an allocation; withdraw the keys of blocks that are computed again.

    Raises InvalidCount if nothing is requested, BeyondComputed if the engine counts tokens that
    were never scheduled of a request that holds blocks, BehindWindow.
    """
    if counts.num_new == 0 and counts.num_external == 0:
        raise InvalidCount(name="num_new_tokens", value=0, least=1)
    counted = core.num_computed_tokens(seen.name)
    holds_nothing = counted == known.end == 0
    if not holds_nothing and seen.num_computed > max(counted, known.end):
        raise BeyondComputed(request=seen.name, num_computed=counted, requested=seen.num_computed)
    accepted = min(counted, core.num_tokens(seen.name))
    again = seen.num_computed < accepted
    if again and seen.name in steps:
        # The engine's count stays until the schedule is made.
        again = seen.num_computed < steps.count_before(seen.name)
    if again:
        check_windows(core, seen, accepted)
        steps.close()
        withdraw(core, steps, seen)
    local = (0 if holds_nothing else max(counted, seen.num_computed)) + counts.num_hit
    start = seen.num_computed + counts.num_hit + counts.num_external
    start = min(start, core.config.length_limit)
    external = max(0, start - local)
    whole = counts.num_new == 0 and start == seen.num_tokens and external > 1
    return AllocationSpan(
        num_new=max(0, start + counts.num_new - counted - counts.num_hit - external),
        num_external=external - int(whole),
        num_lookahead=counts.num_lookahead + int(whole),
        start=start,
        end=start + counts.num_new,
        again=again,
        whole=whole,
    )


def check_windows(core: Core, seen: RequestCounts, counted: int) -> None:
    """Raise BehindWindow if computing from the engine's count on would read blocks that were given
    back.
    """
    for index, group in enumerate(core.config.groups):
        kept_from = skipped_blocks(group, counted)
        if skipped_blocks(group, seen.num_computed) < kept_from:
            raise BehindWindow(
                request=seen.name,
                requested=seen.num_computed,
                group_id=index,
                first=kept_from * group.block_size,
            )


def withdraw(core: Core, steps: Steps, seen: RequestCounts) -> None:
    """Withdraw the keys of the blocks that hold a token from the engine's count on."""
    tables = core.get_block_ids(seen.name)
    blocks = [
        block
        for group, table in zip(core.config.groups, tables, strict=True)
        for block in table[seen.num_computed // group.block_size :]
        if block or not core.config.null_block
    ]
    core.evict_blocks(blocks)
    steps.change()


def new_blocks(core: Core, span: AllocationSpan, grown: CoreBlocks) -> tuple[tuple[int, ...], ...]:
    """Return the new blocks of an allocation, without the block of a last token that is
    external.
    """
    if not span.whole:
        return grown.blocks
    return tuple(
        blocks if group.is_cross or (span.start - 1) % group.block_size else blocks[1:]
        for group, blocks in zip(core.config.groups, grown.blocks, strict=True)
    )
