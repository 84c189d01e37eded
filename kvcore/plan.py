# SPDX-License-Identifier: Apache-2.0
"""Planning an allocation: every check, and what it would take, before anything changes.

Rules: a plan that raises or refuses has changed nothing. Slots along a request: computed | hit |
external | new | lookahead; external tokens and lookahead are clipped at the model length, new
tokens are not. A write goes to blocks with one owner and no key: a shared block is replaced (copied
if it holds earlier positions), a keyed one loses its key. Hits in the free queue cost capacity,
since they are about to leave it. Source: S000-01 to S000-20, S004-07; design, 7.5. Twin:
rust/src/plan.rs.
"""

from __future__ import annotations

import attrs

from kvcore.arguments import read_count, read_hit
from kvcore.errors import (
    BeyondModelLength,
    CachingDisabled,
    HitsOnRunningRequest,
    InvalidCount,
    StaleHits,
    TooManyTokens,
    WrongHit,
)
from kvcore.state import Draft, RequestState
from kvcore.values import Hit, Reason, Refused


@attrs.frozen(kw_only=True)
class Asked:
    """The arguments of one allocation, by the names of `allocate_slots`."""

    request_id: str
    num_new_tokens: int
    hit: Hit | None = None
    num_lookahead_tokens: int = 0
    num_external_computed_tokens: int = 0
    delay_cache_blocks: bool = False
    full_sequence_must_fit: bool = False


@attrs.frozen(kw_only=True)
class Rewrite:
    """A block of the request that is about to be written although it is shared or keyed.

    shared: a fresh block takes its place. copied: it holds earlier positions, so the fresh one is a
    copy.
    """

    group: int
    position: int
    shared: bool
    copied: bool


@attrs.frozen(kw_only=True)
class Plan:
    """What an allocation will do.

    asked: the arguments, read. hits: hit blocks a group. num_total: computed, hit and external
    tokens. num_scheduled: with the new ones. num_external_blocks: blocks of each group for external
    tokens. num_grown: blocks that each group's table grows by, behind hits and external ones,
    preallocation included.
    """

    asked: Asked
    request: RequestState
    hits: tuple[tuple[int, ...], ...]
    num_total: int
    num_scheduled: int
    rewrites: tuple[Rewrite, ...]
    num_external_blocks: tuple[int, ...]
    num_grown: tuple[int, ...]


def plan_allocation(draft: Draft, asked: Asked) -> Plan | Refused:
    """The plan of an allocation, or its refusal. Changes nothing.

    Raises what `allocate_slots` raises.
    """
    request = draft.on_device(asked.request_id)
    asked = _read_asked(asked)
    hits = check_asked(draft, request, asked)
    limit = draft.config.length_limit
    num_hit_tokens = 0 if asked.hit is None else asked.hit.num_tokens
    num_local = request.num_computed + num_hit_tokens
    num_total = min(num_local + asked.num_external_computed_tokens, limit)
    num_scheduled = num_total + asked.num_new_tokens
    check_length(draft, request, num_total, num_scheduled)
    num_slots = min(num_scheduled + asked.num_lookahead_tokens, limit)
    rewrites = plan_rewrites(draft, request, num_local, num_slots)
    if asked.full_sequence_must_fit:
        num_full = max(num_slots, min(len(request.tokens), limit))
        refused = refuse(draft, request, hits, rewrites, num_full)
        if refused is not None:
            return refused
    refused = refuse(draft, request, hits, rewrites, num_slots)
    if refused is not None:
        return refused
    external, grown = plan_growth(draft, request, hits, rewrites, (num_total, num_slots))
    return Plan(
        asked=asked,
        request=request,
        hits=hits,
        num_total=num_total,
        num_scheduled=num_scheduled,
        rewrites=rewrites,
        num_external_blocks=external,
        num_grown=grown,
    )


def check_asked(draft: Draft, request: RequestState, asked: Asked) -> tuple[tuple[int, ...], ...]:
    """The hit blocks a group; raises for nothing to do, and for wrong hits."""
    if asked.num_new_tokens == 0 and asked.num_external_computed_tokens == 0:
        raise InvalidCount(name="num_new_tokens", value=0, least=1)
    if asked.hit is None or not any(asked.hit.blocks.blocks):
        if asked.hit is not None and asked.hit.num_tokens:
            raise WrongHit(
                request=repr(asked.request_id), num_blocks=0, num_tokens=asked.hit.num_tokens
            )
        return ((),) * len(request.tables)
    check_hit(draft, request, asked.hit)
    return asked.hit.blocks.blocks


