# SPDX-License-Identifier: Apache-2.0
"""A user's own manager as a model: any object with `KVCacheManager`'s method names.

The checker reads only what an engine reads: values, block tables, commands, the number of free
blocks. It checks what a user observes: a query reads what was written for its own prefix (KV-READ),
no legal call raises (NOCRASH), no block stays in use when all requests have left (LEAK), a request
that fits is admitted to an empty pool (L-ADMIT) and always progresses (DEADLOCK-FREE). The manager
must have `add_request`, `allocate_slots`, `append`, `free`, `remove_request`, `get_block_ids`,
`take_batch` and `num_free_blocks` (MANAGER), possibly under other names (`names`). If it has
`get_computed_blocks`, `fork` or `reset_prefix_cache`, these are called too; `end_step` is called
after a batch was executed. `rings` are the groups whose blocks are read before they are written.
"""

from __future__ import annotations

import copy
import pickle
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import attrs

from kvcore.check.extend.engine_view import RequestView, View, WrongRead, made, refused
from kvcore.check.extend.manager_moves import batched, moves
from kvcore.check.extend.manager_protocol import Renamed, make_manager, num_free, num_hit, rings_of
from kvcore.check.properties.registry import PROPERTIES
from kvcore.check.world.model import Broken, CheckedCall, Edge
from kvcore.oracle.prefixes import Prefixes
from kvcore.trace.calls import Call
from kvcore.types.config import Config
from kvcore.types.errors import InvariantViolation, WrongArgument
from kvcore.types.values import Outcome

OPTIONAL = frozenset({"fork", "reset_prefix_cache"})
ANYWHERE = ("add_request", "take_batch", "reset_prefix_cache")
USER_PROPERTIES = ("KV-READ", "NOCRASH", "LEAK", "L-ADMIT", "DEADLOCK-FREE", "MANAGER")


@attrs.frozen
class Managed:
    """A manager, and the view of the engine around it."""

    manager: Any
    view: View


