# SPDX-License-Identifier: Apache-2.0
"""What a manager with `explain_entries` remembers besides its state, to explain misses.

Each transition is observed before and after, to learn which keys it removed, and for which request.
A miss is explained as of the look-up before a request's first slots; until it has slots, as of now.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from typing import Any

import attrs

from kvcore.explain.explanation import Missed, Removal
from kvcore.explain.lengths import cut, lost_spans, needed_marks, published_lengths, spans_of
from kvcore.explain.removed_keys import ENTRY_BYTES, RemovedKeys
from kvcore.explain.takers import ADMITTING, Taker, find_taker
from kvcore.transitions import TRANSITIONS, arguments
from kvcore.types.arguments import read_once
from kvcore.types.errors import InvalidConfig, KvcoreError
from kvcore.types.memory import room_for
from kvcore.types.values import Hit, Refused, Status, Verdict

LIVE_CAUSES = ("unknown", "", "groups_disagree", "unused")
"""Causes between the most that a look-up could find and the last four of LENGTHS."""


@attrs.define
class _Known:
    """A request. admission: the explanation of its first slots, while it has any."""

    num_prompt: int
    skips_reading: bool
    admission: Missed | None = None


class Live:
    """Watches the transitions of one manager, without changing its state. num_entries: keys to
    remember. Raises InvalidConfig if they do not fit in memory.
    """

    def __init__(self, manager: Any, num_entries: int) -> None:
        needed = ENTRY_BYTES * num_entries
        available = room_for(needed)
        if available < needed:
            reason = f"they need {needed} bytes, {available} are available"
            raise InvalidConfig(field="explain_entries", value=num_entries, reason=reason)
        self.num_entries = num_entries
        self._manager, self._core = manager, manager._core
        self._removed = RemovedKeys(num_entries)
        self.forget()
        self._removed.has_dropped = False  # nothing was removed yet
        notes: dict[str, Callable[..., None]] = {
            "add_request": self._add_request,
            "fork": self._fork,
            "remove_request": self._remove_request,
            "take_batch": self._take_batch,
            "cancel": self._cancel,
            "advance_epoch": self._advance_epoch,
        }
        for name in TRANSITIONS:
            manager.__dict__[name] = self._watched(name, getattr(manager, name), notes.get(name))

    def forget(self) -> None:
        """Start again from the manager's state, with nothing known of its past."""
        state = self._manager.state()
        self.config = state.config
        self._removed.clear()
        self._removed.has_dropped = True
        self._call = self._step = 0
        self._freed = array("I", bytes(4 * self.config.num_blocks))
        self._rows = {request.row: name for name, request in state.requests.items()}
        self._requests = {
            name: _Known(len(request.tokens), request.skip_reading)
            for name, request in state.requests.items()
        }
        self._seen = self._core.open_changes(0)[0]

    def explain_miss(self, request_id: str) -> Missed | None:
        """Explain the miss of a request. Raises UnknownRequest."""
        if self._core.status(request_id) is Status.WAITING:
            return self._explain(request_id, None, 0)
        return self._requests[request_id].admission

    def _watched(
        self, name: str, method: Callable[..., Any], note: Callable[..., None] | None
    ) -> Callable[..., Any]:
        """Wrap a transition so that it is observed."""
        names = arguments(name)
        admits, resets = name in ADMITTING, name == "reset_prefix_cache"

        def call(*args: Any, **options: Any) -> Any:
            if len(args) > len(names):
                return method(*args, **options)  # the transition itself refuses it
            given = dict(zip(names, args, strict=False)) | options
            for each in ("requests", "request_ids"):
                if each in given:
                    given[each] = read_once(given[each])
            explained = self._before(name, given) if admits else None
            keys = self._all_keys() if resets else []
            kind = self._kind(name, given)
            outcome = method(**given)
            self._call += 1
            if note is not None and not isinstance(outcome, Refused):
                note(outcome, **given)
            if explained is not None and not isinstance(outcome, Refused):
                self._requests[given["request_id"]].admission = explained
            self._note_changes(
                kind, find_taker(self._core, name, outcome, given, self._rows.__getitem__)
            )
            if outcome is True:
                for key in keys:
                    self._removed.add(key, Removal(None, self._call, kind, self._step, 0))
            return outcome

        return call

    def _before(self, call: str, given: dict[str, Any]) -> Missed | None:
        """Explain the miss of a request that holds nothing, unless the call is refused."""
        name, hit = given.get("request_id"), given.get("hit")
        if not isinstance(name, str) or name not in self._requests:
            return None
        if self._core.status(name) is not Status.WAITING:
            return None
        if call == "allocate_slots":
            try:
                if self._manager.can_allocate(**given) is not Verdict.OK:
                    return None
            except (KvcoreError, TypeError):
                return None  # the call itself raises that
        used = hit.num_tokens if isinstance(hit, Hit) else 0
        external = given.get("num_external_computed_tokens", given.get("num_tokens", 0))
        return self._explain(name, used, external) if isinstance(external, int) else None

    def _explain(self, name: str, used: int | None, external: int) -> Missed:
        """Explain a miss. used: tokens of the hit that was passed; None: what a look-up finds."""
        num_tokens, known = self._core.num_tokens(name), self._requests[name]
        marks = [array("I", each) for each in self._core.key_marks(name, self._removed, num_tokens)]
        found, least = published_lengths(self.config, marks, num_tokens, num_tokens)
        if used is None:
            used = 0 if known.skips_reading else found[-1]
        lengths = cut([found[2], *found[4:]], used)  # what was never kept is not known
        needed, size = needed_marks(self.config, marks, least, lengths[1])
        lost = lost_spans(needed, size, lengths[2], lengths[1], self._removed)
        spans = spans_of(lengths, lost, external, LIVE_CAUSES)
        return Missed(
            request=name,
            call=self._call,
            step=self._step,
            num_tokens=num_tokens,
            lengths=lengths[1:],
            spans=spans,
            complete=not self._removed.has_dropped,
        )

    def _kind(self, name: str, given: dict[str, Any]) -> str:
        """Return the kind of a call: one of TAKERS, or its own name."""
        if name == "append":
            return "decode"
        if name != "allocate_slots":
            return name
        known = self._requests.get(given.get("request_id", ""))
        if known is None:
            return "decode"
        computed = self._core.num_computed_tokens(given["request_id"])
        return "prompt" if computed < known.num_prompt else "decode"

    def _note_changes(self, kind: str, taker: Taker) -> None:
        """Note what the call added to the open batch."""
        self._seen, freed, removed = self._core.open_changes(self._seen)
        for block in freed:
            self._freed[block] = self._step
        for block, key in removed:
            idle = self._step - self._freed[block]
            self._removed.add(key, Removal(taker(block), self._call, kind, self._step, idle))

    def _all_keys(self) -> list[int]:
        """Return all keys of blocks and of their parts, folded."""
        blocks = range(self.config.num_blocks)
        return [key for block in blocks for key in self._core.block_keys(block)]

    def _add_request(self, row: int, request: Any) -> None:
        name = request.request_id
        self._rows[row] = name
        skips = bool(request.skip_reading_prefix_cache)
        self._requests[name] = _Known(self._core.num_tokens(name), skips)

    def _fork(self, row: int, parent_id: str, child_id: str) -> None:
        self._rows[row] = child_id
        self._requests[child_id] = attrs.evolve(self._requests[parent_id], admission=None)

    def _remove_request(self, _: None, request_id: str) -> None:
        del self._requests[request_id]

    def _take_batch(self, _: Any) -> None:
        self._step += 1
        self._seen = 0

    def _cancel(self, *_: Any, **__: Any) -> None:
        self._seen = 0  # the open batch is a new one, which names the keys that were withdrawn

    def _advance_epoch(self, *_: Any, **__: Any) -> None:
        self._removed.clear()
