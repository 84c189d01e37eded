# SPDX-License-Identifier: Apache-2.0
"""The sections at the end of canonical bytes: fields that most states do not use.

A section is a tag, a size, and that number of bytes; tags ascend. A section with only defaults is
omitted, so a feature that is off adds no bytes.
Twin: rust/src/codec/sections.rs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain

import attrs
from msgspec.structs import replace

from kvcore.codec.policy_sections import (
    place_blocks,
    read_uses,
    read_waiting,
    write_uses,
    write_waiting,
)
from kvcore.pool.free_queue import make_free_queue, num_older
from kvcore.state.batch_records import Reporter, UnconfirmedLoad
from kvcore.state.state import RequestState, State
from kvcore.types.config import MAX_EPOCH
from kvcore.types.wire import Reader, Writer

TAILS, LOADS, EXTRA_KEYS, OPTIONS, OUTPUT, HELD_ROWS, EPOCHS = range(7)
WAITING, USES, RETENTION, PINS, FLOORS, SAMPLERS, CHECKPOINTS, MARKS = range(7, 15)
"""The tags, in order: hits inside blocks, unconfirmed loads, cut extra keys, options of the config,
first batches whose output belongs to requests, held rows, epochs, order of arrival of requests,
memory of an eviction policy, levels, pins of prefixes, floors, batches whose output is to come,
checkpoints without keys, checkpoints that calls marked.
"""
MEDIA_CUT, ROWS_CUT = 1, 2
HIDE_SALTS = 1


def write_sections(out: Writer, state: State) -> None:
    """Write the sections that differ from the defaults."""
    policy = state.device.policy
    sections: tuple[tuple[int, object, Callable[[Writer, State], None] | None], ...] = (
        (TAILS, state.config.hash_unit is not None, None),
        (LOADS, state.loads, write_loads),
        (EXTRA_KEYS, any(_with_ends(state)), write_ends),
        (OPTIONS, state.config.hide_salts, write_options),
        (OUTPUT, any(_with_output(state)), write_output),
        (HELD_ROWS, state.held_rows, write_held_rows),
        (EPOCHS, state.epoch, write_epochs),
        (WAITING, state.next_due, write_waiting),
        (USES, policy is not None and policy.is_remembered, write_uses),
        (RETENTION, _has_levels(state), None),
        (PINS, _has_pins(state), None),
        (FLOORS, state.device.floors is not None, None),
        (SAMPLERS, any(each.samplers for each in state.requests.values()), None),
        (CHECKPOINTS, _has_checkpoints(state), None),
        (MARKS, state.batch.marked or state.device.silent, None),
    )
    for tag, is_there, write in sections:
        if is_there:
            part = Writer()
            (write or _rare(tag)[0])(part, state)
            out.u8(tag)
            out.sized(part.data)


def write_loads(out: Writer, state: State) -> None:
    """Write the unconfirmed loads, in the order of their calls."""
    out.u32(len(state.loads))
    for load in state.loads:
        out.u64(load.batch)
        out.u32(load.first)
        out.u32(load.end)
        reporters = [
            (state.requests[each.request_id].row, each.counted, each.most)
            for each in load.reporters
        ]
        for numbers in (reporters, load.blocks):
            out.u32(len(numbers))
            for number in chain.from_iterable(numbers):
                out.u32(number)


def write_ends(out: Writer, state: State) -> None:
    """Write where the extra keys of requests end, in row order."""
    requests = list(_with_ends(state))
    out.u32(len(requests))
    for request in requests:
        keys = request.extra_keys
        out.u32(request.row)
        out.u32(keys.num_rows)
        out.u8(MEDIA_CUT * keys.media_cut | ROWS_CUT * keys.rows_cut)


def write_options(out: Writer, _: State) -> None:
    """Write which options of the config are set."""
    out.u8(HIDE_SALTS)


def write_output(out: Writer, state: State) -> None:
    """Write the first batch whose output belongs to each request, in row order."""
    requests = list(_with_output(state))
    out.u32(len(requests))
    for request in requests:
        out.u32(request.row)
        out.u64(request.output_from)


def write_held_rows(out: Writer, state: State) -> None:
    """Write the held rows, each with its batch, in order."""
    out.u32(len(state.held_rows))
    for row, batch in state.held_rows:
        out.u32(row)
        out.u64(batch)


def write_epochs(out: Writer, state: State) -> None:
    """Write the first and the current epoch, the blocks of older ones, the unfinished batches in
    which one began, and the epoch of each request that counts tokens, in row order.
    """
    out.u32(state.config.epoch)
    out.u32(state.epoch)
    out.u32(num_older(state.device.queue))
    out.numbers(sorted(state.device.older))
    for flag in (*(batch.starts_epoch for batch in state.in_flight), state.batch.starts_epoch):
        out.u8(flag)
    for request in _counting(state):
        out.u32(request.epoch)


def read_sections(source: Reader, state: State) -> State:
    """Read the sections up to the end; return the state with them. Raises DamagedState."""
    readers = {
        LOADS: read_loads,
        EXTRA_KEYS: read_ends,
        OPTIONS: read_options,
        OUTPUT: read_output,
        HELD_ROWS: read_held_rows,
        EPOCHS: read_epochs,
        WAITING: read_waiting,
        USES: read_uses,
    }
    last = -1
    while source.offset < len(source.data):
        tag, size = source.u8(), source.u32()
        if tag > MARKS or tag <= last:
            raise source.damaged(f"section {tag} is unknown, or out of order")
        end, last = source.offset + size, tag
        read = readers.get(tag) or _rare(tag)[1]
        state = read(source, state)
        if source.offset != end:
            raise source.damaged(f"section {tag} has the wrong size")
    for request in state.requests.values():
        if bool(request.extra_keys.embeds) != bool(request.extra_keys.num_rows):
            raise source.damaged("embeddings without a number of rows")
    owed = {owed.block for batch in state.in_flight for owed in batch.owed}
    resting = (block for load in state.loads for block, _ in load.blocks)
    if not all(state.device.has_key(block) or block in owed for block in resting):
        raise source.damaged("a block without a key rests on a load")
    if state.config.eviction == "retention":
        from kvcore.codec.retention_section import place_levels

        return place_levels(source, state)
    return place_blocks(source, state)


def read_loads(source: Reader, state: State) -> State:
    """Read unconfirmed loads, at least one; return the state with them. Raises DamagedState."""
    loads, device, rows = [], state.device, state.rows
    for _ in range(source.u32()):
        batch, first, end = source.u64(), source.u32(), source.u32()
        ends = [(source.u32(), source.u32(), source.u32()) for _ in range(source.u32())]
        blocks = [(source.u32(), source.u32()) for _ in range(source.u32())]
        names = [rows[row] if row < len(rows) else None for row, _, _ in ends]
        if not names or None in names or len(set(names)) < len(names):
            raise source.damaged("a load does not belong to requests")
        held = {block for block, _ in blocks}
        if not all(block < len(device.keys) for block in held):
            raise source.damaged("a block that does not exist rests on a load")
        inside = all(
            first < most <= end and (not counted or first < counted <= most)
            for _, counted, most in ends
        )
        if len(held) < len(blocks) or not inside:
            raise source.damaged("a load is not in canonical form")
        reporters = [
            Reporter(str(name), counted, most)
            for name, (_, counted, most) in zip(names, ends, strict=True)
        ]
        loads.append(UnconfirmedLoad(batch, first, end, tuple(reporters), tuple(blocks)))
    if not loads:
        raise source.damaged("a section is empty")
    return replace(state, loads=tuple(loads))


def read_ends(source: Reader, state: State) -> State:
    """Read the ends of extra keys; return the state with them. Raises DamagedState."""
    size, requests, last = state.config.hash_block_size, state.requests, -1
    for _ in range(source.u32()):
        row, num_rows, flags = source.u32(), source.u32(), source.u8()
        name = state.rows[row] if last < row < len(state.rows) else None
        if name is None or not (num_rows or flags):
            raise source.damaged("the end of a request's extra keys is impossible")
        last, request = row, requests[name]
        media_cut, rows_cut = bool(flags & MEDIA_CUT), bool(flags & ROWS_CUT)
        keys = replace(
            request.extra_keys, num_rows=num_rows, media_cut=media_cut, rows_cut=rows_cut
        )
        fits = len(keys.embeds) == -(-num_rows // size) and flags <= MEDIA_CUT | ROWS_CUT
        fits = fits and not (rows_cut and num_rows % size == 0)
        if not fits or (media_cut and (keys.media_cut_at or 0) % size == 0):
            raise source.damaged("the end of a request's extra keys is wrong")
        requests = requests.set(name, replace(request, extra_keys=keys))
    if last < 0:
        raise source.damaged("a section is empty")
    return replace(state, requests=requests)


def read_options(source: Reader, state: State) -> State:
    """Read options of the config; return the state with them. Raises DamagedState."""
    if source.u8() != HIDE_SALTS:
        raise source.damaged("options are not in canonical form")
    return replace(state, config=attrs.evolve(state.config, hide_salts=True))


def read_output(source: Reader, state: State) -> State:
    """Read the batches of output; return the state with them. Raises DamagedState."""
    requests, last = state.requests, -1
    for _ in range(source.u32()):
        row, batch = source.u32(), source.u64()
        name = state.rows[row] if last < row < len(state.rows) else None
        if name is None or not 0 < batch <= state.batch.number:
            raise source.damaged("the batch of a request's output is impossible")
        last = row
        requests = requests.set(name, replace(requests[name], output_from=batch))
    if last < 0:
        raise source.damaged("a section is empty")
    return replace(state, requests=requests)


def read_held_rows(source: Reader, state: State) -> State:
    """Read held rows, at least one; return the state with them. Raises DamagedState."""
    held = tuple((source.u32(), source.u64()) for _ in range(source.u32()))
    numbers = [batch.number for batch in state.in_flight] + [state.batch.number]
    for row, batch in held:
        if row >= len(state.rows) or batch not in numbers:
            raise source.damaged("a row is held for a batch that is not unfinished")
    if not held:
        raise source.damaged("a section is empty")
    return replace(state, held_rows=held)


def read_epochs(source: Reader, state: State) -> State:
    """Read epochs; return the state with them. Raises DamagedState."""
    start, epoch = source.u32(), source.u32()
    if not start <= epoch <= MAX_EPOCH or not epoch:
        raise source.damaged(f"epoch {epoch} does not follow {start}")
    pool, num_first = state.device, source.u32()
    order, older = list(pool.queue), source.ids(pool.num_blocks)
    held = not any(pool.has_key(block) or block in order for block in older)
    if not held or older != sorted(set(older)) or num_first > len(order):
        raise source.damaged("the blocks of older epochs are not in canonical form")
    if any(pool.has_key(block) for block in order[:num_first]):
        raise source.damaged("a block with a key is of an older epoch")
    queue = make_free_queue(pool.num_blocks, order, num_first)
    *flags, flag = [source.flag() for _ in (*state.in_flight, state.batch)]
    in_flight = tuple(
        replace(batch, starts_epoch=each)
        for batch, each in zip(state.in_flight, flags, strict=True)
    )
    requests = state.requests
    for request in _counting(state):
        number = source.u32()
        if not start <= number <= epoch:
            raise source.damaged(f"a request is of epoch {number}")
        requests = requests.set(request.request_id, replace(request, epoch=number))
    return replace(
        state,
        config=attrs.evolve(state.config, epoch=start),
        device=attrs.evolve(pool, queue=queue, older=frozenset(older)),
        batch=replace(state.batch, starts_epoch=flag),
        in_flight=in_flight,
        requests=requests,
        epoch=epoch,
    )


def _counting(state: State) -> Iterator[RequestState]:
    """Return the requests that count tokens, in row order."""
    known = (state.requests[name] for name in state.rows if name is not None)
    return (request for request in known if request.num_computed)


def _with_output(state: State) -> Iterator[RequestState]:
    """Yield the requests that do not take output of every batch, in row order."""
    for name in state.rows:
        if name is not None and state.requests[name].output_from:
            yield state.requests[name]


def _with_ends(state: State) -> Iterator[RequestState]:
    """Yield the requests whose extra keys have an end to write, in row order."""
    for name in state.rows:
        keys = None if name is None else state.requests[name].extra_keys
        if name is not None and keys is not None and (keys.num_rows or keys.media_cut):
            yield state.requests[name]


def _has_levels(state: State) -> bool:
    """Return whether levels differ from their defaults. Their module is imported only if there are
    any.
    """
    if state.device.retention is None:
        return False
    from kvcore.codec.retention_section import has_retention

    return has_retention(state)


def _has_pins(state: State) -> bool:
    """Return whether there are pins of prefixes, or a limit for them; few managers have any."""
    return bool(len(state.named_pins)) or state.config.max_pinned_blocks is not None


def _has_checkpoints(state: State) -> bool:
    """Whether the open batch writes a checkpoint, or a batch in flight owes one."""
    return len(state.batch.ends) > 0 or any(batch.owed for batch in state.in_flight)


def _rare(tag: int) -> tuple[Callable[[Writer, State], None], Callable[[Reader, State], State]]:
    """Return what writes and reads a section that few states have; its module is imported only
    then.
    """
    if tag == TAILS:
        from kvcore.codec import tails_section

        return tails_section.write_tails, tails_section.read_tails
    if tag == RETENTION:
        from kvcore.codec import retention_section

        return retention_section.write_retention, retention_section.read_retention
    if tag in (PINS, FLOORS):
        from kvcore.codec import claims_section as claims

        if tag == PINS:
            return claims.write_pins, claims.read_pins
        return claims.write_floors, claims.read_floors
    if tag == SAMPLERS:
        from kvcore.codec import samplers_section

        return samplers_section.write_samplers, samplers_section.read_samplers
    from kvcore.codec import states_section as states

    if tag == CHECKPOINTS:
        return states.write_checkpoints, states.read_checkpoints
    return states.write_marks, states.read_marks
