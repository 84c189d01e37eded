# SPDX-License-Identifier: Apache-2.0
"""Named properties of requests, their tables, hashes and drafts; `pool_and_state.py` asserts them.

Every group is checked at its own block size and by its own retention rule.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from operator import attrgetter

from kvcore.hashing.block_hash import hash_blocks, root_hash
from kvcore.state.state import NO_HOST_BLOCK, RequestState, State, Table
from kvcore.types.groups import skipped_blocks
from kvcore.types.keys import HASH_SIZE
from kvcore.types.values import Status

Property = Callable[[State], Iterator[str]]


def held_tables(request: RequestState) -> tuple[Table, ...]:
    """Return a request's tables in the tier that it is in."""
    return request.host_tables or request.tables


def is_null(state: State, request: RequestState, block: int) -> bool:
    """Return whether an entry of a request's tables is the null block."""
    return block == NO_HOST_BLOCK if request.host_tables else block < state.device.first_block


def table_length(state: State) -> Iterator[str]:
    """TABLEN: each group's table has blocks for all computed tokens of a request, which holds
    blocks of one tier at a time.
    """
    for request in state.requests.values():
        for group, table in zip(state.config.groups, held_tables(request), strict=True):
            needed = 0 if group.is_cross else -(-request.num_computed // group.block_size)
            if len(table) < needed:
                yield f"{_name(request)} has {len(table)} blocks for {request.num_computed} tokens"
        if request.host_tables and any(request.tables):
            yield f"{_name(request)} holds blocks of both tiers"


def wait_empty(state: State) -> Iterator[str]:
    """WAIT-EMPTY: a waiting request has no computed tokens."""
    for request in state.requests.values():
        if request.status is Status.WAITING and (request.num_computed or any(request.num_cached)):
            yield f"{_name(request)} waits with {request.num_computed} computed tokens"


def null_prefix(state: State) -> Iterator[str]:
    """NULL-PREFIX: the null block is only at the start of tables of windowed groups, in place of
    blocks that the next query does not read. STATE-LIVE says where it is in a state group.
    """
    for request in state.requests.values():
        for index, table in enumerate(held_tables(request)):
            group = state.config.groups[index]
            if group.is_state:
                continue
            nulls = [at for at, block in enumerate(table) if is_null(state, request, block)]
            if nulls != list(range(len(nulls))):
                yield f"{_name(request)} has null blocks at {nulls} in group {index}"
            skipped = skipped_blocks(group, request.num_accepted)
            if len(nulls) > skipped:
                name, count = _name(request), len(nulls)
                yield f"{name} gave back {count} blocks of group {index}, not {skipped}"


def group_agree(state: State) -> Iterator[str]:
    """GROUP-AGREE: every group has the blocks that a request's next query reads, up to the same
    token.
    """
    for request in state.requests.values():
        for index, table in enumerate(held_tables(request)):
            group, count = state.config.groups[index], request.num_accepted
            if group.is_state and request.num_computed > count:
                place = count // group.block_size  # of the first token to come
                count += place < len(table) and not is_null(state, request, table[place])
            last = 0 if group.is_cross else -(-count // group.block_size)
            for position in range(skipped_blocks(group, count), last):
                if position >= len(table) or is_null(state, request, table[position]):
                    yield f"{_name(request)} lacks block {position} of group {index} at {count}"


def cross(state: State) -> Iterator[str]:
    """CROSS: a request without computed tokens has no table of encoder tokens."""
    for request in state.requests.values():
        for group, table in zip(state.config.groups, held_tables(request), strict=True):
            if group.is_cross and len(table) and not request.num_computed:
                yield f"{_name(request)} holds {len(table)} encoder blocks, but computed nothing"


def no_alias(state: State) -> Iterator[str]:
    """NO-ALIAS: a block is held at one position of one group, once per table, by requests with
    equal prefixes up to the last of its tokens that both have computed.
    """
    for tier in ("tables", "host_tables"):
        owner: dict[int, tuple[int, int, RequestState]] = {}
        for request in sorted(state.requests.values(), key=attrgetter("row")):
            for group_id, table in enumerate(getattr(request, tier)):
                for position, block in enumerate(table):
                    if block == NO_HOST_BLOCK or (
                        tier == "tables" and block < state.device.first_block
                    ):
                        continue
                    _, at, most = found = owner.setdefault(block, (group_id, position, request))
                    if found[:2] != (group_id, position):
                        yield f"block {block} is held at positions {at} and {position}"
                    elif not _same_prefix(state, most, request, group_id, position):
                        yield f"block {block} is shared by {_name(most)} and {_name(request)}"
                    elif request.num_accepted > most.num_accepted:
                        owner[block] = (group_id, position, request)


def cached_count(state: State) -> Iterator[str]:
    """CACHED-COUNT: blocks that need no publication hold only computed, accepted tokens."""
    for request in state.requests.values():
        accepted = 0 if request.host_tables else request.num_accepted
        for group, cached in zip(state.config.groups, request.num_cached, strict=True):
            if cached > accepted // group.block_size:
                yield f"{_name(request)}: {cached} cached blocks, {accepted} computed on the device"


def request_hashes(state: State) -> Iterator[str]:
    """REQ-HASH: a request's hashes are those of its full blocks; if the engine supplied them, there
    are at most as many.
    """
    config = state.config
    root = root_hash(config.hash_seed, config.hashing)
    for request in state.requests.values():
        if request.own_hashes:
            if len(request.block_hashes) > len(request.tokens) // config.hash_block_size:
                yield f"{_name(request)}: {len(request.block_hashes)} hashes of its own"
            continue
        expected = hash_blocks(
            root,
            list(request.tokens) if config.enable_caching else [],
            config.hash_block_size,
            extra_keys=request.extra_keys,
            hashing=config.hashing,
        )
        if list(request.block_hashes) != list(expected):
            yield f"{_name(request)}: the {len(request.block_hashes)} hashes are not of its tokens"


def published_content(state: State) -> Iterator[str]:
    """CACHE-KEY: a full, computed block of a request has no key, or the key of its position."""
    for request in state.requests.values():
        for index, table in enumerate(request.tables):
            num_full = request.num_accepted // state.config.groups[index].block_size
            num_full = min(num_full, request.num_hashed(state.config, index), len(table))
            for position in range(num_full):
                key = state.device.keys[table[position]]
                if key is not None and key not in _own_keys(state, request, (index, position)):
                    yield f"{_name(request)}: block {table[position]} has another content's key"


def tail_sound(state: State) -> Iterator[str]:
    """TAIL-SOUND: a block's tail keys end inside it, and are in order, shortest first."""
    tails, config = state.device.tails, state.config
    if tails is None:
        return
    held = {(key, block) for block, keys in tails.by_block.items() for key in keys}
    if held != {(key, block) for key, blocks in tails.by_key.items() for block in blocks}:
        yield "blocks are found under other tail keys than they have"
    for block, keys in tails.by_block.items():
        full = state.device.keys[block]
        groups = {int.from_bytes(key[HASH_SIZE:], "big") for key in keys}
        groups |= set() if full is None else {int.from_bytes(full[HASH_SIZE:], "big")}
        most = 0
        if len(groups) == 1 and (group_id := min(groups)) < len(config.groups):
            group = config.groups[group_id]
            most = 0 if group.is_state else group.block_size // config.hash_block_size - 1
        if not 0 < len(keys) <= most or len(set(keys)) < len(keys):
            yield f"block {block} has {len(keys)} tail keys, at most {most} are possible"
    for request in state.requests.values():
        for index, group in enumerate(config.groups):
            own = {} if group.is_state else _tail_ends(state, request, index)
            for position, block in enumerate(request.tables[index]):
                ends = [own[key] for key in tails.keys(block) if key in own]
                inside = all(position < end / group.block_size < position + 1 for end in ends)
                if ends != sorted(ends) or not inside:
                    yield f"{_name(request)}: block {block} has tail keys at {ends}"


def _tail_ends(state: State, request: RequestState, group_id: int) -> dict[bytes, int]:
    """Return the keys of a request in a group, each with the position behind its last token."""
    unit = state.config.hash_block_size
    counts = range(unit, len(request.block_hashes) * unit + 1, unit)
    return {request.key_at(state.config, group_id, count): count for count in counts}


def _own_keys(state: State, request: RequestState, place: tuple[int, int]) -> tuple[bytes, ...]:
    """Return the keys that a full block at a place (group, position) of a table may have."""
    group = state.config.groups[place[0]]
    if not group.is_state:
        return (request.key(state.config, *place),)
    size, fine = group.block_size, state.config.hash_block_size
    counts = range(place[1] * size + fine, (place[1] + 1) * size + 1, fine)
    return tuple(request.key_at(state.config, place[0], count) for count in counts)


def drafts(state: State) -> Iterator[str]:
    """DRAFT: no block with scheduled drafts or positions to come has a key."""
    for request in state.requests.values():
        for group, table in zip(state.config.groups, request.tables, strict=True):
            if group.is_cross or request.num_computed <= len(request.tokens):
                continue
            for block in table[len(request.tokens) // group.block_size :]:
                if state.device.keys[block] is not None:
                    yield f"{_name(request)}: block {block} holds unknown tokens, but has a key"


def computed_bound(state: State) -> Iterator[str]:
    """COMPUTED: no request has computed more than the model's length, or than its tokens and
    drafts. A running request without drafts may have computed more than its tokens: positions to
    come.
    """
    for request in state.requests.values():
        most = state.config.length_limit
        if request.drafts or request.status is not Status.RUNNING:
            most = min(most, len(request.tokens) + len(request.drafts))
        if request.num_computed > most:
            yield f"{_name(request)} computed {request.num_computed} of {most} tokens"


def states(state: State) -> Iterator[str]:
    """STATE-LIVE: a request has the state at its count, and of the states before it the one that a
    step began with and the newest ones; null blocks stand in the other places.
    """
    if state.config.has_states:
        from kvcore.invariants.states import wrong_tables  # few models have states

        yield from wrong_tables(state)


def checkpoints(state: State) -> Iterator[str]:
    """STATE-OWN: a checkpoint without a key is written by the open batch, or owned by the batch in
    flight that will publish it.
    """
    if state.config.has_states:
        from kvcore.invariants.states import wrong_checkpoints

        yield from wrong_checkpoints(state)


def _same_prefix(
    state: State, one: RequestState, other: RequestState, group_id: int, position: int
) -> bool:
    """Return whether two requests have one prefix, as far as both count tokens of a block.

    Equal hashes of the engine's own mean equal content, whatever the tokens are. Tokens after the
    last block that both have hashed are then not compared. If both have gone on past a block of a
    state, this may be the state after any of its tokens: they are compared up to its first one.
    """
    group = state.config.groups[group_id]
    if group.is_cross:
        return True
    size = state.config.hash_block_size
    end = (position + 1) * group.block_size
    if group.is_state and min(one.state_count, other.state_count) > end:
        end = position * group.block_size + 1
    end = min(end, one.num_accepted, other.num_accepted)
    if one.own_hashes or other.own_hashes:
        last = min(end // size, len(one.block_hashes), len(other.block_hashes)) - 1
        return last < 0 or one.block_hashes[last] == other.block_hashes[last]
    if one.tokens[:end] != other.tokens[:end]:
        return False
    return one.extra_keys == other.extra_keys or (
        one.extra_keys.cut(end, size) == other.extra_keys.cut(end, size)
    )


def _name(request: RequestState) -> str:
    return f"request {request.request_id!r}"


OF_REQUESTS = frozenset(
    {table_length, wait_empty, null_prefix, group_agree, cross, cached_count}
    | {request_hashes, computed_bound, states}
)
"""Properties of a single request, which read nothing else that changes."""

PROPERTIES: dict[str, Property] = {
    "TABLEN": table_length,
    "WAIT-EMPTY": wait_empty,
    "NULL-PREFIX": null_prefix,
    "GROUP-AGREE": group_agree,
    "CROSS": cross,
    "NO-ALIAS": no_alias,
    "CACHED-COUNT": cached_count,
    "REQ-HASH": request_hashes,
    "CACHE-KEY": published_content,
    "DRAFT": drafts,
    "COMPUTED": computed_bound,
    "STATE-LIVE": states,
    "STATE-OWN": checkpoints,
}
