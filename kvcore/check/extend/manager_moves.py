# SPDX-License-Identifier: Apache-2.0
"""The moves of an engine over a user's manager, and which of them share a step.

A step is planned as in engines: finished requests leave, running ones go on or are preempted for
others, then more are admitted, unless one was preempted. No request is served twice. Forks and
resets have a step of their own.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator
from itertools import product
from typing import Protocol

from kvcore.check.extend.engine_view import View
from kvcore.trace.calls import Call
from kvcore.types.values import Request

Move = tuple[str, tuple[Call, ...]]
ORDER = {"finish": 0, "abort": 0, "decode": 1, "preempt": 1, "admit": 2, "resume": 2}
"""The place of a move in a step; moves without a place have a step of their own."""


class Sizes(Protocol):
    """The sizes of a world of requests."""

    num_requests: int
    num_tokens: int
    num_prompt: int
    num_letters: int


def moves(sizes: Sizes, view: View, calls: Container[str]) -> Iterator[Move]:
    """Yield every move of an engine, in a fixed order. calls: the optional methods that the manager
    has.
    """
    names = (str(number) for number in range(sizes.num_requests + 1))
    fresh = next(name for name in names if name not in view.requests)
    room = len(view.requests) < sizes.num_requests
    for length in range(1, sizes.num_prompt + 1) if room else ():
        for prompt in product(range(sizes.num_letters), repeat=length):
            add = Call("add_request", (Request(fresh, list(prompt)),))
            yield "admit", (add, Call("allocate_slots", (fresh,)))
    for name, request in sorted(view.requests.items()):
        if not request.is_running:
            yield "resume", (Call("allocate_slots", (name,)),)
            yield "abort", (Call("remove_request", (name,)),)
            continue
        if len(request.tokens) < sizes.num_tokens:
            for token in range(sizes.num_letters):
                yield "decode", (Call("append", ([name], [token])),)
        if room and "fork" in calls:
            yield "fork", (Call("fork", (name, fresh)),)
        yield "preempt", (Call("free", (name,)),)
        yield "finish", (Call("free", (name,)), Call("remove_request", (name,)))
    if "reset_prefix_cache" in calls:
        yield "reset", (Call("reset_prefix_cache"),)


def batched(found: Iterable[Move], view: View, planned: tuple[str, ...]) -> Iterator[Move]:
    """Yield the moves that an engine may add to a step after the planned ones."""
    if not planned:
        yield from found
    elif planned[-1] in ORDER:
        for name, calls in found:
            late = ORDER.get(name, -1)
            if late < ORDER[planned[-1]] or (late == 2 and "preempt" in planned):
                continue
            fresh = name == "admit" or served_by(calls[0]) not in view.writes
            if fresh or (name == "preempt" and others_run(view)):
                yield name, calls


def others_run(view: View) -> bool:
    """Return whether a request runs that this step has not served."""
    return any(
        each.is_running and each.request_id not in view.writes for each in view.requests.values()
    )


def served_by(call: Call) -> str:
    """Return the request of a call that names one."""
    named: str = call.args[0][0] if call.name == "append" else call.args[0]
    return named
