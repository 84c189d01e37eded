# SPDX-License-Identifier: Apache-2.0
"""The full check of a run: every block, key, table and count, once in a while and at its end.

What the state counts on must be there once the device has executed everything, including the open
batch, which is tried on a copy of the memory. At the end everything must be given back: nothing
held, nothing pending, every block free, and a successful reset. Cost: O(pool + tokens).
"""

from __future__ import annotations

from collections.abc import Sequence

from kvcore.check.properties.outcomes import announced, check_hit
from kvcore.check.simulate.events import follow
from kvcore.check.simulate.every_move import make
from kvcore.check.simulate.kept import check_pinned, check_stale
from kvcore.check.simulate.play import Move, Play
from kvcore.check.world.ghost import owners, tables_of, tiers
from kvcore.invariants import pool_and_state
from kvcore.oracle.content_oracle import ContentOracle, Pass
from kvcore.oracle.contents import TierBlock, block_at, group_of
from kvcore.state.state import State
from kvcore.types.commands import close
from kvcore.types.config import Config
from kvcore.types.errors import InvariantViolation
from kvcore.types.keys import HASH_SIZE
from kvcore.types.values import Status

MOST_HITS = 4
"""How many requests have their longest hit found by trying all, in one check."""


def check_bytes(play: Play) -> None:
    """Raise InvariantViolation (PARITY) unless all managers have the same canonical bytes."""
    first = play.manager.encode()
    for label, manager in play.managers[1:]:
        if manager.encode() != first:
            raise InvariantViolation("PARITY", f"the state of {label} is another one")


def check_all(play: Play) -> None:
    """Check the state that a run is in. Raises InvariantViolation."""
    state = play.manager.state()
    pool_and_state.check(state)
    check_bytes(play)
    memory = play.memory.copied()
    for issued in play.waiting:
        memory.epoch = issued.batch.epoch
        memory.apply(issued.batch)
        memory.forward(issued.passes)
    memory.epoch = state.epoch
    memory.apply(close(state.batch.number, state.batch.commands))
    memory.forward(play.passes)
    _check_tables(state, memory)
    _check_contents(play, state, memory)
    if not play.forgot:
        _check_owners(state, memory)
    _check_queues(play, state)
    check_pinned(play, state)
    check_stale(play)
    for name in [name for name in play.known if play.status(name) is Status.WAITING][:MOST_HITS]:
        check_hit(state, state.requests[name], play.manager.get_computed_blocks(name))
    if state.config.enable_events:
        keys = set(play.keys)
        follow(keys, state.events)
        held = {(k[:HASH_SIZE], group_of(k)) for k in announced(state)}
        if keys != held:
            detail = f"{len(keys)} keys by the events, {len(held)} in the index"
            raise InvariantViolation("EVT-COPY", detail)


def finish(play: Play) -> None:
    """Give everything back and check what is left (DRAIN). Raises InvariantViolation."""
    while play.unfinished or play.waiting:
        make(play, Move("execute"))
        make(play, Move("complete"))
    for name in list(play.known):
        make(play, Move("free", (name,)))
    make(play, Move("take"))
    for name in list(play.known):
        make(play, Move("free", (name,)))
        make(play, Move("remove", (name,)))
    for verb in ("execute", "complete"):
        make(play, Move(verb))
    while play.transfers:
        make(play, Move("finish", (0, True)))
    while play.pins:
        make(play, Move("unpin", (0,)))
    while play.pinned:
        make(play, Move("unpin_prefix", (0,)))
    for _ in range(2):
        for verb in ("take", "execute", "complete", "drain"):
            make(play, Move(verb))
    if play.known:
        raise InvariantViolation("DRAIN", f"requests {sorted(play.known)} cannot be removed")
    free, usable = play.manager.num_free_blocks, play.config.num_usable_blocks
    if free != usable:
        raise InvariantViolation("DRAIN", f"at the end {free} of {usable} blocks are free")
    free, usable = play.manager.num_free_host_blocks, play.config.num_host_blocks
    if free != usable:
        raise InvariantViolation("DRAIN", f"at the end {free} of {usable} host blocks are free")
    check_all(play)
    if make(play, Move("reset")) is not True:
        raise InvariantViolation("RESET", "an unused pool cannot be reset")
    check_bytes(play)


def _check_tables(state: State, memory: ContentOracle) -> None:
    mirrored = {place: table for place, table in memory.tables.items() if table}
    tables = tables_of(state)
    for place in sorted(mirrored.keys() | tables.keys()):
        known, there = mirrored.get(place), tables.get(place)
        if known != there:
            detail = f"row {place[0]}, group {place[1]}: {known} by the commands, {there}"
            raise InvariantViolation("TABLE-MIRROR", f"{detail} in the state")


def _check_contents(play: Play, state: State, memory: ContentOracle) -> None:
    for name, request in state.requests.items():
        known = play.known[name]
        start, end = request.num_accepted, play.load_starts.get(name, request.num_computed)
        end = end - known.num_rejected if known.guesses else end
        counted = play.pass_of(known, start, start, end, end)
        for tier, tables in tiers(request):
            if any(tables):
                places = [[(tier, block) for block in table] for table in tables]
                memory.check_request(places, counted, start)
                if end and name not in play.load_starts:
                    _check_states(state.config, memory, places, counted)
    tails = state.device.tails
    for found in (state.device.index, {} if tails is None else tails.by_key):
        for key, blocks in found.items():
            for block in blocks:
                memory.check_key(block, key)


def _check_states(
    config: Config, memory: ContentOracle, tables: Sequence[Sequence[TierBlock]], counted: Pass
) -> None:
    """Check that each state group holds the states after what a request counts, and after each of
    its drafts.
    """
    num_known = counted.end - counted.num_drafts
    for index, group in enumerate(config.groups):
        if not group.is_state:
            continue
        last = (num_known - 1) // group.block_size
        for at, node in enumerate(counted.nodes[num_known - 1 : counted.end], last):
            place = block_at(tables[index], at)
            held, wanted = memory.get(place)[0], (node, index)
            if held != wanted:
                detail = f"{place} holds {held}, not {wanted} of request {counted.request_id!r}"
                raise InvariantViolation("STATE-READ", detail)


def _check_owners(state: State, memory: ContentOracle) -> None:
    owned, cached = owners(state)
    memory.cached -= memory.evicted - cached  # they may have lost the last of several keys
    if (memory.owned, memory.cached) != (owned, cached):
        wrong = sorted((memory.owned ^ owned) | (memory.cached ^ cached))
        detail = f"blocks {wrong[:5]} have another owner or key by the commands"
        raise InvariantViolation("OWNER-MIRROR", detail)


def _check_queues(play: Play, state: State) -> None:
    """Check that no block is free that a batch in flight uses."""
    for tier, pool in (("device", state.device), ("host", state.host)):
        if pool is None or not play.unfinished:
            continue
        queue = set(pool.queue)
        for issued in play.unfinished:
            if queue & issued.uses[tier]:
                detail = f"{tier} blocks {sorted(queue & issued.uses[tier])[:5]} are free, and "
                detail += f"batch {issued.number}, which uses them, is not finished"
                raise InvariantViolation("CMD-INFLIGHT", detail)
