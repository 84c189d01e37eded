# SPDX-License-Identifier: Apache-2.0
"""One name for all states that differ only in names: the quotient that makes exploring possible.

Rules: three things are renamed, none of which the core may depend on (EQUIVARIANCE).
Requests, and rows with them (a new one gets some row that is not in use): by their place in an
order that is tried for every permutation of requests that look alike. Blocks: by their first place
in tables in request order, then in the free queue; the null block keeps its number. Tokens: they
matter through equality of prefixes alone, so the nodes of the prefix tree are numbered in the order
of first meeting; adapter, media and salt are part of a prefix. Requires a state whose open batch is
empty and that has no pins. Batch number, events and statistics are left out, and so is `preempted`,
which only chooses a column of the statistics. Twin: none.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import groupby, permutations, product

from kvcore.block_pool import BlockPool
from kvcore.check.prefixes import Letter, Prefixes
from kvcore.hashing import HASH_SIZE
from kvcore.state import NO_HOST_BLOCK, RequestState, State

Name = tuple[int, ...]


def canonical(state: State, prefixes: Prefixes) -> bytes:
    """The least name of a state under renaming; equal names mean equal up to renaming."""
    assert not len(state.batch.commands)
    assert not len(state.batch.records)
    assert not len(state.device.pins)
    name = min(_name(state, order, prefixes) for order in _orders(state))
    return b"".join(number.to_bytes(2, "big") for number in name)


def _orders(state: State) -> Iterator[list[RequestState]]:
    """The orders of requests that are told apart by nothing but names, coarsely sorted."""
    requests = sorted(state.requests.values(), key=_looks)
    ties = [list(tie) for _, tie in groupby(requests, key=_looks)]
    for choice in product(*(permutations(tie) for tie in ties)):
        yield [request for tie in choice for request in tie]


def _looks(request: RequestState) -> Name:
    tables = (*request.tables, *request.host_tables)
    counts = (len(request.tokens), len(request.drafts), request.num_computed)
    return (*counts, *(len(table) for table in tables))


def _name(state: State, order: list[RequestState], prefixes: Prefixes) -> Name:
    tree = _Tree()
    name = [len(order)]
    device, host = _Blocks(range(state.device.first_block)), _Blocks((NO_HOST_BLOCK,))
    for request in order:
        name += [len(request.tokens), len(request.drafts), request.num_computed]
        name += [bool(request.host_tables), request.skip_reading]
        name += tree.names(prefixes.letters(request))
        if request.own_hashes:
            name.append(len(request.block_hashes))
        for group, table in enumerate(request.tables):
            name += [request.num_cached[group], len(table), *device.names(table)]
        for table in request.host_tables:
            name += [len(table), *host.names(table)]
    name += _pool(state.device, device, tree, prefixes)
    if state.host is not None:
        name += _pool(state.host, host, tree, prefixes)
    return tuple(name)


def _pool(pool: BlockPool, blocks: _Blocks, tree: _Tree, prefixes: Prefixes) -> Iterator[int]:
    yield len(pool.queue)
    yield from blocks.names(pool.queue)
    ranks = pool.index.ranks()
    for block in blocks.order():
        key = None if block == NO_HOST_BLOCK else pool.keys[block]
        if key is None:
            yield 0
            continue
        yield 1 + ranks[block]
        yield int.from_bytes(key[HASH_SIZE:], "big")
        letters = prefixes.chain(key)
        yield len(letters)
        yield tree.names(letters)[-1]


class _Blocks:
    """Blocks numbered in the order of first meeting, behind those that keep their numbers."""

    def __init__(self, kept: Iterable[int]) -> None:
        self._numbers = {block: number for number, block in enumerate(kept)}

    def names(self, blocks: Iterable[int]) -> list[int]:
        return [self._numbers.setdefault(block, len(self._numbers)) for block in blocks]

    def order(self) -> list[int]:
        return list(self._numbers)


class _Tree:
    """Prefixes numbered in the order of first meeting; a number says parent and rank, too."""

    def __init__(self) -> None:
        self._nodes: dict[tuple[int, Letter], int] = {}

    def names(self, letters: Iterable[Letter]) -> list[int]:
        node, names = 0, []
        for letter in letters:
            node = self._nodes.setdefault((node, letter), len(self._nodes) + 1)
            names.append(node)
        return names
