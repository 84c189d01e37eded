# SPDX-License-Identifier: Apache-2.0
"""The sanitizer: takes an adapter's observations of an engine, in the order of issue.

An observation is validated when it arrives, and takes effect in its turn, after earlier steps whose
tokens are not known yet. So a step is checked by the tables at its issue, however late its tokens
are known. An observation that contradicts those before it raises AdapterError and changes nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any
from zlib import crc32

from kvcore.sanitizer.chunks import CacheGroup, Chunk, SlotChunk
from kvcore.sanitizer.describe import Describer
from kvcore.sanitizer.digests import namespace_digest
from kvcore.sanitizer.errors import AdapterError
from kvcore.sanitizer.findings import Finding
from kvcore.sanitizer.issued import (
    END_MAX,
    EPOCH_MAX,
    Issued,
    check_drafts,
    check_end,
    check_numbered,
    check_step,
)
from kvcore.sanitizer.lines import BlockLists, SlotLists, WrongAccess
from kvcore.sanitizer.names import Named, Names
from kvcore.sanitizer.owners import Owners
from kvcore.sanitizer.tables import DEVICE
from kvcore.sanitizer.twin import make_slot_checker

Pairs = Iterable[tuple[int, int]]
NO_DRAFTS: Mapping[int, Sequence[int]] = {}
NO_SLOTS: Mapping[int, SlotLists] = {}
NO_TABLES: Mapping[int, BlockLists] = {}


class Sanitizer(Owners):
    """Follows the slots of one engine's cache and checks what its steps read.

    num_blocks: device blocks of each pool, null blocks included. full: read everything in every
    step, which finds the same and costs more. every: check the requests whose hashed name is 0
    modulo this; writes of all requests are followed. show_tokens: print tokens in findings. engine:
    name and version, for the texts. findings: certain ones; suspicions: the others, once per cause.

    Blocks are ids of the group's pool; starts, counts and positions are in tokens of the request; a
    place in a table is in blocks. Methods raise AdapterError, without any change, unless the
    request lives (for `begin`: does not live), group and block exist, the place is in the table or
    at its end, no position is above 2**32 - 1, and steps ascend, each completed or cancelled once.
    Raises AdapterError, BackendMissing.
    """

    def __init__(
        self,
        groups: Sequence[CacheGroup],
        num_blocks: int,
        *,
        full: bool = False,
        every: int = 1,
        show_tokens: bool = False,
        engine: str = "",
        backend: str | None = None,
    ) -> None:
        if not (groups and num_blocks > 0 and every > 0):
            reason = (
                f"{len(groups)} groups of {num_blocks} blocks, every {every}: none may be below 1"
            )
            raise AdapterError(observation="Sanitizer", reason=reason)
        self.groups, self.num_blocks, self.every = tuple(groups), num_blocks, every
        super().__init__(engine)
        self.findings: list[Finding] = []
        self._num_reported = 0  # by a step; a load is not reported
        self._num_epochs = 0
        self._names = Names()
        self._checker = make_slot_checker(self.groups, num_blocks, full, backend)
        self._describer = Describer(self._checker, self._names, self.groups, show_tokens, engine)
        self._queue: deque[Issued | Callable[[], object]] = deque()
        self._waiting: dict[int, Issued] = {}
        self._last = -1

    def __contains__(self, name: str) -> bool:
        """Return whether a request of this name lives."""
        return name in self._names.live

    @property
    def _now(self) -> int:
        """Return the step issued last, for texts."""
        return max(self._last, 0)

    def begin(
        self,
        name: str,
        tokens: Sequence[int],
        namespace: tuple[object, ...] = (),
        parent: str | None = None,
    ) -> None:
        """Follow a request. tokens: the engine's own growing list, read when a step completes.
        namespace: LoRA adapter, salt, media and embeddings, in this order; None where a request has
        none. parent: the forked request.
        """
        if name in self._names.live:
            raise AdapterError(observation=f"begin({name!r})", reason="it lives already")
        origin = None if parent is None else self._live("begin", parent).serial
        named = self._names.begin(name, namespace, tokens, len(self.groups))
        named.events.append((self._now, "begins with {} tokens", len(tokens)))
        base, checked = namespace_digest(namespace), crc32(name.encode()) % self.every == 0
        self._do(self._checker.begin, named.serial, tokens, base, origin, checked)

    def renew(self, name: str) -> None:
        """Let a request that gave up its blocks expect KV of the current weights."""
        self._do(self._checker.renew, self._live("renew", name).serial)

    def extend(
        self, name: str, group_id: int, blocks: Sequence[int], position: int | None = None
    ) -> None:
        """Put blocks, new ones or hits, into a request's table of a group. position: place of the
        first block, which replaces those there; default: the table's end.
        """
        named = self._live("extend", name)
        self._check_blocks("extend", group_id, blocks)
        length, now = named.num_blocks[group_id], self._now
        first = length if position is None else self._place("extend", name, position, length)
        named.num_blocks[group_id] = max(length, first + len(blocks))
        text = "table {} gets {} blocks from {} on"
        named.events.append((now, text, group_id, len(blocks), first))
        if self._released:
            self._suspect_use(name, now, self.groups[group_id].pool, blocks)
        self._do(self._checker.extend, named.serial, group_id, first, tuple(blocks), now)

    def cut(self, name: str, group_id: int, length: int) -> None:
        """Shorten a request's table of a group to this many blocks."""
        named = self._live("cut", name)
        self._check_blocks("cut", group_id, ())
        named.num_blocks[group_id] = self._place("cut", name, length, named.num_blocks[group_id])
        named.events.append((self._now, "table {} is cut to {} blocks", group_id, length))
        self._do(self._checker.cut, named.serial, group_id, length, self._now)

    def drop(self, name: str) -> None:
        """Give up a request's tables: it was preempted, has finished, or is sent again."""
        named = self._live("drop", name)
        named.num_blocks = [0] * len(self.groups)
        named.events.append((self._now, "gives up its tables"))
        self._do(self._checker.drop, named.serial, self._now)

    def end(self, name: str) -> None:
        """End a request, and give up its tables."""
        named = self._live("end", name)
        named.events.append((self._now, "ends"))
        self._names.end(name)
        self._do(self._checker.end, named.serial, self._now)

    def load(self, name: str, start: int, num_tokens: int, group_id: int | None = None) -> None:
        """Report that the KV of these positions was loaded from outside, correctly. group_id: the
        only group loaded; default: all.
        """
        serial = self._check_chunk(f"load({name!r})", Chunk(name, start, num_tokens))
        self._check_blocks("load", group_id or 0, ())
        self._do(self._load, serial, group_id, start, num_tokens, self._now)

    def issue(self, step: int, chunks: Sequence[Chunk | SlotChunk]) -> None:
        """Report the work of a step when it is issued. step: above earlier ones."""
        check_step(step, self._last)
        serials = [self._check_chunk(f"issue({step})", chunk) for chunk in chunks]
        drafts = {
            at: chunk.drafts
            for at, chunk in enumerate(chunks)
            if isinstance(chunk, Chunk) and chunk.drafts
        }
        slots = {
            at: (chunk.group_id, tuple(chunk.writes), tuple(chunk.reads))
            for at, chunk in enumerate(chunks)
            if isinstance(chunk, SlotChunk)
        }
        starts, counts = [chunk.start for chunk in chunks], [chunk.num_tokens for chunk in chunks]
        self._issue(Issued(step, serials, starts, counts, drafts, slots, NO_TABLES))

    def complete(self, step: int) -> list[Finding]:
        """Report that the tokens of a step are known; return the certain findings of all steps
        checked now.
        """
        self._pending("complete", step).is_complete = True
        return self._drain()

    def cancel(self, step: int) -> list[Finding]:
        """Report that an issued step never ran; return the certain findings of the steps that
        waited for it.
        """
        self._pending("cancel", step).is_cancelled = True
        return self._drain()

    def step(
        self,
        step: int,
        names: Sequence[str],
        starts: Sequence[int],
        counts: Sequence[int],
        drafts: Mapping[int, Sequence[int]] | None = None,
        tables: Mapping[int, BlockLists] | None = None,
    ) -> list[Finding]:
        """Issue a step and complete it at once, chunks by column.

        drafts, tables: by the number of the chunk; tables: blocks appended in all groups.
        """
        check_step(step, self._last)
        try:
            serials = list(map(self._names.serials.__getitem__, names))
        except KeyError as error:
            reason = f"no request {error.args[0]!r} lives"
            raise AdapterError(observation=f"step({step})", reason=reason) from None
        if not len(serials) == len(starts) == len(counts):
            raise AdapterError(observation=f"step({step})", reason="columns of different lengths")
        if serials and (min(starts) < 0 or min(counts) < 0):
            raise AdapterError(observation=f"step({step})", reason="a negative start or count")
        if serials and max(starts) + max(counts) > END_MAX:  # rare: then check each chunk
            for chunk in zip(names, starts, counts, strict=True):
                check_end(f"step({step})", *chunk)
        drafts, tables = drafts or NO_DRAFTS, tables or NO_TABLES
        if drafts or tables:
            check_numbered(f"step({step})", names, counts, drafts, tables)
        if tables:
            self._append(f"step({step})", [(names[at], tables[at]) for at in tables])
        if self._queue:  # it is read later, and the engine may reuse its lists
            starts, counts = tuple(starts), tuple(counts)
            drafts = {at: tuple(tokens) for at, tokens in drafts.items()}
            tables = {at: tuple(map(tuple, lists)) for at, lists in tables.items()}
        self._issue(Issued(step, serials, starts, counts, drafts, NO_SLOTS, tables))
        return self.complete(step)

    def copy(
        self, pairs: Pairs, group_id: int = 0, source: str = DEVICE, target: str = DEVICE
    ) -> None:
        """Copy blocks in order, (source, target), within a tier or between two."""
        self._transfer("copy", pairs, group_id, source, target)

    def move(
        self, pairs: Pairs, group_id: int = 0, source: str = DEVICE, target: str = DEVICE
    ) -> None:
        """Copy blocks and leave the sources unwritten."""
        self._transfer("move", pairs, group_id, source, target)

    def fail(self, blocks: Sequence[int], group_id: int = 0, target: str = DEVICE) -> None:
        """Report that copies to these blocks failed: they are unwritten."""
        self._check_blocks("fail", group_id, blocks, target)
        for block in blocks:
            place = (target, self.groups[group_id].pool, block)
            self._do(self._checker.lose, place, self._now)

    def zero(self, blocks: Sequence[int], group_id: int = 0) -> None:
        """Report that blocks were zeroed: they are unwritten, but readable if the group
        allows it.
        """
        self._check_blocks("zero", group_id, blocks)
        for block in blocks:
            self._do(self._checker.zero, (DEVICE, self.groups[group_id].pool, block), self._now)

    def epoch(self) -> None:
        """Report that the weights changed: requests that begin from now on expect KV of the new
        ones.

        Raises AdapterError at the 65,536th change.
        """
        if self._num_epochs == EPOCH_MAX:
            reason = f"weights can change {EPOCH_MAX} times"
            raise AdapterError(observation="epoch()", reason=reason)
        self._num_epochs += 1
        self._do(self._checker.advance_epoch)

    def _transfer(self, what: str, pairs: Pairs, group_id: int, source: str, target: str) -> None:
        pairs = list(pairs)
        self._check_blocks(what, group_id, [pair[0] for pair in pairs], source)
        self._check_blocks(what, group_id, [pair[1] for pair in pairs], target)
        pool = self.groups[group_id].pool
        for read, written in pairs:
            places = (source, pool, read), (target, pool, written)
            self._do(self._checker.copy, *places, self._now, what == "move")

    def _append(self, what: str, tables: Sequence[tuple[str, BlockLists]]) -> None:
        """Check blocks that chunks append to tables, and count them."""
        for _, lists in tables:
            for group_id, blocks in enumerate(lists):
                self._check_blocks(what, group_id, blocks)
        for name, lists in tables:
            named = self._names.live[name]
            for group_id, blocks in enumerate(lists):
                first, count = named.num_blocks[group_id], len(blocks)
                named.num_blocks[group_id] = first + count
                if count > 1:  # a decode step appends no event
                    text = "table {} gets {} blocks from {} on"
                    named.events.append((self._now, text, group_id, count, first))
                if self._released:
                    self._suspect_use(name, self._now, self.groups[group_id].pool, blocks)

    def _load(self, *arguments: Any) -> None:
        self._sort(self._checker.load(*arguments))

    def _place(self, what: str, name: str, position: int, length: int) -> int:
        if 0 <= position <= length:
            return position
        reason = f"place {position} of a table of {length} blocks"
        raise AdapterError(observation=f"{what}({name!r})", reason=reason)

    def _do(self, change: Callable[..., object], *args: Any) -> None:
        """Apply a change now, or after the waiting steps."""
        if self._queue:
            self._queue.append(lambda: change(*args))
        else:
            change(*args)

    def _issue(self, issued: Issued) -> None:
        self._last = issued.step
        self._waiting[issued.step] = issued
        self._queue.append(issued)

    def _pending(self, what: str, step: int) -> Issued:
        issued = self._waiting.get(step)
        if issued is None or issued.is_complete or issued.is_cancelled:
            reason = "it was not issued, or was completed or cancelled before"
            raise AdapterError(observation=f"{what}({step})", reason=reason)
        return issued

    def _drain(self) -> list[Finding]:
        """Apply everything before the first step whose tokens are not known."""
        while self._queue:
            first = self._queue[0]
            if isinstance(first, Issued) and not (first.is_complete or first.is_cancelled):
                break
            self._queue.popleft()  # before it runs, so that a change that raises is not repeated
            if not isinstance(first, Issued):
                first()
                continue
            del self._waiting[first.step]
            if first.is_complete:
                self._run(first)
        num_before, self._num_reported = self._num_reported, len(self.findings)
        return self.findings[num_before:]

    def _run(self, issued: Issued) -> None:
        """Check a step."""
        columns = issued.serials, issued.starts, issued.counts, issued.drafts, issued.slots
        tables = issued.tables
        self._sort(self._checker.step(issued.step, *columns, tables))
        if issued.serials and not any(issued.counts):
            empty = self._describer.empty_step(issued.step, len(issued.serials))
            self.findings.append(empty)

    def _sort(self, wrongs: Sequence[WrongAccess]) -> None:
        """Sort the results into findings and suspicions."""
        for finding in map(self._describer.describe, wrongs):
            if finding.certain:
                self.findings.append(finding)
            else:
                self._log_once(finding, (finding.name, finding.request, finding.writer))

    def _live(self, what: str, name: str) -> Named:
        named = self._names.live.get(name)
        if named is not None:
            return named
        what = what if what.endswith(")") else f"{what}({name!r})"
        raise AdapterError(observation=what, reason=f"no request {name!r} lives")

    def _check_blocks(
        self, what: str, group_id: int, blocks: Sequence[int], tier: str = DEVICE
    ) -> None:
        if not 0 <= group_id < len(self.groups):
            reason = f"group {group_id} of {len(self.groups)}"
            raise AdapterError(observation=what, reason=reason)
        if not blocks:
            return
        low, high = min(blocks), max(blocks)
        if low < 0 or (tier == DEVICE and high >= self.num_blocks):
            reason = f"block {low if low < 0 else high} of {self.num_blocks} ({tier})"
            raise AdapterError(observation=what, reason=reason)

    def _check_chunk(self, what: str, chunk: Chunk | SlotChunk) -> int:
        named = self._live(what, chunk.name)
        if chunk.start < 0 or chunk.num_tokens < 0:
            reason = f"{chunk.name} has start {chunk.start} and {chunk.num_tokens} tokens"
            raise AdapterError(observation=what, reason=reason)
        check_end(what, chunk.name, chunk.start, chunk.num_tokens)
        if isinstance(chunk, Chunk):
            check_drafts(what, chunk.name, chunk.num_tokens, chunk.drafts)
            return named.serial
        self._check_blocks(what, chunk.group_id, ())
        size = self.groups[chunk.group_id].block_size
        self._check_blocks(what, chunk.group_id, [max(slot, 0) // size for slot in chunk.writes])
        self._check_blocks(what, chunk.group_id, [slot // size for slot in chunk.reads])
        ends = chunk.start if self.groups[chunk.group_id].ring else chunk.start + chunk.num_tokens
        if len(chunk.writes) != chunk.num_tokens or len(chunk.reads) > ends:
            reason = (
                f"{chunk.name}: {len(chunk.writes)} writes and {len(chunk.reads)} reads of a chunk"
            )
            raise AdapterError(observation=what, reason=f"{reason} that ends at {ends}")
        return named.serial
