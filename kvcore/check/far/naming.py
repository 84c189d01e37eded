# SPDX-License-Identifier: Apache-2.0
"""The name of a client and its tier: all that decides what they do next, and no more.

Which slot holds a page, and the numbers of tickets, operations and batches, do not matter; their
order does. A page is named by a digest of its bytes. A free slot holds zeros.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable

from kvcore.check.far.engine import FarRun
from kvcore.check.far.tier import key_in, place_of
from kvcore.check.names.canonical import LOST, Name, Renaming
from kvcore.far.fetches import Fetch, FetchState
from kvcore.far.link import Ticket
from kvcore.far.tier import View

STATES = list(FetchState)
OPERATIONS = ("find", "load", "store")
EPOCHS = {place_of(epoch).name(b"").split("/")[1]: epoch for epoch in range(3)}


def epoch_of(name: str) -> int:
    """Return the epoch whose weights the name of a page stands for."""
    return EPOCHS.get(name.split("/")[1], len(EPOCHS))


def name_of_far(run: FarRun, names: Renaming) -> Name:
    """Return the part of a node's name that the core's lacks."""
    client, tier, state = run.client, run.tier, run.manager.state
    link, fetches, stores = client._link, client._fetches, client._stores
    place = link._place
    name: Name = [link.is_up, link._breaker._num_failures.total(), link._place_epoch]
    name += [LOST if place is None else epoch_of(place.name(b""))]
    owners = {each: fetch.sequence.sequence_id for each, fetch in fetches._by_ticket.items()}
    tickets = [each for _, each in sorted(link._tickets.items())]
    name += [
        len(run.slots.used),
        len(tickets),
        len(tier.pending),
        len(fetches._fetches),
        len(fetches._loaded),
    ]
    for ticket in tickets:
        name += [names.places.get(owners.get(ticket, ""), LOST), *_ticket(run, ticket, names)]
    for request in names.order:
        sequence = run.engine.sequences[request.request_id]
        first = stores._next.get(request.request_id, [LOST])[0]
        name += [sequence.is_loading, first]
        name += _fetch(run, fetches._fetches.get(request.request_id), names)
    ranks = {number: rank for rank, number in enumerate(sorted(state.operations))}
    for operation, load in sorted(fetches._loads.items()):
        name += [ranks.get(operation, LOST), load.fetch is not None, *_page(load.name, names)]
        name += [*_batch(run, load.batch), *_slots(run, [load.slot])]
    for operation, store in sorted(stores._operations.items()):
        name += [ranks.get(operation, LOST), *_page(store.name, names), *_batch(run, store.batch)]
        name += _slots(run, [store.slot])
    for store in stores._copied:
        name += [*_page(store.name, names), *_slots(run, [store.slot])]
    name += [len(fetches._loads), len(stores._operations), len(stores._copied)]
    for each in run.engine.finished:
        name += [ranks.get(each.operation, LOST), each.done]
    for entry in sorted(
        (*_page(page, names), *_digest(held)) for page, held in tier.entries.items()
    ):
        name += entry
    known = sorted(_page(page, names) for page in fetches._known._names)
    return [*name, len(tier.entries), len(known), *(number for each in known for number in each)]


def _ticket(run: FarRun, ticket: Ticket, names: Renaming) -> Name:
    name = [OPERATIONS.index(ticket.operation), ticket.is_given_up, len(ticket.names)]
    name += [number for page in ticket.names for number in _page(page, names)]
    return name + _slots(run, ticket.slots)


def _fetch(run: FarRun, fetch: Fetch | None, names: Renaming) -> Name:
    if fetch is None:
        return [0]
    name = [1 + STATES.index(fetch.state), len(fetch.found), len(fetch.pages)]
    for page in sorted(fetch.found):
        name += _page(page, names)
    for page, slot in sorted(fetch.pages.items()):
        name += [*_page(page, names), *_slots(run, [slot])]
    return name


def _page(name: str, names: Renaming) -> Name:
    return [epoch_of(name), *names.key(key_in(name))]


def _batch(run: FarRun, number: int) -> Name:
    return [min(run.engine.open_number - number, 2)]


def _slots(run: FarRun, slots: Iterable[int | None]) -> Name:
    held = (b"" if slot is None else run.slots.views[slot] for slot in slots)
    return [number for each in held for number in _digest(each)]


def _digest(held: bytes | View) -> Name:
    if not any(held):
        return [0]
    return list(struct.unpack(">4H", hashlib.blake2b(held, digest_size=8).digest()))
