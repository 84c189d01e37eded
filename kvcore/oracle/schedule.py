# SPDX-License-Identifier: Apache-2.0
"""The engine's view of the open batch: the positions that its forward pass will write.

This is a second opinion on the code: it was written from the rules of docs/engines.md on computed
counts, drafts and leaving the open batch. A request's count before the batch is taken before its
first slots in the batch and before its hits. If a cut needs a window that was given back, the count
becomes 0. Encoder tokens are written by the step that supplies them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from kvcore.oracle.state_like import StateLike, kept_by
from kvcore.types.errors import InvariantViolation
from kvcore.types.groups import skipped_blocks
from kvcore.types.values import Appended, Hit, Refused

FIRST_ENCODER = -10


@attrs.frozen
class Encoder:
    """The contents of a request's cross-attention tables: this many tokens of one encoder's run.

    number: of the run; below -9, so that it differs from all prefixes.
    """

    number: int
    num_tokens: int


@attrs.frozen(kw_only=True)
class Write:
    """Positions [start, end) of a request that a step writes; rubbish follows up to num_slots.

    loaded: positions before it come from a load, and queries start there. encoder: fills the
    cross-attention tables in this step. failed: the first position that was not loaded.
    """

    request_id: str
    start: int
    loaded: int
    end: int
    num_slots: int
    encoder: Encoder | None = None
    failed: int | None = None


Failing = tuple[str, int] | None
"""A request whose load fails, and the first token that is not loaded."""


def failed(write: Write, failing: Failing) -> Write:
    """Return the write; if `failing` names its request, its load has failed."""
    if failing is None or write.request_id != failing[0]:
        return write
    return attrs.evolve(write, failed=failing[1])


class Schedule:
    """The writes of the open batch, and the computed count that each request must have.

    encoders: content of a request's cross-attention tables. loading: first position of a request's
    unfinished load. failed: position of its first failed block. epochs: in which each request that
    counts tokens began; epoch: of the weights.
    """

    def __init__(self) -> None:
        self.computed: dict[str, int] = {}
        self.encoders: dict[str, Encoder] = {}
        self.loading: dict[str, int] = {}
        self.failed: dict[str, int] = {}
        self.epochs: dict[str, int] = {}
        self.epoch = 0
        self._num_encoders = 0
        self._before: dict[str, int] = {}
        self._writes: list[Write] = []

    def assume(self, state: StateLike) -> None:
        """Start with a state whose open batch schedules nothing."""
        self.computed = {name: each.num_computed for name, each in state.requests.items()}
        self.encoders = encoders_of(state)
        counting = (each for each in state.requests.values() if each.num_computed)
        self.epochs = {each.request_id: each.epoch for each in counting}
        self.epoch = state.epoch
        self._before = {}
        self._writes = []

    def resume(self, before: Mapping[str, int], writes: Sequence[Write]) -> None:
        """Start with an open batch that already schedules something."""
        self._before = dict(before)
        self._writes = list(writes)

    def writes(self) -> tuple[Write, ...]:
        """Return the writes of the open batch, in the order of the calls."""
        return tuple(self._writes)

    def follow(
        self,
        state: StateLike,
        name: str,
        args: tuple[Any, ...],
        options: dict[str, Any],
        value: object,
    ) -> None:
        """Apply a call and its value. state: the one before the call."""
        if isinstance(value, Refused):
            return
        match name:
            case "add_request":
                self.computed[args[0].request_id] = 0
            case "remove_request":
                del self.computed[args[0]]
            case "fork":
                self._fork(state, *args)
            case "allocate_slots":
                self._allocated(state, args, options)
            case "append" if isinstance(value, Appended):
                for request_id in read_ids(state, args[0])[: value.done]:
                    if request_id not in self._before:  # without tokens nothing can be sampled
                        self._schedule(next_token(request_id, self.computed[request_id]))
            case "add_tokens":
                self._came_in(state, args[0], options.get("num_rejected", 0))
            case "load":
                self._loads(*args)
            case "complete_operation":
                self._completed(state, *args)
            case "accept":
                request_id, num_accepted = args
                most = len(state.requests[request_id].tokens) + num_accepted
                self.computed[request_id] = min(self.computed[request_id], most)
            case "free":
                self._cut(state, args[0], 0)
            case "truncate":
                self._cut(state, *args)
            case "unschedule":
                self._shorten(*args)
            case "rewind":
                fell = value if isinstance(value, tuple) else ()
                for request_id in dict.fromkeys((*args[0], *fell)):
                    kept = kept_by(state, request_id, *args)
                    self._cut(state, request_id, min(kept, self._came(state, request_id)))
            case "swap_out":
                for request_id in args[0]:
                    known = len(state.requests[request_id].tokens)
                    to_come = state.requests[request_id].num_output_placeholders > 0
                    self._cut(state, request_id, known - to_come)
            case "advance_epoch" if isinstance(value, int):
                self.epoch = value
        for request_id in [name for name in self.epochs if not self.computed.get(name)]:
            del self.epochs[request_id]

    def loads(self) -> list[Write]:
        """List the open batch's writes that load external tokens, in the order of the calls."""
        return [write for write in self._writes if write.loaded > write.start]

    def scheduled(self) -> dict[str, int]:
        """Return the requests that the open batch schedules, with their counts before it."""
        return dict(self._before)

    def take(self) -> list[Write]:
        """Take the batch, which runs with the current weights; return its writes in the order of
        the calls.
        """
        self.epochs |= {name: self.epoch for name, count in self._before.items() if not count}
        writes, self._writes, self._before = self._writes, [], {}
        return writes

    def check(self, state: StateLike) -> None:
        """Raise InvariantViolation (COMPUTED-RULE) unless the state has the engine's counts."""
        counts = {name: request.num_computed for name, request in state.requests.items()}
        if counts != self.computed:
            detail = f"computed counts {counts}, by the rules {self.computed}"
            raise InvariantViolation("COMPUTED-RULE", detail)

    def check_caps(self, state: StateLike) -> None:
        """Raise InvariantViolation (CAP) if a scheduled request holds more blocks of a windowed
        group than its cap. Requests with more slots than the cap allows for are not checked.
        """
        for write in self._writes:
            name = write.request_id
            if len(self._of(name)) > 1:
                continue
            to_come = state.requests[name].num_output_placeholders
            for index, table in enumerate(state.requests[name].tables):
                group, cap = state.config.groups[index], state.config.cap(index, to_come)
                most = state.config.max_num_batched_tokens or state.config.length_limit
                blocks = -(-write.num_slots // group.block_size)
                if cap is None or len(table) > blocks or write.num_slots - write.loaded > most:
                    continue
                held = sum(block >= state.device.first_block for block in table)
                if held > cap:
                    detail = f"request {name!r} holds {held} blocks of group {index}, cap {cap}"
                    raise InvariantViolation("CAP", detail)

    def _fork(self, state: StateLike, parent: str, child: str) -> None:
        before = self._before.get(parent, self.computed[parent])
        settled = min(before, len(state.requests[parent].tokens))
        shared = settled == self.computed[parent] or keeps_state(state, parent, before)
        self.computed[child] = settled if shared and resumes(state, parent, settled) else 0
        if self.computed[child]:
            self.epochs[child] = self.epochs[parent]
        if self.computed[child] and parent in self.encoders:
            self.encoders[child] = self.encoders[parent]

    def _allocated(self, state: StateLike, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        request_id, num_new = args[:2]
        hit: Hit | None = args[2] if len(args) > 2 else options.get("hit")
        start = self.computed[request_id] + (0 if hit is None else hit.num_tokens)
        limit = state.config.length_limit
        total = min(start + options.get("num_external_computed_tokens", 0), limit)
        end = total + num_new
        num_slots = min(end + options.get("num_lookahead_tokens", 0), limit)
        encoder = None
        num_encoder = options.get("num_encoder_tokens", 0)
        if num_encoder and request_id not in self.encoders:
            self._num_encoders += 1
            encoder = Encoder(FIRST_ENCODER - self._num_encoders, num_encoder)
            self.encoders[request_id] = encoder
        self._schedule(
            Write(
                request_id=request_id,
                start=start,
                loaded=total,
                end=end,
                num_slots=num_slots,
                encoder=encoder,
            )
        )

    def _came_in(self, state: StateLike, request_id: str, num_rejected: int) -> None:
        """Process output: positions scheduled after rejected drafts move up to where these were."""
        known = len(state.requests[request_id].tokens)
        count = min(num_rejected, max(0, self.computed[request_id] - known))
        if count and state.config.has_states:
            self._cut(state, request_id, 0)
            return
        self.computed[request_id] -= count
        if self._before.get(request_id, 0) > known:
            self._before[request_id] -= count
        self._writes = [
            moved_up(each, count) if each.request_id == request_id and each.start > known else each
            for each in self._writes
        ]

    def _loads(self, request_id: str, num_tokens: int, hit: Hit | None = None) -> None:
        before = self.computed[request_id]
        start = before + (0 if hit is None else hit.num_tokens)
        self._begin(request_id)
        self.computed[request_id] = start + num_tokens
        self.loading[request_id] = start

    def _completed(self, state: StateLike, number: int, done: bool) -> None:
        """Complete an operation. The last one of a load settles it: tokens before the first failed
        block stay.
        """
        operation = state.operations[number]
        request_id = operation.request_id
        if request_id is None:
            return
        if not done:
            failed = self.failed.get(request_id, operation.first_token)
            self.failed[request_id] = min(failed, operation.first_token)
        others = (op for n, op in state.operations.items() if n != number)
        if all(other.request_id != request_id for other in others):
            count = self.failed.get(request_id, self.computed[request_id])
            self._cut(state, request_id, count)

    def _came(self, state: StateLike, request_id: str) -> int:
        """Count a request's tokens before the first one that waits for a load or failed to load."""
        mine = (op for op in state.operations.values() if op.request_id == request_id)
        counts = [self.computed[request_id], *(operation.first_token for operation in mine)]
        return min([*counts, self.failed.get(request_id, counts[0])])

    def _schedule(self, write: Write) -> None:
        self._begin(write.request_id)
        self._writes.append(write)
        self.computed[write.request_id] = write.end

    def _begin(self, request_id: str) -> None:
        """Note that the open batch gives a request slots or hits."""
        before = self.computed[request_id]
        self._before.setdefault(request_id, before)
        if not before:
            self.epochs[request_id] = self.epoch

    def _shorten(self, request_id: str, num_tokens: int) -> None:
        """Stop writing a request from this token on, lookahead slots included."""
        if num_tokens < self.computed[request_id]:
            self.computed[request_id] = num_tokens
            shorter = (shortened(each, request_id, num_tokens) for each in self._writes)
            self._writes = [each for each in shorter if each is not None]
            if num_tokens == self._before[request_id]:
                del self._before[request_id]

    def _cut(self, state: StateLike, request_id: str, num_tokens: int) -> None:
        """Take a request out of the open batch, drop its drafts, and lower its count to
        `num_tokens`.
        """
        brought = any(each.loaded > each.start for each in self._of(request_id))
        brought = brought or (request_id in self.loading and request_id in self._before)
        self._writes = [each for each in self._writes if each.request_id != request_id]
        self.loading.pop(request_id, None)
        self.failed.pop(request_id, None)
        if state.requests[request_id].host_tables:
            num_tokens = 0
        known = len(state.requests[request_id].tokens)
        drafts = state.requests[request_id].num_scheduled_drafts
        before = self._before.pop(request_id, max(0, self.computed[request_id] - drafts))
        count = min(before, known)
        count = count if resumes(state, request_id, count) else 0
        if state.config.has_states and (brought or min(num_tokens, known) < before):
            num_tokens = 0
        count = min(count, num_tokens)
        self.computed[request_id] = count if resumes(state, request_id, count) else 0
        if not self.computed[request_id]:
            self.encoders.pop(request_id, None)

    def _of(self, request_id: str) -> list[Write]:
        """Return the writes of a request in the open batch."""
        return [each for each in self._writes if each.request_id == request_id]


def shortened(write: Write, request_id: str, num_tokens: int) -> Write | None:
    """Return a write without a request's positions from num_tokens on; None if nothing is left."""
    if write.request_id != request_id:
        return write
    if write.start >= num_tokens:
        return None
    num_slots = min(write.num_slots, num_tokens)
    return attrs.evolve(write, end=min(write.end, num_tokens), num_slots=num_slots)


def moved_up(write: Write, count: int) -> Write:
    """Move a write this many positions earlier."""
    start, loaded, end = write.start - count, write.loaded - count, write.end - count
    return attrs.evolve(
        write, start=start, loaded=loaded, end=end, num_slots=write.num_slots - count
    )


def next_token(request_id: str, start: int) -> Write:
    """Make the write of one token."""
    end = start + 1
    return Write(request_id=request_id, start=start, loaded=start, end=end, num_slots=end)


def encoders_of(state: StateLike) -> dict[str, Encoder]:
    """Return the contents of the cross-attention tables of a state's requests, full to the last
    slot. Requests that share their first block have equal contents.
    """
    found = {}
    for request in state.requests.values():
        tables = request.host_tables or request.tables
        for group, table in zip(state.config.groups, tables, strict=True):
            if group.is_cross and table:
                number = 2 * FIRST_ENCODER * (1 + table[0])
                found[request.request_id] = Encoder(number, len(table) * group.block_size)
    return found


def resumes(state: StateLike, request_id: str, num_tokens: int) -> bool:
    """Return whether a request has, in every group, the blocks that the query after this many
    tokens sees or shares.
    """
    tables = state.requests[request_id].tables
    for group, table in zip(state.config.groups, tables, strict=True):
        if not group.is_windowed or group.is_state:
            continue
        needed = table[skipped_blocks(group, num_tokens) : -(-num_tokens // group.block_size)]
        if any(block < state.device.first_block for block in needed):
            return False
    return True


def keeps_state(state: StateLike, request_id: str, num_tokens: int) -> bool:
    """Whether the state before the open batch, in each state group, is in a block that the batch
    does not overwrite, and of known tokens. num_tokens: those before the batch.
    """
    tables = state.requests[request_id].tables
    for group, table in zip(state.config.groups, tables, strict=True):
        place = (num_tokens - 1) // group.block_size
        if not group.is_state:
            continue
        if num_tokens > len(state.requests[request_id].tokens):
            return False
        if not 0 <= place < len(table) - 1 or table[place] < state.device.first_block:
            return False
    return True


def read_ids(state: StateLike, requests: Any) -> list[str]:
    """Read request ids, given as ids or as a buffer of rows."""
    if isinstance(requests, list | tuple):
        return list(requests)
    return [str(state.rows[row]) for row in requests]
