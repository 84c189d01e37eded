# SPDX-License-Identifier: Apache-2.0
"""Seeded bugs of a far tier's client: what it believes, and whose slots are whose."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace
from pyrsistent import pvector

from kvcore.check.far import tier as far_tier
from kvcore.check.mutants.seeding import Patcher, mutant
from kvcore.check.profiles.far import far_world
from kvcore.check.search import far_model
from kvcore.check.world.world import Far
from kvcore.far import page
from kvcore.far.client import FarClient
from kvcore.far.fetches import Fetches
from kvcore.far.link import TierLink
from kvcore.far.slots import Slots
from kvcore.far.stores import Stores
from kvcore.far.tier import FarStatus
from kvcore.pool.block_pool import PoolTransaction
from kvcore.state.state import State
from kvcore.state.transaction import Transaction
from kvcore.transitions import TRANSITIONS, transfers
from kvcore.transitions.publish import publish_blocks
from kvcore.types.commands import Store

STORED = far_world(1, 1, 1, Far(num_faults=0, num_epochs=1))
TEXTS = far_world(1, 2, 1, Far(num_faults=0), num_letters=2)
AGAIN = "the page is computed again each time"
OTHERS = "it is read by another engine, which still has the older weights"


@mutant("far", "FAR-KV", rows=(85,))
def m_far_no_checksum(patcher: Patcher) -> None:
    """A page is taken without a look at its checksum."""
    patcher.replace(page, "_digest", lambda _: bytes(16))


@mutant("far-pages", "FAR-KV", rows=(85,))
def m_far_name_not_checked(patcher: Patcher) -> None:
    """A whole page is taken for the one that was asked for."""

    @patcher.around(page, "check_page")
    def check_bytes(check: Any, view: Any, name: str, num_bytes: int) -> FarStatus:
        held = page.HEADER.unpack_from(view)
        prefix = name.rpartition("/")[0]
        found: FarStatus = check(view, f"{prefix}/{held[2].hex()}", num_bytes)
        return found


@mutant("far-epochs", "CACHE-KV")
def m_far_name_without_epoch(patcher: Patcher) -> None:
    """Pages of all weights have the same names."""
    for module in (far_tier, far_model):
        patcher.replace(module, "place_of", lambda _: page.PageOwner(bytes(32)))


@mutant("far", "STAGING", rows=(86,))
def m_far_timeout_frees_staging(patcher: Patcher) -> None:
    """The slots of a late ticket are given to others before the tier is done with them."""

    @patcher.around(TierLink, "give_up")
    def give_up_slots(give_up: Any, self: TierLink, ticket: Any) -> None:
        give_up(self, ticket)
        for slot in ticket.slots:
            self._staging.give_back(slot)


@mutant("far", "NEVER-STUCK")
def m_far_no_timeout(patcher: Patcher) -> None:
    """A request waits for its pages until the tier answers."""

    @patcher.around(TierLink, "poll")
    def poll_done(poll: Any, self: TierLink) -> Any:
        for ticket in self._tickets.values():
            ticket.deadline = float("inf")
        return poll(self)


@mutant("far-pages", "FAR-HINT")
def m_far_hole_counts(patcher: Patcher) -> None:
    """Pages behind one that is missing are loaded, and what it lacks counts as loaded."""

    @patcher.around(Fetches, "begin")
    def begin_any(begin: Any, self: Fetches, sequence: Any, hit: Any) -> Any:
        fetch = self._fetches[sequence.sequence_id]
        place = self._link.place
        keys = self._engine.manager.get_block_keys(sequence.sequence_id)[0]
        if fetch.pages and place is not None:
            for key in keys[: sequence.num_tokens - 1]:
                if place.name(key) not in fetch.pages:
                    fetch.pages[place.name(key)] = next(iter(fetch.pages.values()))
        return begin(self, sequence, hit)


@mutant("far-epochs", "FAR-HINT")
def m_far_old_epoch_staged(patcher: Patcher) -> None:
    """A page that was staged before the weights changed is loaded under the new ones."""

    @patcher.around(Fetches, "begin")
    def begin_staged(begin: Any, self: Fetches, sequence: Any, hit: Any) -> Any:
        fetch, place = self._fetches[sequence.sequence_id], self._link.place
        if place is not None:
            fetch.pages = {place.name(far_tier.key_in(n)): s for n, s in fetch.pages.items()}
        return begin(self, sequence, hit)


@mutant(STORED, "FAR-KV", unnamed="in the named one its run is longer", costs=OTHERS)
def m_far_publish_new_epoch(patcher: Patcher) -> None:
    """What new weights compute is stored under the name of the older ones."""
    patcher.replace(TierLink, "place", property(lambda self: self._place))


@mutant("far", "STAGING")
def m_far_abort_frees_at_once(patcher: Patcher) -> None:
    """An abort gives back the slot from which a batch has yet to load."""

    @patcher.around(Fetches, "forget")
    def forget_loads(forget: Any, self: Fetches, sequence: Any) -> None:
        fetch = self._fetches.get(sequence.sequence_id)
        for operation in () if fetch is None else fetch.operations:
            self._give_back(self._loads[operation].slot)
        forget(self, sequence)


@mutant("far", "STAGING", rows=(86,))
def m_far_abort_keeps_staging(patcher: Patcher) -> None:
    """An abort keeps the slots of pages that were ready."""

    @patcher.around(Fetches, "forget")
    def forget_pages(forget: Any, self: Fetches, sequence: Any) -> None:
        if sequence.sequence_id in self._fetches:
            self._fetches[sequence.sequence_id].pages.clear()
        forget(self, sequence)


@mutant("far-pages", "FAR-KV", rows=(75,))
def m_far_store_before_load(patcher: Patcher) -> None:
    """A block that a load has yet to fill is stored, and copied to the tier ahead of the load."""

    @patcher.around(transfers, "start_loads")
    def start_found(start: Any, tx: Transaction, request: Any, first: int) -> Any:
        started = start(tx, request, first)
        publish_blocks(tx, request, request.num_accepted)
        return started

    @patcher.around(TRANSITIONS, "store")
    def store_unwritten(store: Any, state: State, blocks: Any) -> Any:
        scheduled = state.batch.scheduled
        found = store(
            replace(state, batch=replace(state.batch, scheduled=pvector([None] * len(scheduled)))),
            blocks,
        )
        batch = replace(found.state.batch, scheduled=scheduled)
        return replace(found, state=replace(found.state, batch=batch))

    @patcher.around(FarClient, "begin")
    def begin_and_store(begin: Any, self: FarClient, sequence: Any, hit: Any) -> Any:
        got = begin(self, sequence, hit)
        for load in self._fetches._loads.values():
            self._stores._known.discard(load.name)
        self._stores.look(sequence)
        return got

    @patcher.around(far_model.FarGhost, "apply")
    def apply_stores_first(apply: Any, self: Any, commands: Any) -> None:
        apply(self, sorted(commands, key=lambda each: not isinstance(each, Store)))


@mutant(TEXTS, "FAR-KV", rows=(74,), unnamed="in the named ones all have one text", costs=OTHERS)
def m_far_store_reads_late(patcher: Patcher) -> None:
    """A block that is being stored can be reused, and is copied to the tier behind its new text."""
    patcher.during(TRANSITIONS, "store", PoolTransaction, "pin", lambda *_: None)

    @patcher.around(PoolTransaction, "unpin")
    def unpin_held(unpin: Any, self: PoolTransaction, block: int) -> None:
        if block in self.pins:
            unpin(self, block)

    late: list[Store] = []
    copy_now = far_model.FarGhost.copy

    @patcher.around(far_model.FarGhost, "copy")
    def copy_later(copy: Any, self: Any, command: Any) -> None:
        if self.far is not None and isinstance(command, Store):
            late.append(command)
        else:
            copy(self, command)

    @patcher.around(far_model.FarGhost, "compute")
    def compute_first(compute: Any, self: Any, *args: Any) -> None:
        compute(self, *args)
        stores, late[:] = late[:], []
        for each in stores:
            copy_now(self, each)


@mutant("far", "STAGING", costs="a page that was not copied is damaged, so nobody loads it")
def m_far_mark_outlives_its_store(patcher: Patcher) -> None:
    """A later store of a key is copied into the slot that a late ticket still has."""
    patcher.during(Stores, "end", Slots, "unmark", lambda *_: None)


@mutant("far", "LEASE")
def m_far_store_holds_block(patcher: Patcher) -> None:
    """A block is held until the tier confirms that it keeps the page; a late answer never does."""

    @patcher.around(FarClient, "poll")
    def poll_loads(poll: Any, self: FarClient) -> Any:
        for each in self._engine.take_finished():
            if self._stores.owns(each.operation):
                self._stores.end(each.operation, each.done)
            else:
                self._engine.finished.append(each)  # type: ignore[attr-defined] # a list
        return poll(self)

    @patcher.around(Stores, "answered")
    def complete(answered: Any, self: Stores, ended: Any) -> None:
        answered(self, ended)
        manager: Any = self._engine.manager
        for number, operation in list(manager.state.operations.items()):
            if ended.statuses is not None and operation.request_id is None:
                manager.complete_operation(number, True)


@mutant("far", "FAR-KV", rows=(84,))
def m_far_failed_load_counts(patcher: Patcher) -> None:
    """A page that the tier failed to give counts as one that came."""

    @patcher.around(Fetches, "answered")
    def answered_all(answered: Any, self: Fetches, ended: Any) -> None:
        if ended.ticket.operation == "load" and ended.statuses is not None:
            fetch = self._by_ticket.pop(ended.ticket)
            fetch.tickets.discard(ended.ticket)
            fetch.pages.update(zip(ended.ticket.names, ended.ticket.slots, strict=True))
        else:
            answered(self, ended)


@mutant("far", "HEAL", rows=(83,), costs=AGAIN)
def m_far_failed_store_visible(patcher: Patcher) -> None:
    """A page that the tier failed to keep still counts as stored."""

    @patcher.around(Stores, "answered")
    def believe(answered: Any, self: Stores, ended: Any) -> None:
        answered(self, ended)
        for name in ended.ticket.names:
            self._known.add(name)

    @patcher.around(Fetches, "answered")
    def keep(answered: Any, self: Fetches, ended: Any) -> None:
        known = list(self._known._names)
        answered(self, ended)
        for name in known:
            self._known.add(name)


@mutant("far", "LEASE", rows=(87,))
def m_far_lease_kept(patcher: Patcher) -> None:
    """What a request looked up outlives it."""

    @patcher.around(Fetches, "forget")
    def forget_all_but(forget: Any, self: Fetches, sequence: Any) -> None:
        fetch = self._fetches.get(sequence.sequence_id)
        forget(self, sequence)
        if fetch is not None:
            self._fetches[sequence.sequence_id] = fetch


@mutant("far", "HEAL", costs=AGAIN)
def m_far_damaged_stays(patcher: Patcher) -> None:
    """An entry that is damaged is not removed, and no put replaces it."""
    patcher.around(page, "check_pages")(lambda check, *args: check(*args[:-1], lambda _: None))
