# SPDX-License-Identifier: Apache-2.0
"""A manager of one's own as a model: any object with `KVCacheManager`'s method names.

Nothing is read of it but what an engine reads: values, block tables, commands, the number of free
blocks. It is checked by what a user observes: a query reads what was written for its own prefix
(KV-READ), no legal call raises (NOCRASH), nothing stays behind when all have left (LEAK), a request
that fits is admitted to an empty pool (L-ADMIT) and never left standing (DEADLOCK-FREE). It must
have `add_request`, `allocate_slots`, `append`, `free`, `remove_request`, `get_block_ids`,
`take_batch` and `num_free_blocks` (MANAGER); where it has `get_computed_blocks`, `fork` or
`reset_prefix_cache`, those are called, too.
"""

from __future__ import annotations

import copy
import pickle
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import attrs

from kvcore.check.extend.engine_view import RequestView, View, WrongRead, made, refused
from kvcore.check.extend.manager_protocol import make_manager, num_free, num_hit
from kvcore.check.properties.registry import PROPERTIES
from kvcore.check.world.model import Broken, CheckedCall, Edge
from kvcore.oracle.prefixes import Prefixes
from kvcore.trace.calls import Call
from kvcore.types.config import Config
from kvcore.types.errors import InvariantViolation, WrongArgument
from kvcore.types.values import Outcome, Request

OPTIONAL = frozenset({"fork", "reset_prefix_cache"})
ANYWHERE = ("add_request", "take_batch", "reset_prefix_cache")
USER_PROPERTIES = ("KV-READ", "NOCRASH", "LEAK", "L-ADMIT", "DEADLOCK-FREE", "MANAGER")


@attrs.frozen
class Managed:
    """A manager, and what the engine around it knows."""

    manager: Any
    view: View


