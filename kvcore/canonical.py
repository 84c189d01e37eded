# SPDX-License-Identifier: Apache-2.0
"""One name for all states that differ only in names: the quotient that makes exploring possible.

Rules: three things are renamed, none of which the core may depend on (EQUIVARIANCE).
Requests, and rows with them (a new one gets some row that is not in use): by their place in an
order that is tried for every permutation of requests that look alike. Blocks: by their first place
in tables in request order, then in the free queue. Tokens: they matter through equality of prefixes
alone, so the nodes of the prefix tree are numbered in the order of first meeting. Requires a state
whose open batch is empty and that has no pins. Batch number, events and statistics are left out,
and so is `preempted`, which only chooses a column of the statistics. Twin: none.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import groupby, permutations, product

from kvcore.block_pool import BlockPool
from kvcore.hashing import HASH_SIZE
from kvcore.state import RequestState, State

Name = tuple[int, ...]


class Chains:
    """The tokens that each block hash stands for, learnt from the requests that are seen."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._tokens: dict[bytes, tuple[int, ...]] = {}

    def learn(self, state: State) -> None:
        """Take in the hashes of a state's requests."""
        for request in state.requests.values():
            for position, block_hash in enumerate(request.block_hashes):
                if block_hash not in self._tokens:
                    end = (position + 1) * self._block_size
                    self._tokens[block_hash] = tuple(request.tokens[:end])

    def tokens(self, key: bytes) -> tuple[int, ...]:
        """The prefix that a block under a key ends."""
        return self._tokens[key[:HASH_SIZE]]


def canonical(state: State, chains: Chains) -> bytes:
    """The least name of a state under renaming; equal names mean equal up to renaming."""
    assert not len(state.batch.commands)
    assert not len(state.batch.records)
    assert not len(state.device.pins)
    name = min(_name(state, order, chains) for order in _orders(state))
    return b"".join(number.to_bytes(2, "big") for number in name)


def _orders(state: State) -> Iterator[list[RequestState]]:
    """The orders of requests that are told apart by nothing but names, coarsely sorted."""
    requests = sorted(state.requests.values(), key=_looks)
    ties = [list(tie) for _, tie in groupby(requests, key=_looks)]
    for choice in product(*(permutations(tie) for tie in ties)):
        yield [request for tie in choice for request in tie]


def _looks(request: RequestState) -> Name:
    tables = (*request.tables, *request.host_tables)
    return (len(request.tokens), request.num_computed, *(len(table) for table in tables))


def _name(state: State, order: list[RequestState], chains: Chains) -> Name:
    tree = _Tree()
    name = [len(order)]
    device, host = _Blocks(), _Blocks()
    for request in order:
        name += [len(request.tokens), request.num_computed, bool(request.host_tables)]
        name += tree.names(request.tokens)
        for group, table in enumerate(request.tables):
            name += [request.num_cached[group], len(table), *device.names(table)]
        for table in request.host_tables:
            name += [len(table), *host.names(table)]
    name += _pool(state.device, device, tree, chains)
    if state.host is not None:
        name += _pool(state.host, host, tree, chains)
    return tuple(name)


def _pool(pool: BlockPool, blocks: _Blocks, tree: _Tree, chains: Chains) -> Iterator[int]:
    yield len(pool.queue)
    yield from blocks.names(pool.queue)
    for block in blocks.order():
        key = pool.keys[block]
        if key is None:
            yield 0
            continue
        yield 1 + pool.index[key].index(block)
        yield int.from_bytes(key[HASH_SIZE:], "big")
        tokens = chains.tokens(key)
        yield len(tokens)
        yield tree.names(tokens)[-1]


class _Blocks:
    """Blocks numbered in the order of first meeting."""

    def __init__(self) -> None:
        self._numbers: dict[int, int] = {}

    def names(self, blocks: Iterable[int]) -> list[int]:
        return [self._numbers.setdefault(block, len(self._numbers)) for block in blocks]

    def order(self) -> list[int]:
        return list(self._numbers)


class _Tree:
    """Prefixes numbered in the order of first meeting; a number says parent and rank, too."""

    def __init__(self) -> None:
        self._nodes: dict[tuple[int, int], int] = {}

    def names(self, tokens: Iterable[int]) -> list[int]:
        node, names = 0, []
        for token in tokens:
            node = self._nodes.setdefault((node, token), len(self._nodes) + 1)
            names.append(node)
        return names
