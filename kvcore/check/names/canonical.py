# SPDX-License-Identifier: Apache-2.0
"""Canonical names: one name for all states that differ only in names, so that these are explored
once.

Three kinds of names are renamed, none of which the core may depend on (EQUIVARIANCE); each renaming
can be switched off (`Symmetry`). Requests, and their rows, are named by their position in an order;
every permutation of requests that look alike is tried. A row without a request counts only while a
batch writes by its table; which row a new request gets, and until when rows are held back, does not
matter. Blocks are named by their first position in tables in request order, then in the free queue,
then among the pinned ones; the null block keeps its number. Tokens matter only through the equality
of prefixes, so the nodes of the prefix tree are numbered in the order in which they are met;
adapter, media and salt are part of a prefix. The open batch, events and statistics are left out,
and so is `preempted`, which only chooses a column of the statistics.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Iterable, Iterator
from itertools import groupby, permutations, product

from kvcore.check.names.digest import Lately
from kvcore.check.world.keyed import found_by_tails, tail_keys
from kvcore.check.world.world import Symmetry, by_row
from kvcore.oracle.contents import group_of
from kvcore.oracle.prefixes import Letter, Prefixes
from kvcore.pool.block_pool import BlockPool
from kvcore.pool.floors import Floors
from kvcore.pool.free_queue import num_older
from kvcore.pool.policy_state import KEYLESS
from kvcore.pool.retention_state import NOTHING, RetentionState
from kvcore.state.state import NO_HOST_BLOCK, RequestState, State
from kvcore.types.policy import Uses

Name = list[int]
ALL = Symmetry()
FINGERPRINT_BYTES = 16
NAMES_KEPT = 15_000
LOST = 9999
OLD = 9998
"""The rank of a block that is not found under its key, since a broken state needs a name, too."""


def canonical(
    state: State, prefixes: Prefixes, symmetry: Symmetry = ALL, more: More | None = None
) -> bytes:
    """Return the least name of a state under renaming; equal names mean states that are equal up to
    renaming.

    more: further content of the name, under the same renaming.
    """
    names = [
        _name(state, order, pinned, prefixes, symmetry, more)
        for order in orders(state, symmetry)
        for pinned in permutations(pinned_alone(state))
    ]
    return to_bytes(min(names))


class CanonicalNames:
    """The names of states; those of recently met states are kept.

    full: keep whole names; else 128 bits of them.
    """

    def __init__(self, prefixes: Prefixes, symmetry: Symmetry, *, full: bool = False) -> None:
        self._prefixes = prefixes
        self._symmetry = symmetry
        self._full = full
        self._known: Lately[bytes] = Lately(NAMES_KEPT)

    def of(self, state_digest: bytes, state: State) -> bytes:
        """Return the name of a state. state_digest: its digest."""
        name = self._known.get(state_digest)
        if name is None:
            name = canonical(state, self._prefixes, self._symmetry)
            name = name if self._full else fingerprint(name)
            self._known.put(state_digest, name)
        return name


def fingerprint(name: bytes) -> bytes:
    """Return 128 bits of a name."""
    return hashlib.blake2b(name, digest_size=FINGERPRINT_BYTES).digest()


def to_bytes(name: Name) -> bytes:
    """Return a name as bytes."""
    return struct.pack(f">{len(name)}H", *name)


def orders(state: State, symmetry: Symmetry) -> Iterator[list[RequestState]]:
    """Yield the orders of requests that differ by nothing but names, after a coarse sort."""
    if not symmetry.requests:
        yield by_row(state)
        return
    requests = sorted(state.requests.values(), key=_looks)
    if len(requests) < 2:
        yield requests
        return
    ties = [list(tie) for _, tie in groupby(requests, key=_looks)]
    for choice in product(*(permutations(tie) for tie in ties)):
        yield [request for tie in choice for request in tie]


def pinned_alone(state: State) -> list[int]:
    """Return the device blocks that only pins hold: nothing else orders them."""
    if not len(state.device.pins):
        return []
    held = {block for each in state.requests.values() for table in each.tables for block in table}
    held |= {operation.block for operation in state.operations.values()}
    held |= {block for pin in state.named_pins.values() for block in pin.blocks}
    return [block for block in sorted(state.device.pins) if block not in held]


def _looks(request: RequestState) -> tuple[int, ...]:
    tables = (*request.tables, *request.host_tables)
    counts = (len(request.tokens), len(request.drafts), request.num_computed)
    return (*counts, *(len(table) for table in tables))


def _name(
    state: State,
    order: list[RequestState],
    pinned: tuple[int, ...],
    prefixes: Prefixes,
    symmetry: Symmetry,
    more: More | None,
) -> Name:
    tree = Tree() if symmetry.tokens else NamedTree()
    device, host = blocks_of(state, symmetry)
    name = [len(order)]
    if not symmetry.requests:
        for request in order:
            name += [request.row, len(request.request_id), *request.request_id.encode()]
        name += [len(state.rows), len(state.free_rows), *state.free_rows]
        name += [row for row, _ in state.held_rows]
    for request in order:
        name += [len(request.tokens), len(request.drafts), request.num_computed]
        name += [bool(request.host_tables), request.skip_reading]
        name += tree.names(prefixes.letters(request))
        if request.own_hashes:
            name.append(len(request.block_hashes))
        for group_id, table in enumerate(request.tables):
            name += [request.num_cached[group_id], len(table), *device.names(table)]
        for table in request.host_tables:
            name += [len(table), *host.names(table)]
    if state.epoch:
        name += [state.epoch, num_older(state.device.queue)]
        name += [*(each.starts_epoch for each in state.in_flight), state.batch.starts_epoch]
        name += [request.epoch for request in order]
    held = [each.block for _, each in sorted(state.operations.items())]
    held += [block for _, pin in sorted(state.named_pins.items()) for block in pin.blocks]
    places = {batch.number: place for place, batch in enumerate(state.in_flight)}
    places[state.batch.number] = len(places)
    name += _pool(state.device, places, device, (*held, *pinned), tree, prefixes)
    for pin_name, pin in sorted(state.named_pins.items()):
        name += [len(pin_name), *pin_name.encode(), pin.epoch]
        name += [len(pin.blocks), *device.names(pin.blocks)]
    if state.device.floors is not None:
        name += tenants(state, state.device.floors, order, device)
    if state.device.retention is not None:
        name += levels(state.device.retention, order, device)
    if state.host is not None:
        name += _pool(state.host, places, host, (), tree, prefixes)
    if state.next_due:
        dues = [state.waiting[request.request_id][0] for request in order]
        name += [sorted(dues).index(due) for due in dues]
    name += _remembered(state.device, device, tree, prefixes)
    renaming = Renaming(order, device, host, tree, prefixes)
    if state.in_flight or len(state.operations) or len(state.batch.published_keys) or state.loads:
        name += in_flight(state, renaming)
    if more is not None:
        name += more(renaming)
    return name


def blocks_of(state: State, symmetry: Symmetry) -> tuple[Blocks, Blocks]:
    """Return an empty numbering of the blocks of both tiers."""
    host = range(0 if state.host is None else state.host.num_blocks)
    kept = state.device.first_block if symmetry.blocks else state.device.num_blocks
    return Blocks(range(kept)), Blocks((NO_HOST_BLOCK, *(() if symmetry.blocks else host)))


def _pool(
    pool: BlockPool,
    batches: dict[int, int],
    blocks: Blocks,
    pinned: tuple[int, ...],
    tree: Tree,
    prefixes: Prefixes,
) -> Name:
    """Return the names of a pool's blocks, and what is known of each. batches: their positions."""
    name = [pool.num_free, *blocks.names(pool.queue)]
    waiting = pool.quarantine
    if waiting is not None and (len(waiting) or len(waiting.busy)):
        name += [len(waiting), *blocks.names(waiting)]
    if len(pool.pins):
        blocks.names(pinned)
        name += [pool.pins.get(block, 0) for block in blocks.order()]
    if waiting is not None and len(waiting.busy):
        for block in blocks.order():
            users = waiting.busy.get(block, ())
            name += [len(users), *sorted(batches.get(user, LOST) for user in users)]
    ranks = pool.index.ranks() if len(pool.index) else {}
    for block in blocks.order():
        key = None if block == NO_HOST_BLOCK else pool.keys[block]
        if key is None:
            name.append(OLD if block in pool.older else 0)
            continue
        letters = prefixes.chain(key)
        name += [1 + ranks.get(block, LOST), group_of(key), len(letters)]
        name += tree.names(letters)[-tree.width :]
    for block in blocks.order() if pool.tails is not None else ():
        name.append(len(tail_keys(pool, block)))
        for key in tail_keys(pool, block):
            letters, others = prefixes.chain(key), found_by_tails(pool).get(key, ())
            rank = others.index(block) if block in others else LOST
            name += [rank, group_of(key), len(letters), *tree.names(letters)[-tree.width :]]
    return name


