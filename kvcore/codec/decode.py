# SPDX-License-Identifier: Apache-2.0
"""Decodes a state from its canonical bytes; the inverse of `encode.py`.

Invariants: bytes that do not encode a state raise DamagedState with the offset, even if only the
configuration is wrong. Only the structure is checked here; `invariants.check` checks the content.
Twin: rust/src/codec/decode.rs.
"""

from __future__ import annotations

from immutables import Map
from pyrsistent import PVector, pvector

from kvcore.codec.decode_batch import read_batch, read_batches_in_flight
from kvcore.codec.encode import DUPLICATES, MAGIC, OWNERS_END, PUBLISH
from kvcore.codec.sections import read_sections
from kvcore.pool.block_pool import BlockPool
from kvcore.pool.free_queue import make_free_queue
from kvcore.pool.hash_index import HashIndex, HashIndexTransaction
from kvcore.pool.policy_state import make_policy_state
from kvcore.pool.quarantine import Quarantine
from kvcore.state.state import (
    MAX_OPERATION,
    NO_HOST_BLOCK,
    Operation,
    RequestMap,
    RequestState,
    State,
)
from kvcore.types.config import EVICTIONS, Config, Eviction
from kvcore.types.errors import DamagedState, GroupsDoNotFit, InvalidConfig, InvalidExtraKey
from kvcore.types.event_log import read_event
from kvcore.types.extra_inputs import NO_EXTRA_KEYS, ExtraKeys, LoRA, MediaItem
from kvcore.types.groups import KINDS as GROUP_KINDS
from kvcore.types.groups import Group
from kvcore.types.keys import HASHINGS
from kvcore.types.memory import check_memory
from kvcore.types.policies import policy_of
from kvcore.types.tokens import PackedTokens
from kvcore.types.values import PrefixCacheStats
from kvcore.types.wire import Reader

COUNTS = (
    "requests",
    "queries",
    "hits",
    "preempted_requests",
    "preempted_queries",
    "preempted_hits",
)


def decode(data: bytes) -> State:
    """Decode a state. Raises DamagedState, PoolTooLarge."""
    source = Reader(data)
    if source.take(len(MAGIC)) != MAGIC:
        raise DamagedState(reason="the first bytes are not those of a state", offset=0)
    try:
        config = _read_config(source)
    except (InvalidConfig, GroupsDoNotFit) as error:
        raise source.damaged(str(error)) from None
    device = _read_pool(source, config, config.eviction, config.num_blocks, int(config.null_block))
    hosts = config.num_host_blocks
    host = _read_pool(source, config, config.host_eviction, hosts, 0) if hosts else None
    rows: list[str | None] = []
    requests: dict[str, RequestState] = {}
    for row in range(source.u32()):
        request = _read_request(source, config, row) if source.flag() else None
        rows.append(None if request is None else request.request_id)
        if request is not None and request.request_id in requests:
            raise source.damaged("a request occurs twice")
        if request is not None:
            requests[request.request_id] = request
    free_rows = source.ids(len(rows))
    batch = read_batch(source, config, rows)
    in_flight = read_batches_in_flight(source, config, rows)
    events = [read_event(source) for _ in range(source.u32())]
    counts = {name: source.u64() for name in COUNTS}
    stats = PrefixCacheStats(**counts, reset=source.flag())
    new_blocks = tuple(pvector(source.ids(config.num_blocks)) for _ in config.groups)
    operations = _read_operations(source, config, requests)
    next_operation = source.u32()
    state = State(
        config=config,
        device=device,
        host=host,
        requests=RequestMap.of(requests),
        rows=pvector(rows),
        free_rows=pvector(free_rows),
        batch=batch,
        events=pvector(events),
        stats=stats,
        new_blocks=new_blocks,
        operations=Map(operations),
        next_operation=next_operation,
        in_flight=in_flight,
    )
    return read_sections(source, state)


def _read_config(source: Reader) -> Config:
    num_blocks = source.u32()
    groups = tuple(_read_group(source) for _ in range(source.u32()))
    if not groups:
        raise source.damaged("there is no group")
    return Config(
        num_blocks,
        groups=groups,
        num_host_blocks=source.u32(),
        max_model_len=source.u32() or None,
        max_num_batched_tokens=source.u32() or None,
        enable_caching=source.flag(),
        null_block=source.flag(),
        eviction=EVICTIONS[source.choice(len(EVICTIONS))],
        duplicates=DUPLICATES[source.choice(len(DUPLICATES))],
        hashing=HASHINGS[source.choice(len(HASHINGS))],
        num_preallocate_tokens=source.u32(),
        watermark_blocks=source.u32(),
        use_eagle=source.flag(),
        enable_events=source.flag(),
        record_new_blocks=source.flag(),
        hash_seed=source.sized(),
        max_in_flight=source.u32(),
        publish=PUBLISH[source.choice(len(PUBLISH))],
    )


def _read_group(source: Reader) -> Group:
    size, kind = source.u32(), GROUP_KINDS[source.choice(len(GROUP_KINDS))]
    number, is_state = source.u32(), kind == "state"
    return Group(
        size,
        kind=kind,
        window=None if is_state else number or None,
        draft_states=number if is_state else 0,
        eagle=source.flag(),
        zero_new_blocks=source.flag(),
        page_bytes=source.u64() or None,
    )


