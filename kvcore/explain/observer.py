# SPDX-License-Identifier: Apache-2.0
"""An observer of a manager's calls, which explains each admission.

It receives each call after it was made: name, outcome, arguments. It also queries the manager:
counts, tables, and which blocks have keys. It explains an admission before it notes what the
admission took, hence as of the look-up that led to it. Blocks that a call takes, fills or withdraws
change the marks of their contents (known_tokens.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, cast

from kvcore.explain.explanation import Explanation
from kvcore.explain.known_tokens import LABEL
from kvcore.explain.lengths import (
    cut,
    lost_spans,
    mark_sizes,
    needed_marks,
    published_lengths,
    spans_of,
)
from kvcore.explain.parts import PartTables
from kvcore.explain.requests import KnownRequest, Namespaces, to_bytes
from kvcore.explain.tables import Tables
from kvcore.types.commands import Batch
from kvcore.types.values import Appended, Hit, Refused, Request


class AdmissionObserver:
    """Explains the admissions of one manager, from its first call on.

    explained: called with each explanation. Content that is older than the observer becomes known
    only by its hits.
    """

    def __init__(self, manager: Any, explained: Callable[[Explanation], object]) -> None:
        self.config = manager.config
        self._manager, self._explained = manager, explained
        self._sizes = mark_sizes(self.config)
        self._fine = self.config.hash_block_size
        self._is_fine = self.config.has_tails or self.config.has_states
        self._namespaces = Namespaces(self._sizes, self.config.hash_block_size)
        self._requests: dict[str, KnownRequest] = {}
        self._rows: dict[int, KnownRequest] = {}
        self._tables = (PartTables if self._is_fine else Tables)(manager)
        self._contents = self._tables.contents
        self._has_loads = False
        self._notes: dict[str, Callable[..., None]] = {
            "add_request": self._add_request,
            "fork": self._fork,
            "add_tokens": self._add_tokens,
            "add_drafts": self._add_drafts,
            "accept": self._accept,
            "truncate": self._truncate,
            "remove_request": self._remove_request,
            "append": self._append,
            "allocate_slots": self._allocate_slots,
            "load": self._load,
            "free": self._free,
            "swap_out": self._swap_out,
            "swap_in": self._swap_in,
            "take_batch": self._take_batch,
            "complete": self._publish_late,
            "advance_epoch": self._advance_epoch,
            "cache_blocks": self._publish_late,
            "remove_skipped_blocks": self._note_table,
            **{name: self._withdrawn(name) for name in _WITHDRAWING},
        }

    def note(self, name: str, outcome: Any, *args: Any, **options: Any) -> None:
        """Add a call that was made. Calls that raised or change nothing may be left out."""
        self._contents.call += 1
        note = self._notes.get(name)
        if isinstance(outcome, Refused):
            note = self._note_table if name == "allocate_slots" else None  # windows were trimmed
        if note is not None:
            note(outcome, *args, **options)

    def notes(self, name: str) -> bool:
        """Return whether the observer needs the calls of this name."""
        return name in self._notes

    def request(self, named: str | int) -> KnownRequest:
        """Return a request by its id or row."""
        return self._requests[named] if isinstance(named, str) else self._rows[named]

    def findable_blocks(self) -> set[int]:
        """Return the findable device blocks, as far as calls were observed."""
        return {block for block, content in enumerate(self._contents.of) if content}

    def _add_request(self, row: int, request: Request) -> None:
        known = self._namespaces.add(request)
        self._requests[known.name] = self._rows[row] = known

    def _fork(self, row: int, parent_id: str, child_id: str) -> None:
        parent = self._requests[parent_id]
        child = self._requests[child_id] = self._rows[row] = self._namespaces.fork(parent, child_id)
        self._refresh(child)
        self._tables.hold(child)
        child.was_admitted = child.holds
        self._tables.publish(child)

    def _add_tokens(self, _: None, request_id: str, tokens: Any, **options: Any) -> None:
        del options
        request = self._requests[request_id]
        request.extend(to_bytes(tokens))
        self._refresh(request)
        self._tables.publish(request)

    def _add_drafts(self, _: None, request_id: str, tokens: Any) -> None:
        self._requests[request_id].drafts = to_bytes(tokens)

    def _accept(self, _: None, request_id: str, num_accepted: int) -> None:
        request = self._requests[request_id]
        request.extend(request.drafts[: num_accepted * LABEL])
        self._refresh(request)
        self._tables.publish(request)

    def _truncate(self, _: None, request_id: str, num_tokens: int) -> None:
        request = self._requests[request_id]
        request.settle(self._contents.step, self._tables.epoch)
        self._namespaces.shorten(request, num_tokens)
        self._refresh(request)
        held = request.held
        self._tables.hold(request)
        self._contents.withdraw("truncate", held)
        self._tables.publish(request)

    def _remove_request(self, _: None, request_id: str) -> None:
        request = self._requests.pop(request_id)
        request.join()
        self._tables.unpublished.pop(request_id, None)
        if self._has_loads:  # when its last unconfirmed load ends, nothing rests on it any more
            self._contents.withdraw("remove_request", range(self.config.num_blocks))

    def _append(self, outcome: Appended, requests: Any, tokens: Any = None, **_: Any) -> None:
        named = requests.tolist() if hasattr(requests, "tolist") else list(requests)
        known = self._rows if named and isinstance(named[0], int) else self._requests
        callers = [cast("dict[Any, KnownRequest]", known)[each] for each in named]
        labels = None if tokens is None else to_bytes(tokens)
        grown = list(zip(*outcome.grown, strict=True)) if outcome.columns else []
        if self.config.has_windows:
            self._tables.trim(callers, grown)
        for place, group_id, position, block in grown:
            if block or not self.config.null_block:
                self._tables.grow(callers[place], (group_id, position), block)
        has_states, fine, step = self.config.has_states, self._fine, self._contents.step
        unpublished = self._tables.unpublished
        moved = {place for place, *_ in grown} if has_states else ()
        for place, request in enumerate(callers[: outcome.done]):
            if request.is_odd or has_states:
                self._tables.step(request, moved=place in moved)
            if labels is not None:
                request.extend(labels[place * LABEL : (place + 1) * LABEL])
            request.schedule(step)
            request.computed += 1
            if not request.computed % fine or (unpublished and request.name in unpublished):
                self._tables.publish(request, "decode")

    def _allocate_slots(
        self, outcome: Any, request_id: str, _: int, hit: Hit | None = None, **options: Any
    ) -> None:
        request = self._requests[request_id]
        if not request.computed:
            request.epoch = self._tables.epoch
        external = options.get("num_external_computed_tokens", 0)
        is_prompt = request.computed < request.num_prompt
        self._admit(request, hit, external)
        kind = "prompt" if is_prompt else "decode"
        fresh = [each for ids in outcome.blocks for each in ids]
        if self.config.has_windows:  # what a window gave up may be taken by the same call
            again = set(fresh).intersection(request.held)
            self._contents.release(again)
            request.held = [each for each in request.held if each not in again]
        if external or request.is_odd:
            self._tables.rewrite(request, kind)
        else:
            self._tables.take(request, fresh, kind)
        request.schedule(self._contents.step)
        request.computed = self._manager.num_computed_tokens(request_id)
        if not options.get("delay_cache_blocks"):
            self._tables.publish(request, kind)
        else:
            self._tables.unpublished[request_id] = request

    def _load(
        self, started: Any, request_id: str, num_tokens: int, hit: Any = None, **_: Any
    ) -> None:
        request = self._requests[request_id]
        if not request.computed:
            request.epoch = self._tables.epoch
        self._admit(request, hit, num_tokens)
        self._tables.rewrite(request, "load")
        request.schedule(self._contents.step)
        self._refresh(request)
        request.loading, request.load_start = set(started), request.computed - num_tokens
        self._tables.publish(request)

    def _free(self, _: None, request_id: str) -> None:
        request = self._requests[request_id]
        was_scheduled = request.step == self._contents.step
        request.settle(self._contents.step, self._tables.epoch)
        self._release(request)
        if was_scheduled:
            self._contents.withdraw("free", request.held)
        request.held, request.is_odd = [], False

    def _swap_out(self, _: Any, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            request = self._requests[request_id]
            request.settle(self._contents.step, self._tables.epoch)
            request.is_odd = True
            self._release(request)
            self._contents.withdraw("swap_out", request.held)
            request.held = []
            request.published = [0] * len(self._sizes)
            self._refresh(request)

    def _swap_in(self, _: Any, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            request = self._requests[request_id]
            self._refresh(request)
            self._tables.rewrite(request, "swap_in")
            request.holds = True
            self._tables.publish(request)

    def _take_batch(self, _: Batch) -> None:
        self._contents.step += 1
        self._publish_late()

    def _publish_late(self, *_: Any, **__: Any) -> None:
        self._tables.publish_owed()
        for request in list(self._tables.unpublished.values()):
            self._tables.publish(request)

    def _withdrawn(self, name: str) -> Callable[..., None]:
        """Make the note of a call that may lower counts and withdraw keys of any blocks."""

        def note(_: Any, *args: Any, **__: Any) -> None:
            for request in self._requests.values():
                if name == "complete_operation":
                    request.loading.discard(args[0])
                held = request.holds
                if held or request.computed:  # one that is swapped out may wait again
                    self._refresh(request)
                if held:
                    self._tables.hold(request)
                    request.is_odd = True
                    request.published = [0] * len(self._sizes)
            self._contents.withdraw(name, range(self.config.num_blocks))
            self._publish_late()

        return note

    def _advance_epoch(self, epoch: int, *_: Any, **__: Any) -> None:
        """Note that no key is left, and that new weights compute all tokens from now on."""
        self._tables.epoch = epoch
        self._namespaces.begin_epoch()
        self._contents.clear()
        self._tables.unpublished.clear()

    def _admit(self, request: KnownRequest, hit: Hit | None, external: int) -> None:
        """Explain first slots, and note the blocks of the hit."""
        self._has_loads = self._has_loads or external > 0
        if request.holds:
            return
        used = 0 if hit is None else hit.num_tokens
        self._explained(self._explain(request, used, external))
        request.holds = request.was_admitted = True
        request.published = [used // group.block_size for group in self.config.groups]
        if hit is not None:
            request.held += [block for ids in hit.blocks.blocks for block in ids]

    def _explain(self, request: KnownRequest, used: int, external: int) -> Explanation:
        request.join()
        others = self._requests.values()
        counts = self._namespaces.lengths(request, others, self._tables.epoch)
        num_tokens = len(request.labels) // LABEL
        marks = [request.place.marks(g, size) for g, size in enumerate(self._sizes)]
        found, least = published_lengths(self.config, marks, num_tokens, counts[-1])
        lengths = cut([*counts, *found], used)
        needed, size = needed_marks(self.config, marks, least, lengths[-4])
        gone = lost_spans(needed, size, lengths[-3], lengths[-4], self._contents.removals)
        return Explanation(
            request=request.name,
            call=self._contents.call,
            step=self._contents.step,
            again=request.was_admitted,
            num_tokens=num_tokens,
            lengths=lengths,
            spans=spans_of(lengths, gone, external),
            nearest=self._namespaces.nearest(request, lengths[0]),
        )

    def _refresh(self, request: KnownRequest) -> None:
        request.computed = self._manager.num_computed_tokens(request.name)
        request.holds = any(map(len, self._manager.get_blocks(request.name).blocks))
        if not request.holds:
            request.loading.clear()

    def _note_table(self, _: Any, request_id: str, *__: Any, **___: Any) -> None:
        """Note which blocks of a request have left its windows."""
        if self.config.has_windows:
            self._tables.hold(self._requests[request_id])

    def _release(self, request: KnownRequest) -> None:
        """Note that a request no longer holds anything."""
        request.holds, request.computed, request.step = False, 0, -1
        request.loading.clear()
        self._contents.release(request.held)
        request.places, request.states = {}, {}


_WITHDRAWING = (
    *("evict_blocks", "reset_prefix_cache", "cancel", "rewind", "unschedule"),
    "complete_operation",
)