def tenants(state: State, floors: Floors, order: list[RequestState], blocks: Blocks) -> Name:
    """Name the tenants of requests, and of the blocks that were met, if these have content."""
    salts = (request.extra_keys.cache_salt for request in order)
    name = [state.config.tenant_of(salt) for salt in salts]
    pool = state.device
    for block in blocks.order():
        has_content = pool.ref_counts[block] or pool.has_key(block)
        name.append(floors.takers[block] if has_content else 0)
    return name


def levels(known: RetentionState, order: list[RequestState], blocks: Blocks) -> Name:
    """Return the time, the wishes for the blocks that were met, and the wishes of requests."""
    name = [known.now]
    for block in blocks.order():
        name += known.kept.get(block, NOTHING)
    for request in order:
        name.append(len(request.wishes))
        name += [each for first, wish in request.wishes for each in (first, *wish)]
    return name


def _remembered(pool: BlockPool, blocks: Blocks, tree: Tree, prefixes: Prefixes) -> Name:
    """Return the eviction policy's memory of each block, and of evicted content, oldest first."""
    policy = pool.policy
    if policy is None or not policy.is_remembered:
        return []
    name = [word for number in policy.memory for word in _words(number)] + [len(policy.left)]
    for block in blocks.order():
        known = policy.uses.get(block)
        name += [0] if known is None else _uses(known)
    for _, key in sorted(policy.left.items()):
        letters = prefixes.chain(key)
        name += [group_of(key), len(letters), *tree.names(letters)[-tree.width :]]
        name += _uses(policy.ghosts[key])
    return name


