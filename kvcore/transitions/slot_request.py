# SPDX-License-Identifier: Apache-2.0
"""The arguments of an allocation, read and checked.

Invariants: every misuse is found here, before anything is planned. A hit is accepted only if each
of its blocks still has the request's key.
Source: S000-01, 04, 21, 22, 25. Twin: rust/src/transitions/slot_request.rs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from operator import attrgetter
from typing import Any

from msgspec.structs import replace

from kvcore.state.state import RequestState
from kvcore.state.transaction import Transaction
from kvcore.transitions.requests import check_drafts_settled, check_no_drafts
from kvcore.types.arguments import check_kind, read_count, read_flag, read_int, read_ints
from kvcore.types.errors import (
    BeyondModelLength,
    CachingDisabled,
    HitsOnRunningRequest,
    InOpenBatch,
    InvalidCount,
    NoEncoderGroup,
    NoStateGroup,
    StaleHits,
    TooManyDrafts,
    TooManyTokens,
    UnalignedCheckpoint,
    WrongArgument,
    WrongHit,
)
from kvcore.types.groups import skipped_blocks
from kvcore.types.slot_request import COUNTS, FLAGS, RequestedHit, SlotRequest
from kvcore.types.values import Hit, KVCacheBlocks

_get_counts = attrgetter(*COUNTS)


def make_slot_request(
    request_id: str, num_new_tokens: int, hit: Hit | None, options: Mapping[str, Any]
) -> SlotRequest:
    """Return the arguments of an allocation. Raises WrongArgument for a flag that is not a bool."""
    flags = {name: options[name] for name in FLAGS if name in options}
    if not all(flag is True or flag is False for flag in flags.values()):
        options = {**options, **{name: read_flag(name, flag) for name, flag in flags.items()}}
    read = read_hit(hit)
    return SlotRequest(request_id=request_id, num_new_tokens=num_new_tokens, hit=read, **options)


def read_hit(hit: Hit | None) -> RequestedHit | None:
    """Read a hit; a token count that is not an int is left unchanged."""
    if hit is None:
        return None
    groups: Any = hit.blocks.groups
    plain = type(groups) is tuple and type(hit.num_tokens) is int
    if plain and all(type(ids) is tuple and _all_counts(ids) for ids in groups):
        return RequestedHit(groups, hit.num_tokens)
    groups = tuple(tuple(read_ints(ids)) for ids in hit.blocks.blocks)
    return RequestedHit(groups, read_int(hit.num_tokens))


def read_slot_request(slot_request: SlotRequest) -> SlotRequest:
    """Return the arguments with ints for counts. Raises InvalidCount."""
    given = _get_counts(slot_request)
    if _all_counts(given):
        return slot_request
    counts = {name: read_count(name, value) for name, value in zip(COUNTS, given, strict=True)}
    return replace(slot_request, **counts)


def check_hit_kind(hit: Any) -> None:
    """Raise WrongArgument unless a value is a `Hit` over `KVCacheBlocks`, or None."""
    if hit is None:
        return
    if not isinstance(hit, Hit):
        check_kind("hit", hit, Hit)
    if not isinstance(hit.blocks, KVCacheBlocks):
        check_kind("hit.blocks", hit.blocks, KVCacheBlocks)
    try:
        for ids in hit.blocks.groups:
            iter(memoryview(ids).cast("I") if isinstance(ids, bytes) else ids)
    except TypeError:
        name, value = "hit.blocks.blocks", hit.blocks.groups
        raise WrongArgument(name=name, expected="a tuple of ids per group", value=value) from None


def check_slot_request(
    tx: Transaction, request: RequestState, slot_request: SlotRequest
) -> tuple[tuple[int, ...], ...]:
    """Return the hit blocks per group. Raises if there is nothing to do, for wrong hits and missing
    tokens.
    """
    brings = slot_request.num_external_computed_tokens or _num_hit(slot_request)
    if not (slot_request.num_new_tokens or brings):
        raise InvalidCount(name="num_new_tokens", value=0, least=1)
    if request.drafts:
        check_drafts_settled(request)
        if slot_request.num_output_placeholders:
            check_no_drafts(request)
    name = request.request_id
    if slot_request.num_encoder_tokens and not any(group.is_cross for group in tx.config.groups):
        raise NoEncoderGroup(request=name, num_encoder_tokens=slot_request.num_encoder_tokens)
    hits: tuple[tuple[int, ...], ...] = ((),) * len(request.tables)
    if slot_request.hit is not None and any(slot_request.hit.blocks):
        check_hit(tx, request, slot_request.hit)
        hits = slot_request.hit.blocks
    elif slot_request.hit is not None and slot_request.hit.num_tokens:
        raise WrongHit(request=name, num_blocks=0, num_tokens=slot_request.hit.num_tokens)
    check_length(tx, request, slot_request)
    if tx.config.has_states:
        check_one_unknown(tx, request, slot_request)
        if slot_request.num_external_computed_tokens:
            check_not_begun(tx, request)
    if slot_request.checkpoint:
        check_checkpoint(tx, request, slot_request)
    return hits


def check_hit(tx: Transaction, request: RequestState, hit: RequestedHit) -> None:
    """Raise unless the hit is a prefix of the request that the pool still holds under its keys."""
    groups = hit.blocks
    name, num_blocks = request.request_id, max(len(blocks) for blocks in groups)
    if not tx.config.enable_caching:
        raise CachingDisabled(request=name, num_blocks=num_blocks)
    if any(request.tables):
        raise HitsOnRunningRequest(request=name, num_blocks=num_blocks)
    sizes = [group.block_size for group in tx.config.groups]
    fits = len(groups) == len(sizes) and isinstance(hit.num_tokens, int)
    fits = fits and 0 < hit.num_tokens < request.tokens.length
    fits = fits and hit.num_tokens % tx.config.hit_alignment == 0
    fits = fits and all(
        len(blocks) == -(-hit.num_tokens // size)
        for blocks, size in zip(groups, sizes, strict=True)
    )
    fits = fits and hit.num_tokens <= len(request.block_hashes) * tx.config.hash_block_size
    if not fits:
        raise WrongHit(request=name, num_blocks=num_blocks, num_tokens=hit.num_tokens)
    for group_id, blocks in enumerate(groups):
        skipped = skipped_blocks(tx.config.groups[group_id], hit.num_tokens)
        for position, block in enumerate(blocks):
            if position < skipped and block == 0:
                continue
            tx.device.check_block(block)
            key = hit_key(tx, request, hit, (group_id, position))
            size, is_state = sizes[group_id], tx.config.groups[group_id].is_state
            if (position + 1) * size > hit.num_tokens and not is_state:
                is_held = key in tx.device.tail_keys(block)
            else:
                is_held = tx.device.keys[block] == key
            if not is_held:
                raise StaleHits(request=name, block=block, position=position)


def hit_key(
    tx: Transaction, request: RequestState, hit: RequestedHit, place: tuple[int, int]
) -> bytes:
    """Return the key that the block of a hit at a place (group, position) has."""
    group_id, position = place
    group = tx.config.groups[group_id]
    if (position + 1) * group.block_size > hit.num_tokens:
        return request.key_at(tx.config, group_id, hit.num_tokens)
    return request.key(tx.config, group_id, position)


def check_length(tx: Transaction, request: RequestState, slot_request: SlotRequest) -> None:
    """Raise unless the request has the tokens, including drafts and tokens to come, and the model's
    length allows them.
    """
    name, limit = request.request_id, tx.config.length_limit
    local, total, end = step_ends(tx, request, slot_request)
    scheduled = max(local, end)
    if scheduled > limit:
        raise BeyondModelLength(request=name, requested=scheduled, max_model_len=limit)
    num_tokens = request.tokens.length
    known = max(total, num_tokens + len(request.drafts))
    beyond = total > max(request.num_computed, num_tokens)
    if beyond or scheduled > known + slot_request.num_output_placeholders:
        raise TooManyTokens(request=name, num_tokens=num_tokens, requested=scheduled)


def step_ends(
    tx: Transaction, request: RequestState, slot_request: SlotRequest
) -> tuple[int, int, int]:
    """Return the tokens that are computed or hit, those with the external ones behind them, and
    those after the step.
    """
    local = request.num_computed + _num_hit(slot_request)
    total = min(local + slot_request.num_external_computed_tokens, tx.config.length_limit)
    return local, total, total + slot_request.num_new_tokens


def check_one_unknown(tx: Transaction, request: RequestState, slot_request: SlotRequest) -> None:
    """Raise TooManyDrafts if a step of state groups would compute more drafts than it may keep
    states of, or more than one token to come: a state cannot be cut back to the accepted ones. All
    calls of a batch are one step.
    """
    local, _, end = step_ends(tx, request, slot_request)
    record = tx.scheduled[request.row]
    start = local if record is None else min(local, record.num_computed_before)
    unknown, most = end - max(start, request.tokens.length), 1
    if request.drafts:
        most = min(group.draft_states for group in tx.config.groups if group.is_state)
    if unknown > most:
        raise TooManyDrafts(request=request.request_id, num_drafts=unknown, most=most)


def check_not_begun(tx: Transaction, request: RequestState) -> None:
    """Raise InOpenBatch if the open batch computes tokens of a request that gets external ones,
    which would overwrite its state before the forward pass has read it. Its hit may be in the
    batch.
    """
    record, count = tx.scheduled[request.row], request.num_computed
    if record is None or count == record.num_computed_before:
        return
    own_first = count == 1 or any(group.is_cross for group in tx.config.groups)  # is kept, too
    if (count > record.num_kept or own_first) and not _only_brought(tx, request):
        raise InOpenBatch(kind="request", value=request.request_id)


def _only_brought(tx: Transaction, request: RequestState) -> bool:
    """Return whether the last of a request's tokens in the open batch are external ones or its
    hit. The state after a hit has a key; the batch itself gives none until it is taken.
    """
    name, count = request.request_id, request.num_computed
    mine = (each for each in tx.loads if each.reporters[0].request_id == name)
    if any(each.batch == tx.batch.number and each.end == count for each in mine):
        return True
    groups = zip(tx.config.groups, request.tables, strict=True)
    states = [table[-1] for group, table in groups if group.is_state and table]
    return any(tx.device.keys[block] is not None for block in states)


def check_checkpoint(tx: Transaction, request: RequestState, slot_request: SlotRequest) -> None:
    """Raise unless there are states, and a hit can end where the call does, with known tokens."""
    if not tx.config.has_states:
        raise NoStateGroup(request=request.request_id)
    multiple = tx.config.hit_alignment
    _, _, end = step_ends(tx, request, slot_request)
    if end % multiple or end > request.tokens.length:
        raise UnalignedCheckpoint(
            request=request.request_id,
            num_tokens=request.tokens.length,
            requested=end,
            multiple=multiple,
        )


def _num_hit(slot_request: SlotRequest) -> int:
    """Count the tokens of the hit."""
    return 0 if slot_request.hit is None else slot_request.hit.num_tokens


def _all_counts(values: Iterable[Any]) -> bool:
    """Return whether all values are plain counts: the usual case, which is cheap to detect."""
    for value in values:  # noqa: SIM110 - a generator takes twice as long
        if type(value) is not int or value < 0:
            return False
    return True