def check_hit(draft: Draft, request: RequestState, hit: Hit) -> None:
    """Raise unless the hit is a prefix of the request that the pool still holds under its keys."""
    groups = hit.blocks.blocks
    name, num_blocks = repr(request.request_id), max(len(blocks) for blocks in groups)
    if not draft.config.enable_caching:
        raise CachingDisabled(request=name, num_blocks=num_blocks)
    if any(request.tables):
        raise HitsOnRunningRequest(request=name, num_blocks=num_blocks)
    num_tokens = num_blocks * draft.config.block_size
    fits = len(groups) == len(request.tables) and num_tokens == hit.num_tokens
    fits = fits and all(len(blocks) == num_blocks for blocks in groups)
    if not fits or num_tokens >= len(request.tokens):
        raise WrongHit(request=name, num_blocks=num_blocks, num_tokens=hit.num_tokens)
    for group, blocks in enumerate(groups):
        for position, block in enumerate(blocks):
            draft.device.check_block(block)
            if draft.device.keys[block] != request.key(position, group):
                raise StaleHits(request=name, block=block, position=position)


def check_length(draft: Draft, request: RequestState, num_total: int, num_scheduled: int) -> None:
    """Raise unless the request has the tokens and the model takes them."""
    name = repr(request.request_id)
    if num_scheduled > draft.config.length_limit:
        raise BeyondModelLength(
            request=name, asked=num_scheduled, max_model_len=draft.config.length_limit
        )
    if max(num_total, num_scheduled) > len(request.tokens):
        raise TooManyTokens(request=name, num_tokens=len(request.tokens), asked=num_scheduled)


def plan_rewrites(draft: Draft, request: RequestState, start: int, end: int) -> tuple[Rewrite, ...]:
    """The blocks that a write at positions [start, end) finds shared or keyed, in table order."""
    rewrites = []
    size = draft.config.block_size
    for group, table in enumerate(request.tables):
        for position in range(start // size, min(len(table), -(-end // size))):
            block = table[position]
            shared = draft.device.ref_counts[block] > 1
            if shared or draft.device.keys[block] is not None:
                copied = shared and start > position * size
                rewrites.append(
                    Rewrite(group=group, position=position, shared=shared, copied=copied)
                )
    return tuple(rewrites)


def refuse(
    draft: Draft,
    request: RequestState,
    hits: tuple[tuple[int, ...], ...],
    rewrites: tuple[Rewrite, ...],
    num_slots: int,
) -> Refused | None:
    """The refusal of so many slots, None where they fit."""
    num_blocks = -(-num_slots // draft.config.block_size)
    needed = sum(rewrite.shared for rewrite in rewrites)
    for table, blocks in zip(request.tables, hits, strict=True):
        needed += max(0, num_blocks - len(table) - len(blocks))
        needed += sum(draft.device.ref_counts[block] == 0 for block in blocks)
    available = draft.device.num_free
    if needed <= available:
        return None
    never = num_blocks * len(request.tables) > draft.device.num_usable
    return Refused(Reason.NEVER if never else Reason.LATER, needed, available)


def plan_growth(
    draft: Draft,
    request: RequestState,
    hits: tuple[tuple[int, ...], ...],
    rewrites: tuple[Rewrite, ...],
    tokens: tuple[int, int],
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """External and grown blocks a group, for (num_total, num_slots) tokens that fit."""
    size = draft.config.block_size
    num_total, num_slots = tokens
    external, grown = [], []
    for table, blocks in zip(request.tables, hits, strict=True):
        held = len(table) + len(blocks)
        external.append(max(0, -(-num_total // size) - held))
        grown.append(max(0, -(-num_slots // size) - held - external[-1]))
    in_queue = sum(draft.device.ref_counts[block] == 0 for blocks in hits for block in blocks)
    spare = draft.device.num_free - in_queue - sum(rewrite.shared for rewrite in rewrites)
    spare -= sum(external) + sum(grown)
    extra = -(-draft.config.num_preallocate_tokens // size)
    most = -(-draft.config.length_limit // size)
    for group, table in enumerate(request.tables):
        held = len(table) + len(hits[group]) + external[group] + grown[group]
        if len(table) == 0 or grown[group]:
            more = max(0, min(extra, spare, most - held))
            grown[group] += more
            spare -= more
    return tuple(external), tuple(grown)


def _read_asked(asked: Asked) -> Asked:
    """The same with ints for counts and ids. Raises InvalidCount."""
    return attrs.evolve(
        asked,
        num_new_tokens=read_count("num_new_tokens", asked.num_new_tokens),
        num_lookahead_tokens=read_count("num_lookahead_tokens", asked.num_lookahead_tokens),
        num_external_computed_tokens=read_count(
            "num_external_computed_tokens", asked.num_external_computed_tokens
        ),
        hit=read_hit(asked.hit),
    )
