# SPDX-License-Identifier: Apache-2.0
"""What an engine knows of the open batch: which positions its forward pass will write.

Rules: written from the design's sentences on computed counts and on leaving the open batch, not
from the code: it is the second opinion on both. A request's count before the batch is the one
before its first slots in it, and before its hits. Twin: none.
"""

from __future__ import annotations

from typing import Any

from kvcore.errors import InvariantViolation
from kvcore.ghost import Write
from kvcore.state import State
from kvcore.values import Appended, Hit, Refused


class Schedule:
    """The writes of the open batch, and the computed count that each request must have."""

    def __init__(self) -> None:
        self.computed: dict[str, int] = {}
        self._before: dict[str, int] = {}
        self._writes: dict[str, list[Write]] = {}

    def assume(self, state: State) -> None:
        """Start with a state whose open batch schedules nothing."""
        self.computed = {name: each.num_computed for name, each in state.requests.items()}
        self._before = {}
        self._writes = {}

    def follow(
        self, state: State, name: str, args: tuple[Any, ...], options: dict[str, Any], value: object
    ) -> None:
        """Take in a call that was made and what it gave; state is the one before it."""
        if isinstance(value, Refused):
            return
        match name:
            case "add_request":
                self.computed[args[0].request_id] = 0
            case "remove_request":
                del self.computed[args[0]]
            case "fork":
                parent, child = args
                self.computed[child] = self._before.get(parent, self.computed[parent])
            case "allocate_slots":
                self._allocated(state, args, options)
            case "append" if isinstance(value, Appended):
                for request_id in read_ids(state, args[0])[: value.done]:
                    self._schedule(state, request_id, self.computed[request_id], 1, 0)
            case "free":
                self._leave(args[0])
                self.computed[args[0]] = 0
            case "truncate":
                self._leave(args[0])
                self.computed[args[0]] = min(self.computed[args[0]], args[1])
            case "swap_out":
                for request_id in args[0]:
                    self._leave(request_id)

    def take(self) -> list[Write]:
        """The writes of the batch, which is taken now."""
        writes = [write for each in self._writes.values() for write in each]
        self._before = {}
        self._writes = {}
        return writes

    def check(self, state: State) -> None:
        """Raise InvariantViolation (COMPUTED-RULE) unless the state counts as the engine does."""
        counts = {name: request.num_computed for name, request in state.requests.items()}
        if counts != self.computed:
            detail = f"computed counts {counts}, by the rules {self.computed}"
            raise InvariantViolation("COMPUTED-RULE", detail)

    def _allocated(self, state: State, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        request_id, num_new = args[:2]
        hit: Hit | None = args[2] if len(args) > 2 else options.get("hit")
        before = self.computed[request_id]
        start = before + (0 if hit is None else hit.num_tokens)
        external = options.get("num_external_computed_tokens", 0)
        total = min(start + external, state.config.length_limit)
        lookahead = options.get("num_lookahead_tokens", 0)
        self._before.setdefault(request_id, before)
        self._schedule(state, request_id, start, total - start + num_new, lookahead)

    def _schedule(
        self, state: State, request_id: str, start: int, count: int, num_lookahead: int
    ) -> None:
        end = start + count
        num_slots = min(end + num_lookahead, state.config.length_limit)
        self._before.setdefault(request_id, self.computed[request_id])
        self._writes.setdefault(request_id, []).append(Write(request_id, start, end, num_slots))
        self.computed[request_id] = end

    def _leave(self, request_id: str) -> None:
        self._writes.pop(request_id, None)
        before = self._before.pop(request_id, self.computed[request_id])
        self.computed[request_id] = before


def read_ids(state: State, requests: Any) -> list[str]:
    """Request ids from ids or from a buffer of rows."""
    if isinstance(requests, list | tuple):
        return list(requests)
    return [str(state.rows[row]) for row in requests]