def _uses(known: Uses) -> Name:
    section, order = known.place or KEYLESS
    return [known.uses, known.last, known.before, known.depth, section, *_words(order)]


def _words(number: int) -> Name:
    """Split a number into words of 64 bits."""
    return [number >> 48, number >> 32 & 0xFFFF, number >> 16 & 0xFFFF, number & 0xFFFF]


class Renaming:
    """The names that one order of the requests gives to everything."""

    def __init__(
        self,
        order: list[RequestState],
        device: Blocks,
        host: Blocks,
        tree: Tree,
        prefixes: Prefixes,
    ) -> None:
        self.order = order
        self.device = device
        self.host = host
        self.tree = tree
        self.prefixes = prefixes
        self.places = {request.request_id: place for place, request in enumerate(order)}
        self._rows = {request.row: place for place, request in enumerate(order)}
        self._taken = set(self._rows)

    def row(self, row: int) -> int:
        """Return a row's name: the position of its request, or a number after these, in the order
        of first meeting.
        """
        return self._rows.setdefault(row, len(self._rows))

    def has_request(self, row: int) -> bool:
        """Return whether a row has a request."""
        return row in self._taken

    def key(self, key: bytes) -> Name:
        """Return the meaning of a key: its group and prefix."""
        letters = self.prefixes.chain(key)
        group_id = group_of(key)
        return [group_id, len(letters), *self.tree.names(letters)[-self.tree.width :]]


