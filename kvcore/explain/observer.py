# SPDX-License-Identifier: Apache-2.0
"""An observer of a manager's calls, which explains each admission.

It receives each call before and after it is made: name, arguments, outcome. Before an admission it
looks up which keys of the request are findable, and how the others were lost; so an explanation is
as of the look-up that led to it. After each call it notes the keys that the call lost.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable
from typing import Any

from kvcore.explain.explanation import Explanation, Removal
from kvcore.explain.known_tokens import LABEL
from kvcore.explain.lengths import cut, lost_spans, needed_marks, published_lengths, spans_of
from kvcore.explain.lost_keys import Loss, make_lost_keys
from kvcore.explain.requests import Decodes, KnownRequest, Namespaces, to_bytes
from kvcore.explain.takers import find_taker
from kvcore.transitions import TRANSITIONS, arguments
from kvcore.types.errors import KvcoreError
from kvcore.types.values import Appended, Hit, Refused, Request, Status, Verdict


class AdmissionObserver:
    """Explains the admissions of one manager, from its first call on.

    explained: called with each explanation. Of content that is older than the observer it knows
    only what is findable.
    """

    def __init__(self, manager: Any, explained: Callable[[Explanation], object]) -> None:
        self.config = manager.config
        self._manager, self._core, self._explained = manager, manager._core, explained
        self._namespaces = Namespaces(self.config.hash_block_size)
        self._requests: dict[str, KnownRequest] = {}
        self._rows: dict[int, KnownRequest] = {}
        self._decodes = Decodes()
        self._lost = make_lost_keys(self._core, self.config.num_blocks)
        self._removals: list[Removal] = []
        self._call = self._step = self._epoch = 0
        self._seen, *_ = self._core.open_changes(0)
        self._looked: tuple[tuple[int, ...], list[array[int]]] | None = None
        self._keys: list[list[int]] = []
        self._largest = max(group.block_size for group in self.config.groups)
        self._befores: dict[str, Callable[..., None]] = {
            "allocate_slots": self._before_slots,
            "load": self._look_up,
            "reset_prefix_cache": self._list_keys,
        }
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
            "advance_epoch": self._advance_epoch,
            "reset_prefix_cache": self._reset_prefix_cache,
            **dict.fromkeys(("cancel", "rewind", "unschedule"), self._refresh_all),
            "complete_operation": self._complete_operation,
        }

    def before(self, name: str) -> Callable[..., None] | None:
        """Return what must receive the arguments of calls of this name before they are made."""
        return self._befores.get(name)

    def note(self, name: str, outcome: Any, *args: Any, **options: Any) -> None:
        """Add a call that was made. Calls that raised may be left out."""
        self._call += 1
        if name in _BEGINS_BATCH:
            self._seen = 0
        first, apart = len(self._removals), name in _TAKES_FOR_SEVERAL
        self._seen, losses = self._lost.note(self._core, self._seen, self._step, first, apart)
        if name not in _WITHOUT_COUNTS:
            self._decodes.flush()
        if losses:
            self._note_losses(losses, name, outcome, *args, **options)
        note = self._notes.get(name)
        if note is not None and not isinstance(outcome, Refused):
            note(outcome, *args, **options)

    def notes(self, name: str) -> bool:
        """Return whether the observer needs the calls of this name."""
        return name in TRANSITIONS

    def request(self, named: str | int) -> KnownRequest:
        """Return a request by its id or row."""
        self._decodes.flush()
        return self._requests[named] if isinstance(named, str) else self._rows[named]

    def _before_slots(self, *args: Any, **options: Any) -> None:
        """Look up as far as the call is an admission; one that waits is refused step by step."""
        self._looked = None
        try:
            if self._manager.can_allocate(*args, **options) is Verdict.OK:
                self._look_up(*args, **options)
        except (KvcoreError, TypeError):
            return  # the call itself raises that

    def _look_up(self, request_id: str, *_: Any, **__: Any) -> None:
        """Note what is findable of a request that holds nothing, and how the rest was lost."""
        self._looked = None
        request = self._requests.get(request_id)
        if request is None or self._core.status(request_id) is not Status.WAITING:
            return
        self._decodes.flush()
        request.join()
        counts = self._namespaces.lengths(request, self._requests.values(), self._epoch)
        end = counts[-1] + self._largest  # one that drops its last hit needs one block more
        marks = [array("I", each) for each in self._core.key_marks(request_id, self._lost, end)]
        self._looked = counts, marks

    def _list_keys(self) -> None:
        """Note all keys, of which no command will tell that they are lost."""
        self._keys = [self._core.block_keys(block) for block in range(self.config.num_blocks)]

    def _note_losses(
        self, losses: list[Loss], name: str, outcome: Any, *args: Any, **options: Any
    ) -> None:
        """Note to whom a call lost keys."""
        given = dict(zip(arguments(name), args, strict=False)) | options
        taker = find_taker(self._core, name, outcome, given, lambda row: self._rows[row].name)
        kind = "decode" if name == "append" else name
        if name == "allocate_slots":
            request = self._requests[given["request_id"]]
            self._decodes.settle(request)
            kind = "prompt" if request.computed < request.num_prompt else "decode"
        call, step = self._call, self._step
        self._removals += [
            Removal(None if idle is None else taker(block), call, kind, step, idle or 0)
            for block, idle in losses
        ]

    def _add_request(self, row: int, request: Request) -> None:
        known = self._namespaces.add(request)
        self._requests[known.name] = self._rows[row] = known

    def _fork(self, row: int, parent_id: str, child_id: str) -> None:
        parent = self._requests[parent_id]
        child = self._requests[child_id] = self._rows[row] = self._namespaces.fork(parent, child_id)
        self._refresh(child)
        child.was_admitted = self._core.status(child_id) is not Status.WAITING

    def _add_tokens(self, _: None, request_id: str, tokens: Any, **__: Any) -> None:
        request = self._requests[request_id]
        request.extend(to_bytes(tokens))
        self._refresh(request)

    def _add_drafts(self, _: None, request_id: str, tokens: Any) -> None:
        self._requests[request_id].drafts = to_bytes(tokens)

    def _accept(self, _: None, request_id: str, num_accepted: int) -> None:
        request = self._requests[request_id]
        request.extend(request.drafts[: num_accepted * LABEL])
        self._refresh(request)

    def _truncate(self, _: None, request_id: str, num_tokens: int) -> None:
        request = self._requests[request_id]
        request.settle(self._step, self._epoch)
        self._namespaces.shorten(request, num_tokens)
        self._refresh(request)

    def _remove_request(self, _: None, request_id: str) -> None:
        self._requests.pop(request_id).join()

    def _append(self, outcome: Appended, requests: Any, tokens: Any = None, **_: Any) -> None:
        named = requests.tolist() if hasattr(requests, "tolist") else list(requests)
        by_row = named and isinstance(named[0], int)
        known: dict[Any, KnownRequest] = self._rows if by_row else self._requests
        labels = None if tokens is None else to_bytes(tokens)
        if outcome.done < len(named):
            named = named[: outcome.done]
            labels = None if labels is None else labels[: outcome.done * LABEL]
        self._decodes.add(named, known, labels, self._step)

    def _allocate_slots(
        self, _: Any, request_id: str, __: int, hit: Hit | None = None, **options: Any
    ) -> None:
        self._admit(request_id, hit, options.get("num_external_computed_tokens", 0))

    def _load(
        self, started: Any, request_id: str, num_tokens: int, hit: Any = None, **_: Any
    ) -> None:
        request = self._admit(request_id, hit, num_tokens)
        request.loading, request.load_start = set(started), request.computed - num_tokens

    def _free(self, _: None, request_id: str) -> None:
        self._release(self._requests[request_id])

    def _swap_out(self, _: Any, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            self._release(self._requests[request_id])
            self._refresh(self._requests[request_id])

    def _swap_in(self, _: Any, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            self._refresh(self._requests[request_id])

    def _take_batch(self, _: Any) -> None:
        self._step += 1

    def _refresh_all(self, *_: Any, **__: Any) -> None:
        for request in self._requests.values():
            self._refresh(request)

    def _complete_operation(self, _: Any, operation: int, *__: Any, **___: Any) -> None:
        for request in self._requests.values():
            request.loading.discard(operation)
        self._refresh_all()

    def _reset_prefix_cache(self, is_done: bool) -> None:
        last = None
        for block, keys in enumerate(self._keys if is_done else ()):
            if keys:
                idle = self._lost.idle(block, self._step) or 0
                removal = Removal(None, self._call, "reset_prefix_cache", self._step, idle)
                if removal != last:
                    self._removals.append(removal)
                self._lost.lose(keys, len(self._removals) - 1)
                last = removal

    def _advance_epoch(self, epoch: int, *_: Any, **__: Any) -> None:
        """Note that no key is left, and that new weights compute all tokens from now on."""
        self._epoch = epoch
        self._namespaces.begin_epoch()
        self._lost.clear()

    def _admit(self, request_id: str, hit: Hit | None, external: int) -> KnownRequest:
        """Explain first slots, and note what the call computes."""
        request = self._requests[request_id]
        self._decodes.settle(request)
        if not request.computed:
            request.epoch = self._epoch
        if self._looked is not None:
            self._explained(self._explain(request, 0 if hit is None else hit.num_tokens, external))
            request.was_admitted = True
        if hit is not None and external:
            self._lost.use([each for ids in hit.blocks.blocks for each in ids], self._step)
        request.schedule(self._step)
        self._refresh(request)
        return request

    def _explain(self, request: KnownRequest, used: int, external: int) -> Explanation:
        assert self._looked is not None
        counts, marks = self._looked
        num_tokens = len(request.labels) // LABEL
        found, least = published_lengths(self.config, marks, num_tokens, counts[-1])
        lengths = cut([*counts, *found], used)
        needed, size = needed_marks(self.config, marks, least, lengths[-4])
        gone = lost_spans(needed, size, lengths[-3], lengths[-4], self._removals)
        return Explanation(
            request=request.name,
            call=self._call,
            step=self._step,
            again=request.was_admitted,
            num_tokens=num_tokens,
            lengths=lengths,
            spans=spans_of(lengths, gone, external),
            nearest=self._namespaces.nearest(request, lengths[0]),
        )

    def _refresh(self, request: KnownRequest) -> None:
        request.computed = self._core.num_computed_tokens(request.name)
        if self._core.status(request.name) is Status.WAITING:
            request.loading.clear()

    def _release(self, request: KnownRequest) -> None:
        """Note that a request gives up its blocks."""
        request.settle(self._step, self._epoch)
        request.computed, request.step = 0, -1
        request.loading.clear()


_BEGINS_BATCH = ("take_batch", "cancel")
_TAKES_FOR_SEVERAL = ("append", "swap_in")
_WITHOUT_COUNTS = ("append", "take_batch", "complete", "allocate_slots", "load")
"""Calls whose notes need no counts of other requests."""
