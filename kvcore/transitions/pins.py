# SPDX-License-Identifier: Apache-2.0
"""Pins: owners of blocks that are not requests, to keep content.

A pin of a prefix has a name and outlives the request. It holds what a later request must find to
hit that prefix, each block once, and only what no unfinished batch computes for the request. After
`advance_epoch` it still holds its blocks, which no look-up finds any more.
Twin: rust/src/transitions/pins.rs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import chain

from kvcore.state.state import NamedPin, RequestState, State
from kvcore.state.transaction import Transaction, transition
from kvcore.transitions.in_flight import num_finished, unfinished_keys
from kvcore.transitions.prefix_lookup import aligned, common_length, needed, needed_tails
from kvcore.transitions.requests import is_text
from kvcore.transitions.unconfirmed_loads import is_unconfirmed
from kvcore.types.arguments import read_count, read_ints
from kvcore.types.errors import (
    EmptyPinName,
    LoadUnconfirmed,
    NothingToPin,
    RepeatedPin,
    StaleRequest,
    TooManyPinned,
    UnknownPin,
)
from kvcore.types.values import Outcome


def pin(state: State, block_ids: Iterable[int]) -> Outcome[State, None]:
    """Hold blocks that have an owner or a key, once per occurrence in the list.

    Raises UnknownBlock, UnusedBlock.
    """
    blocks = read_ints(block_ids)

    def change(tx: Transaction) -> None:
        tx.device.check_pins(blocks)
        for block in blocks:
            tx.device.pin(block)

    return transition(state, change)


def unpin(state: State, block_ids: Iterable[int]) -> Outcome[State, None]:
    """Undo `pin`; what an unfinished operation or a pin of a prefix holds stays.

    Raises UnknownBlock, NotPinned.
    """
    blocks = read_ints(block_ids)

    def change(tx: Transaction) -> None:
        held = Counter(operation.block for operation in tx.operations.values())
        held.update(_named(tx))
        tx.device.check_unpins(blocks, held)
        for block in blocks:
            tx.device.unpin(block)

    return transition(state, change)


def pin_prefix(state: State, name: str, request_id: str, num_tokens: int) -> Outcome[State, int]:
    """Hold the blocks that a hit on a request's first tokens needs until `unpin_prefix`; value: the
    tokens that they cover.

    It covers what finished batches computed and a look-up finds now, whole blocks as a rule; the
    request's own blocks are preferred to others of the same content. Raises EmptyPinName,
    RepeatedPin, UnknownRequest, SwappedOut, LoadUnfinished, InvalidCount, StaleRequest,
    NothingToPin, LoadUnconfirmed, TooManyPinned.
    """

    def change(tx: Transaction) -> int:
        if not isinstance(name, str) or not name or not is_text(name):
            raise EmptyPinName(value=name)
        if name in tx.named_pins:
            raise RepeatedPin(pin=name)
        request = tx.idle(request_id)
        count = read_count("num_tokens", num_tokens, 1)
        if tx.is_stale(request):
            raise StaleRequest(request=request_id, epoch=request.epoch, current=tx.epoch)
        covered, blocks = _prefix(state, tx, request, count)
        num_blocks, most = len({*blocks, *_named(tx)}), tx.config.most_pinned
        if num_blocks > most:
            raise TooManyPinned(pin=name, num_blocks=num_blocks, most=most)
        tx.named_pins = tx.named_pins.set(name, NamedPin(tx.epoch, blocks))
        for block in blocks:
            tx.device.pin(block)
        return covered

    return transition(state, change)


def unpin_prefix(state: State, name: str) -> Outcome[State, None]:
    """Undo `pin_prefix`: its blocks lose an owner, the last one first. Raises UnknownPin."""

    def change(tx: Transaction) -> None:
        known = tx.named_pins.get(name) if isinstance(name, str) else None
        if known is None:
            raise UnknownPin(pin=name)
        tx.named_pins = tx.named_pins.delete(name)
        for block in reversed(known.blocks):
            tx.device.unpin(block)

    return transition(state, change)


def _named(tx: Transaction) -> Iterable[int]:
    """Return the blocks that pins of prefixes hold, once for each pin."""
    return chain.from_iterable(each.blocks for each in tx.named_pins.values())


def _prefix(
    state: State, tx: Transaction, request: RequestState, count: int
) -> tuple[int, tuple[int, ...]]:
    """Find the longest prefix of at most `count` tokens that is finished and found: its tokens, and
    the blocks that a hit of it needs, group by group. Raises NothingToPin, LoadUnconfirmed.
    """
    config, record, finished = tx.config, tx.scheduled[request.row], 0
    if config.enable_caching:
        finished = num_finished(tx, request)
        if record is not None:
            finished = min(finished, record.num_computed_before)
    most = min(count, finished, len(request.block_hashes) * config.hash_block_size)
    part = "part of a block" if config.has_tails else "whole block"
    reason = f"{finished} are computed, and no {part} of them is found"
    unfinished = unfinished_keys(tx)
    while length := common_length(state, request, aligned(config, most), most):
        found = list(_needed_blocks(state, tx, request, length))
        late = [(end, block) for block, key, end in found if (block, key) in unfinished]
        if not late:
            break
        most = min(length, min(late)[0]) - 1
        reason = f"block {min(late)[1]} is found, but an unfinished batch may withdraw its key"
    if not config.enable_caching:
        reason = "prefix caching is off"
    if length and not found:  # a chunk begins at their end
        reason = f"a hit of {length} needs no block"
    if not length or not found:
        raise NothingToPin(request=request.request_id, requested=count, reason=reason)
    for block, _, _ in found:
        if tx.loads and is_unconfirmed(tx, block):
            raise LoadUnconfirmed(block=block)
    return length, tuple(dict.fromkeys(block for block, _, _ in found))


def _needed_blocks(
    state: State, tx: Transaction, request: RequestState, length: int
) -> Iterator[tuple[int, bytes, int]]:
    """Yield the blocks that a hit of a request's first tokens needs, each with the key under which
    it is found and the number of tokens that the key names.
    """
    config = tx.config
    sizes = [group.block_size for group in config.groups]
    for group_id, table in enumerate(request.tables):
        for position in sorted(needed(config, group_id, length)):
            is_state = config.groups[group_id].is_state
            end = length if is_state else (position + 1) * sizes[group_id]
            key = request.key_at(config, group_id, end)
            own = tx.device.keys[table[position]] == key
            yield table[position] if own else state.device.index.firsts[key], key, end
        for end in needed_tails(config, group_id, length):
            key, position = request.key_at(config, group_id, end), end // sizes[group_id]
            held = table[position] if position < len(table) else None
            if held is None or key not in tx.device.tail_keys(held):
                held = tx.device.first_tail(key)
            assert held is not None, "IDX-COMPLETE: the look-up has found it"
            yield held, key, end