class ManagerModel:
    """All runs of a manager over a small pool, to be given to `check`.

    make: gives a new manager. config: its pool as the checks must know it: blocks, groups, their
    block sizes. num_requests, num_tokens, num_prompt, num_letters: as of `World`. name: bytes that
    are equal for managers that will answer alike; its pickle unless given. copied: a deep copy.
    States are folded only where all bytes are equal, so give `check` a depth as well. Raises
    WrongArgument where a new manager cannot be copied or named.
    """

    def __init__(
        self,
        make: Callable[[], Any],
        config: Config,
        *,
        num_requests: int = 2,
        num_tokens: int = 4,
        num_prompt: int | None = None,
        num_letters: int = 2,
        name: Callable[[Any], bytes] = pickle.dumps,
        copied: Callable[[Any], Any] = copy.deepcopy,
    ) -> None:
        self.config = config
        self.num_requests, self.num_tokens = num_requests, num_tokens
        self.num_prompt, self.num_letters = num_prompt or num_tokens, num_letters
        self.notes: Counter[tuple[str, str]] = Counter()
        self.known = {each: PROPERTIES[each] for each in USER_PROPERTIES}
        self.make, self.named, self.copied = make, name, copied
        self._prefixes = Prefixes(config)
        self._num_free, self._calls = 0, frozenset[str]()
        try:
            first = make_manager(make)
        except InvariantViolation:  # told at the start
            return
        for asked, answer in (("copied", copied), ("name", name)):
            try:
                answer(first)
            except Exception as error:
                expected = f"a function that takes a {type(first).__name__}"
                raise WrongArgument(name=asked, expected=expected, value=error) from error
        self._num_free = num_free(first)
        self._calls = frozenset(each for each in OPTIONAL if hasattr(first, each))

    def start(self) -> Managed:
        """A new manager, and an engine that knows no request."""
        view = View(self.config, self._prefixes)
        try:
            return Managed(make_manager(self.make), view)
        except InvariantViolation as error:
            return Managed(error, view)

    def edges(self, node: Managed) -> Iterator[Edge]:
        """What an engine does next, each with the batch that it fills."""
        for name, calls in self._moves(node.view):
            manager, view = self.copied(node.manager), node.view
            steps: list[CheckedCall] = []
            for call in (*calls, Call("take_batch")):
                view = self.step(steps, manager, view, call)
                asked = call.name == "allocate_slots" and name == "admit"
                if asked and refused(steps[-1].outcome.value):
                    self.check_admission(steps, view, call.args[0])
                    view = self.step(steps, manager, view, Call("remove_request", call.args[:1]))
            yield Edge(name, tuple(steps), Managed(manager, view))

    def name(self, node: Managed) -> bytes:
        """The manager's own name, and all that the engine and the memory know.

        Raises InvariantViolation (MANAGER).
        """
        if isinstance(node.manager, InvariantViolation):
            raise node.manager
        return self.named(node.manager) + node.view.key()

    def check(self, node: Managed) -> None:
        """Check a new node: what is left at rest, and whether anyone can go on."""
        requests = node.view.requests.values()
        free = num_free(node.manager)
        if not len(requests) and free != self._num_free:
            detail = f"{free} of {self._num_free} blocks are free when all have left"
            raise InvariantViolation("LEAK", detail)
        unfinished = [each for each in requests if self._fits(each)]
        if not unfinished or any(self._goes_on(node, each) for each in unfinished):
            return
        for request in unfinished:
            if self._goes_on(self._alone(node, request), request):
                return
        names = ", ".join(repr(each.request_id) for each in unfinished)
        detail = f"no call brings request {names} a token further, whoever else is preempted"
        raise InvariantViolation("DEADLOCK-FREE", detail)

    def pack(self, node: Managed) -> Any:
        """The node itself: edges are made on copies."""
        return node

    def unpack(self, data: Any) -> Managed:
        """The node itself."""
        node: Managed = data
        return node

    def step(self, steps: list[CheckedCall], manager: Any, view: View, call: Call) -> View:
        """Make a call and note its step; the view after it. Raises Broken."""
        made_with = call
        try:
            if call.name == "allocate_slots":
                made_with = Call("get_computed_blocks", call.args[:1])
            made_with = call = self._with_hit(manager, view, call)
            after, outcome = made(manager, view, call)
        except InvariantViolation as error:
            seen = error.view if isinstance(error, WrongRead) else view
            steps.append(CheckedCall(view, made_with, Outcome(seen, (), None)))
            raise Broken(error.name, error.detail, tuple(steps)) from error
        said = "refused" if after is view and call.name != "take_batch" else "done"
        self.notes["call", f"{call.name}: {said}"] += 1
        steps.append(CheckedCall(view, call, outcome))
        return after

    def check_admission(self, steps: list[CheckedCall], view: View, name: str) -> None:
        """Raise Broken (L-ADMIT) where a request that fits was refused a pool that nobody uses."""
        if not refused(steps[-1].outcome.value):
            return
        needed = self.config.blocks_for(len(view.requests[name].tokens))
        used = any(each.is_running for each in view.requests.values())
        if not used and needed <= self._num_free:
            detail = f"request {name!r} needs {needed} of {self._num_free} blocks and is refused"
            raise Broken("L-ADMIT", detail, tuple(steps))

    def _with_hit(self, manager: Any, view: View, call: Call) -> Call:
        """An allocation of all tokens that are left, behind the hit that the manager finds.

        Raises InvariantViolation (NOCRASH, MANAGER).
        """
        if call.name != "allocate_slots":
            return call
        name = call.args[0]
        left = len(view.requests[name].tokens)
        if not hasattr(manager, "get_computed_blocks"):
            return Call(call.name, (name, left))
        hit, num_tokens = num_hit(manager, name, left)
        args = (name, left - num_tokens)
        return Call(call.name, (*args, hit) if num_tokens else args)

    def _goes_on(self, node: Managed, request: RequestView) -> bool:
        """Whether a call brings a request a token further."""
        manager, name = self.copied(node.manager), request.request_id
        if request.is_running:
            call = Call("append", ([name], [0]))
        else:
            call = self._with_hit(manager, node.view, Call("allocate_slots", (name,)))
        return made(manager, node.view, call)[0] is not node.view

    def _alone(self, node: Managed, request: RequestView) -> Managed:
        """The node with every other request preempted."""
        manager, view = self.copied(node.manager), node.view
        for name, other in sorted(view.requests.items()):
            if other.is_running and name != request.request_id:
                view, _ = made(manager, view, Call("free", (name,)))
        view, _ = made(manager, view, Call("take_batch"))
        return Managed(manager, view)

    def _fits(self, request: RequestView) -> bool:
        """Whether a request has a token to come that an empty pool can hold."""
        more = len(request.tokens) + request.is_running
        return more <= self.num_tokens and self.config.blocks_for(more) <= self._num_free

    def _moves(self, view: View) -> Iterator[tuple[str, tuple[Call, ...]]]:
        names = (str(number) for number in range(self.num_requests + 1))
        fresh = next(name for name in names if name not in view.requests)
        room = len(view.requests) < self.num_requests
        for prompt in self._continuations(view, ()) if room else ():
            add = Call("add_request", (Request(fresh, list(prompt)),))
            yield "admit", (add, Call("allocate_slots", (fresh,)))
        for name, request in sorted(view.requests.items()):
            if not request.is_running:
                yield "resume", (Call("allocate_slots", (name,)),)
                yield "abort", (Call("remove_request", (name,)),)
                continue
            if len(request.tokens) < self.num_tokens:
                for token in self._next_tokens(view, request.tokens):
                    yield "decode", (Call("append", ([name], [token])),)
            if room and "fork" in self._calls:
                yield "fork", (Call("fork", (name, fresh)),)
            yield "preempt", (Call("free", (name,)),)
            yield "finish", (Call("free", (name,)), Call("remove_request", (name,)))
        if "reset_prefix_cache" in self._calls:
            yield "reset", (Call("reset_prefix_cache"),)

    def _continuations(self, view: View, prefix: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        if len(prefix) < self.num_prompt:
            for token in self._next_tokens(view, prefix):
                yield (*prefix, token)
                yield from self._continuations(view, (*prefix, token))

    def _next_tokens(self, view: View, prefix: tuple[int, ...]) -> list[int]:
        """The tokens that ever followed a prefix in this run, and a fresh one."""
        known = sorted(
            each[-1] for each in view.prefixes if len(each) > len(prefix) and each[:-1] == prefix
        )
        return known + [each for each in range(self.num_letters) if each not in known][:1]


def replay(model: ManagerModel, calls: Iterable[Call], name: str) -> None:
    """Make an engine's calls on a new manager of a model, as the checker made them.

    A call that no engine could make any more ends it without a word. Raises InvariantViolation of
    this name for what is wrong.
    """
    try:
        _replay(model, calls)
    except (InvariantViolation, Broken) as error:
        if error.name == name:
            raise InvariantViolation(name, error.detail) from error


def _replay(model: ManagerModel, calls: Iterable[Call]) -> None:
    node, steps, last = model.start(), list[CheckedCall](), ""
    model.name(node)
    manager, view = node.manager, node.view
    for call in calls:
        known = view.requests.get(call.args[0]) if call.args and call.name != "append" else None
        if call.name == "append":
            known = view.requests.get(call.args[0][0])
        if call.name not in ANYWHERE and (
            known is None or (call.name in ("append", "free", "fork")) != known.is_running
        ):
            return
        view = model.step(steps, manager, view, call)
        if call.name == "allocate_slots" and last == "add_request":
            model.check_admission(steps, view, call.args[0])
        if call.name == "take_batch":
            model.check(Managed(manager, view))
        last = call.name