More = Callable[[Renaming], Name]


def in_flight(state: State, names: Renaming) -> Name:
    """Return the records of batches in flight and of operations."""
    numbers = [batch.number for batch in state.in_flight]
    name = [len(state.in_flight), len(state.batch.published_keys)]
    for block, key in state.batch.published_keys:
        name += [*names.device.names([block]), *names.key(key)]
    for batch in state.in_flight:
        rows = sorted(names.row(row) for row in batch.rows if names.has_request(row))
        name += [len(batch.entries), len(batch.published_keys), len(rows)]
        by_order = sorted(batch.entries.items(), key=lambda item: item[1].order)
        for request_id, entry in by_order:
            place = names.places.get(request_id, LOST)
            name += [place, entry.before, entry.restore, entry.publishes]
            name += [*entry.held, len(entry.replaced)]
            name += [each for at in sorted(entry.replaced) for each in at]
        for block, key in batch.published_keys:
            name += [*names.device.names([block]), *names.key(key)]
        for owed in batch.owed:
            name += [1, *names.device.names([owed.block]), *names.key(owed.key)]
        name += rows
    name.append(len(state.operations))
    for _, operation in sorted(state.operations.items()):
        waits = names.places.get(operation.request_id or "", LOST)
        later = sum(number <= operation.batch for number in numbers)
        name += [later, operation.batch in numbers, waits, operation.first_token]
        name += names.key(operation.key)
    for request in names.order if len(state.operations) else ():
        name += [request.num_loading, request.load_end]
    for load in state.loads:
        later = sum(number <= load.batch for number in numbers)
        name += [later, load.first, load.end, len(load.reporters), len(load.blocks)]
        for each in load.reporters:
            name += [names.places.get(each.request_id, LOST), each.counted, each.most]
        for block, end in load.blocks:
            name += [*names.device.names([block]), end]
    return name


class Blocks:
    """Blocks numbered in the order of first meeting, after those that keep their numbers."""

    def __init__(self, kept: Iterable[int]) -> None:
        self._numbers = {block: number for number, block in enumerate(kept)}

    def names(self, blocks: Iterable[int]) -> list[int]:
        """Return the numbers of these blocks, met in this order."""
        numbers = self._numbers
        return [numbers.setdefault(block, len(numbers)) for block in blocks]

    def order(self) -> list[int]:
        """Return the blocks that were met, by their numbers."""
        return list(self._numbers)


class Tree:
    """Prefixes numbered in the order of first meeting; a number also encodes parent and rank.

    width: how many numbers the last letter of a prefix takes.
    """

    width = 1

    def __init__(self) -> None:
        self._nodes: dict[tuple[int, Letter], int] = {}

    def names(self, letters: Iterable[Letter]) -> list[int]:
        """Return a number for the prefix that ends with each letter."""
        node, names, nodes = 0, [], self._nodes
        for letter in letters:
            node = nodes.setdefault((node, letter), len(nodes) + 1)
            names.append(node)
        return names


class NamedTree(Tree):
    """Prefixes named by their content: 128 bits of it."""

    width = 8

    def names(self, letters: Iterable[Letter]) -> list[int]:
        """Return eight numbers for the prefix that ends with each letter."""
        names: list[int] = []
        so_far: list[Letter] = []
        for letter in letters:
            so_far.append(letter)
            digest = hashlib.blake2b(repr(so_far).encode(), digest_size=16).digest()
            names += struct.unpack(">8H", digest)
        return names