class ManagerModel:
    """All runs of a manager over a small pool, for `check`.

    make: returns a new manager. config: its pool for the checks: blocks, groups, their block sizes.
    num_requests, num_tokens, num_prompt, num_letters: as in `World`. moves_per_batch: most moves of
    one step: running requests go on or are preempted for one another, then others are admitted.
    names: the manager's own names of methods. name: returns bytes that are equal for managers that
    will answer alike; default: its pickle. copied: returns a deep copy.
    States are folded only if all bytes are equal. A manager can fold more with a method
    `state_name(slots)`, which returns bytes that are equal for states that answer alike, whatever
    the ids of blocks; `slots(block)` returns the contents of a held or findable block.
    Raises WrongArgument if a new manager cannot be copied or named.
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
        moves_per_batch: int = 1,
        names: Mapping[str, str] | None = None,
        name: Callable[[Any], bytes] = pickle.dumps,
        copied: Callable[[Any], Any] = copy.deepcopy,
    ) -> None:
        self.config = config
        self.num_requests, self.num_tokens = num_requests, num_tokens
        self.num_prompt, self.num_letters = num_prompt or num_tokens, num_letters
        self.notes: Counter[tuple[str, str]] = Counter()
        self.known = {each: PROPERTIES[each] for each in USER_PROPERTIES}
        self.moves_per_batch, self.names = moves_per_batch, dict(names or {})
        self.make, self.named, self.copied = make, name, copied
        self._prefixes = Prefixes(config)
        self._num_free, self._calls = 0, frozenset[str]()
        self._rings = frozenset[int]()
        try:
            first = self._new()
        except InvariantViolation:  # warned at the start
            return
        start, kind = Managed(first, View(config, self._prefixes)), type(bare(first)).__name__
        for is_admission, answer in (("copied", self._copies), ("name", self.name)):
            try:
                answer(start)
            except Exception as error:
                expected = f"a function that takes a {kind}"
                raise WrongArgument(name=is_admission, expected=expected, value=error) from error
        self._num_free = num_free(first)
        self._calls = frozenset(each for each in OPTIONAL if hasattr(first, each))
        self._rings = rings_of(first, config)

    def start(self) -> Managed:
        """Return a new manager, with an engine without requests."""
        view = View(self.config, self._prefixes, rings=self._rings)
        try:
            return Managed(self._new(), view)
        except InvariantViolation as error:
            return Managed(error, view)

    def edges(self, node: Managed) -> Iterator[Edge]:
        """Yield the engine's possible next moves, each with the batch that it fills."""
        yield from self._edges(node, (), ())

    def _edges(
        self, node: Managed, planned: tuple[str, ...], before: Sequence[CheckedCall]
    ) -> Iterator[Edge]:
        """Yield the batches that begin with the moves planned so far. before: their steps."""
        for name, calls in batched(moves(self, node.view, self._calls), node.view, planned):
            manager, view = self.duplicate(node.manager), node.view
            steps = [*before]
            for call in calls:
                view = self.step(steps, manager, view, call)
                is_admission = call.name == "allocate_slots" and name == "admit"
                if is_admission and refused(steps[-1].outcome.value):
                    self.check_admission(steps, view, call.args[0])
                    view = self.step(steps, manager, view, Call("remove_request", call.args[:1]))
            names = (*planned, name)
            further = None
            if len(names) < self.moves_per_batch:
                further = Managed(self.duplicate(manager), view), names, tuple(steps)
            view = self.step(steps, manager, view, Call("take_batch"))
            yield Edge(", ".join(names), tuple(steps), Managed(manager, view))
            if further is not None:
                yield from self._edges(*further)

    def name(self, node: Managed) -> bytes:
        """Return the name of a node: the manager's own, and the state of engine and memory.

        Raises InvariantViolation (MANAGER).
        """
        if isinstance(node.manager, InvariantViolation):
            raise node.manager
        own = getattr(node.manager, "state_name", None)
        if own is None:
            return self.named(bare(node.manager)) + node.view.key()
        named: bytes = own(node.view.slots)
        return named + node.view.key(with_contents=False)

    def duplicate(self, manager: Any) -> Any:
        """Copy a manager, with the same names. Raises InvariantViolation (MANAGER)."""
        try:
            copied = self.copied(bare(manager))
        except Exception as error:
            kind = type(bare(manager)).__name__
            raise InvariantViolation("MANAGER", f"copying a {kind} raises {error!r}") from error
        return Renamed(copied, self.names) if isinstance(manager, Renamed) else copied

    def _copies(self, node: Managed) -> None:
        self.copied(bare(node.manager))

    def _new(self) -> Any:
        """Make a new manager. Raises InvariantViolation (MANAGER)."""
        return make_manager(self.make, self.names)

    def check(self, node: Managed) -> None:
        """Check a new node: blocks left at rest, and whether a request can progress."""
        requests = node.view.requests.values()
        free = num_free(node.manager)
        if not len(requests) and free != self._num_free:
            detail = f"{free} of {self._num_free} blocks are free without requests"
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
        """Return the node itself: edges are made on copies."""
        return node

    def unpack(self, data: Any) -> Managed:
        """Return the node itself."""
        node: Managed = data
        return node

    def step(self, steps: list[CheckedCall], manager: Any, view: View, call: Call) -> View:
        """Make a call and note its step; return the view after it. Raises Broken."""
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
        """Raise Broken (L-ADMIT) if a request that fits was refused although the pool was
        unused.
        """
        if not refused(steps[-1].outcome.value):
            return
        needed = self.config.blocks_for(len(view.requests[name].tokens))
        used = any(each.is_running for each in view.requests.values())
        if not used and needed <= self._num_free:
            detail = f"request {name!r} needs {needed} of {self._num_free} blocks and is refused"
            raise Broken("L-ADMIT", detail, tuple(steps))

    def _with_hit(self, manager: Any, view: View, call: Call) -> Call:
        """Make the allocation of all remaining tokens, after the hit that the manager finds.

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
        """Return whether some call lets a request progress by a token."""
        manager, name = self.duplicate(node.manager), request.request_id
        if request.is_running:
            call = Call("append", ([name], [0]))
        else:
            call = self._with_hit(manager, node.view, Call("allocate_slots", (name,)))
        return made(manager, node.view, call)[0] is not node.view

    def _alone(self, node: Managed, request: RequestView) -> Managed:
        """Return the node with every other request preempted."""
        manager, view = self.duplicate(node.manager), node.view
        for name, other in sorted(view.requests.items()):
            if other.is_running and name != request.request_id:
                view, _ = made(manager, view, Call("free", (name,)))
        view, _ = made(manager, view, Call("take_batch"))
        return Managed(manager, view)

    def _fits(self, request: RequestView) -> bool:
        """Return whether a request has a next token that an empty pool can hold."""
        more = len(request.tokens) + request.is_running
        return more <= self.num_tokens and self.config.blocks_for(more) <= self._num_free


def bare(manager: Any) -> Any:
    """Return the manager itself, without the renaming."""
    return manager.manager if isinstance(manager, Renamed) else manager


def replay(model: ManagerModel, calls: Iterable[Call], name: str) -> None:
    """Make an engine's calls on a new manager of a model, as the checker made them.

    A call that no engine could make any more ends the replay silently. Raises InvariantViolation
    with this name for an error.
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
        known = None
        if call.name not in ANYWHERE:
            known = view.requests.get(call.args[0][0] if call.name == "append" else call.args[0])
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