def _read_pool(
    source: Reader, config: Config, eviction: Eviction, num_blocks: int, first_block: int
) -> BlockPool:
    # At least five bytes per block: a damaged count must not become an allocation.
    if 5 * num_blocks > len(source.data) - source.offset:
        raise source.damaged(f"{num_blocks} blocks are missing")
    check_memory(num_blocks)
    ref_counts: list[int] = []
    keys: list[bytes | None] = []
    ranked: dict[bytes, list[tuple[int, int]]] = {}
    for block in range(num_blocks):
        ref_counts.append(source.below(OWNERS_END))
        keys.append(source.key() if source.flag() else None)
        key = keys[-1]
        if key is not None:
            ranked.setdefault(key, []).append((source.u32(), block))
    order = source.ids(num_blocks)
    if len(set(order)) != len(order):
        raise source.damaged("a block is in the free queue twice")
    index = HashIndexTransaction(HashIndex())
    for key, entries in ranked.items():
        entries.sort()
        if [rank for rank, _ in entries] != list(range(len(entries))):
            raise source.damaged("the blocks of a key are not ranked from 0")
        for _, block in entries:
            index.insert(key, block)
    pinned, counts = source.ids(num_blocks), source.ids(OWNERS_END)
    if len(pinned) != len(counts):
        raise source.damaged("pins without counts")
    if pinned != sorted(set(pinned)):
        raise source.damaged("the pinned blocks are not in ascending order")
    policy = policy_of(eviction)
    return BlockPool(
        first_block=first_block,
        eviction=eviction,
        ref_counts=pvector(ref_counts),
        keys=pvector(keys),
        queue=make_free_queue(num_blocks, order),
        index=index.freeze(),
        pins=Map(zip(pinned, counts, strict=True)),
        quarantine=_read_quarantine(source, config, num_blocks, order),
        policy=None if policy is None else make_policy_state(policy, num_blocks, ()),
    )


def _read_quarantine(
    source: Reader, config: Config, num_blocks: int, free: list[int]
) -> Quarantine | None:
    order, busy = source.ids(num_blocks), {}
    last = -1
    for _ in range(source.u32()):
        block = source.u32()
        numbers = [source.u64() for _ in range(source.u32())]
        if not last < block < num_blocks or not numbers or numbers != sorted(set(numbers)):
            raise source.damaged("the blocks in use by batches are not in canonical form")
        busy[block] = frozenset(numbers)
        last = block
    if len({*order, *free}) != len(order) + len(free):
        raise source.damaged("a block is free or quarantined twice")
    if (order or busy) and not config.max_in_flight:
        raise source.damaged("blocks wait for a batch, but batches are never in flight")
    if not config.max_in_flight:
        return None
    return Quarantine(make_free_queue(num_blocks, order), Map(busy))


def _read_request(source: Reader, config: Config, row: int) -> RequestState:
    request_id = source.name()
    tokens, drafts = PackedTokens().extend(source.numbers()), pvector(source.numbers())
    block_hashes = pvector(source.hashes())
    own_hashes, skip_reading = source.flag(), source.flag()
    extra_keys = _read_extra_keys(source)
    num_computed = source.u32()
    tables: list[PVector[int]] = []
    num_cached: list[int] = []
    for _ in config.groups:
        tables.append(pvector(source.ids(config.num_blocks)))
        num_cached.append(source.u32())
    host_tables: list[PVector[int]] = []
    if source.flag():
        if not config.num_host_blocks:
            raise source.damaged("a request is in a host tier that does not exist")
        host_tables = [_read_host_table(source, config) for _ in config.groups]
    return RequestState(
        request_id=request_id,
        row=row,
        tokens=tokens,
        drafts=drafts,
        block_hashes=block_hashes,
        own_hashes=own_hashes,
        skip_reading=skip_reading,
        extra_keys=extra_keys,
        num_computed=num_computed,
        tables=tuple(tables),
        num_cached=tuple(num_cached),
        host_tables=tuple(host_tables),
        preempted=source.flag(),
        num_loading=source.u32(),
        load_end=source.u32(),
    )


def _read_host_table(source: Reader, config: Config) -> PVector[int]:
    blocks = source.numbers()
    if any(block >= config.num_host_blocks and block != NO_HOST_BLOCK for block in blocks):
        raise source.damaged(f"an id is not below {config.num_host_blocks}")
    return pvector(blocks)


def _read_extra_keys(source: Reader) -> ExtraKeys:
    try:
        lora = LoRA(source.name(), source.name()) if source.flag() else None
        media = [MediaItem(source.name(), source.u32(), source.u32()) for _ in range(source.u32())]
    except InvalidExtraKey:
        raise source.damaged("an extra key of the wrong form") from None
    salt, embeds = source.text(), tuple(source.hashes())
    if lora is None and salt is None and not media and not embeds:
        return NO_EXTRA_KEYS
    return ExtraKeys(lora, tuple(media), salt, embeds)


def _read_operations(
    source: Reader, config: Config, requests: dict[str, RequestState]
) -> dict[int, Operation]:
    operations: dict[int, Operation] = {}
    last = -1
    for _ in range(source.u32()):
        number, block, key = source.u32(), source.u32(), source.key()
        batch, request_id, first = source.u64(), source.text(), source.u32()
        known = block < config.num_blocks and (request_id is None or request_id in requests)
        if not known or not last < number <= MAX_OPERATION:
            raise source.damaged("an operation that cannot occur")
        operations[number] = Operation(block, key, batch, request_id, first)
        last = number
    return operations
