# SPDX-License-Identifier: Apache-2.0
"""Users check parts of their own: a policy, a scheduler, a manager."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import attrs
import pytest

from kvcore import KVCacheManager, Request, State, _twin
from kvcore.check.extend.manager_model import ManagerModel
from kvcore.check.extend.policies import LRU, FreeBlock, check_policy, check_scheduler
from kvcore.check.search.report import Report
from kvcore.check.search.search import check
from kvcore.check.stories.story import render
from kvcore.check.world.world import Move, World
from kvcore.pool.block_pool import PoolTransaction
from kvcore.trace.calls import Call
from tests.check.worlds import world
from tests.check.wrong_managers import CONFIG, Mixes, Raises, Refuses, Stops, Unmade, Wrong
from tests.conftest import need_twin

SMALL = world(2, 2, 3)


def found(report: Report) -> tuple[str, str]:
    """Return name and detail of a report's violation, after writing its story."""
    assert report.violation is not None
    return report.violation.name, report.violation.detail


ALONE = world(2, 1, 4)
"""A world in which every other order of free blocks gives other states or edges."""


@pytest.mark.parametrize("where", [ALONE, world(2, 2, 2)], ids=["one request", "two"])
def test_a_policy_that_is_the_default_changes_nothing(where: World) -> None:
    report = check_policy(LRU(), where)
    usual = check(where, backend="rust" if _twin.available() else "python")
    assert report.verdict == usual.verdict == "complete"
    assert (report.num_states, report.num_edges) == (usual.num_states, usual.num_edges)


class UncachedFirst(LRU):
    """The policy of `uncached_first`, written as a class."""

    def join(self, queue: Sequence[FreeBlock], block: FreeBlock) -> int:
        return len(queue) if block.cached else 0


def test_a_policy_reaches_the_states_of_the_built_in_one() -> None:
    backend = "rust" if _twin.available() else "python"
    built_in = check(world(2, 1, 4, eviction="uncached_first"), backend=backend)
    own = check_policy(UncachedFirst(), ALONE)
    assert (own.num_states, own.num_edges) == (built_in.num_states, built_in.num_edges)


class Careless(LRU):
    """A policy that returns values that are no place, or nothing."""

    def __init__(self, place: Any) -> None:
        self.place = place

    def leave(self, _: Sequence[FreeBlock]) -> int:
        place: int = self.place() if callable(self.place) else self.place
        return place


def forget() -> int:
    raise KeyError("times")


@pytest.mark.parametrize(
    ("place", "said"),
    [
        (2, "leave gives 2, which is not a place up to 1"),
        (forget, "leave raised KeyError: 'times'"),
    ],
)
def test_a_policy_that_fails_is_a_finding_of_its_own(place: Any, said: str) -> None:
    take = PoolTransaction.take
    name, detail = found(check_policy(Careless(place), SMALL, properties=["POLICY"]))
    assert name == "POLICY"
    assert said in detail
    assert PoolTransaction.take is take


def first_come(where: World, state: State) -> Iterator[Call]:
    """Serve one request after another, each to its end."""
    for name in ("a", "b"):
        request = state.requests.get(name)
        if request is None:
            yield Call("add_request", (Request(name, [1, 2]),))
        elif not request.num_computed:
            if len(request.tokens) < where.num_tokens:
                yield Call("allocate_slots", (name, 2))
            else:
                yield Call("remove_request", (name,))
        elif len(request.tokens) < where.num_tokens:
            yield Call("append", ([name], [3]))
        else:
            yield Call("free", (name,))


def test_a_scheduler_that_brings_everyone_to_an_end_is_right() -> None:
    where = world(4, 2, 3)
    report = check_scheduler(first_come, where)
    assert report.verdict == "complete", report.violation
    assert report.num_states > 10


def test_a_scheduler_that_never_frees_stands_still() -> None:
    def hold(_: World, state: State) -> Iterator[Call]:
        for name in ("a", "b"):
            if name not in state.requests:
                yield Call("add_request", (Request(name, [1, 2]),))
            elif not state.requests[name].num_computed:
                yield Call("allocate_slots", (name, 2))

    name, detail = found(check_scheduler(hold, SMALL))
    assert name == "DEADLOCK-FREE"
    assert "no move of the scheduler ever produces a token" in detail


def test_a_scheduler_that_raises_is_a_finding_of_its_own() -> None:
    def lost(_: World, state: State) -> Iterator[Call]:
        if state.requests:
            raise LookupError("nobody")
        yield Call("add_request", (Request("a", [1, 2]),))

    name, detail = found(check_scheduler(lost, SMALL))
    assert name == "SCHEDULER"
    assert "raised LookupError: nobody, in a state with 2 free blocks and 'a' waiting" in detail


def no_moves(_: World, __: State) -> Any:
    return ()


def nothing(_: World, __: State) -> Any:
    return None


def a_text(_: World, __: State) -> Any:
    yield "append"


def unknown(_: World, __: State) -> Any:
    yield Call("jump")


def too_few(_: World, __: State) -> Any:
    yield Call("allocate_slots", ("a",))


def misused(_: World, __: State) -> Any:
    yield Call("free", ("nobody",))


def silent(_: World, __: State) -> Any:
    def script() -> Any:
        yield from ()

    yield Move("wait", script)


def breaks_off(_: World, __: State) -> Any:
    def script() -> Any:
        yield Call("add_request", (Request("a", [1, 2]),))
        raise LookupError("lost")

    yield Move("arrive", script)


@pytest.mark.parametrize(
    ("moves", "said"),
    [
        (no_moves, "has no move, in a state with 2 free blocks and no request"),
        (nothing, "raised TypeError: 'NoneType' object is not iterable, in a state"),
        (a_text, "gives 'append', which is neither a Call nor a Move, in a state"),
        (unknown, "calls jump, which the core does not have, in a state"),
        (
            too_few,
            "with wrong arguments: missing a required argument: 'num_new_tokens', in a state",
        ),
        (misused, "has only moves that are misuse: free('nobody') is UnknownRequest, in a state"),
        (silent, "gives the move 'wait', which makes no call, in a state"),
        (breaks_off, "raised LookupError: lost, in its move 'arrive', in a state"),
    ],
)
def test_a_scheduler_that_gives_no_moves_is_a_finding_of_its_own(moves: Any, said: str) -> None:
    where = attrs.evolve(SMALL, moves=moves)
    for report in (check_scheduler(moves, SMALL), check(where)):
        name, detail = found(report)
        assert name == "SCHEDULER"
        assert said in detail


def test_a_scheduler_is_pythons_alone() -> None:
    with pytest.raises(ValueError, match="a scheduler of your own is Python's alone"):
        check_scheduler(first_come, SMALL, backend="rust")


def test_the_managers_of_this_project_are_right_from_outside() -> None:
    def make() -> KVCacheManager:
        return KVCacheManager(CONFIG, "python")

    model = ManagerModel(make, CONFIG, num_tokens=3, name=KVCacheManager.encode)
    report = check(model, max_states=500)
    assert report.verdict == "bounded by states"
    assert model.notes["call", "allocate_slots: refused"]
    assert model.notes["call", "fork: done"]


def test_the_compiled_manager_is_right_from_outside_too() -> None:
    need_twin()

    def make() -> KVCacheManager:
        return KVCacheManager(CONFIG, "rust")

    name = KVCacheManager.encode
    report = check(ManagerModel(make, CONFIG, num_tokens=3, name=name), max_depth=2)
    assert report.verdict == "bounded by depth"


class Leaks(Wrong):
    @property
    def num_free_blocks(self) -> int:
        free = super().num_free_blocks
        return free - self.state().batch.number if free == CONFIG.num_usable_blocks else free


class Forgets(Wrong):
    def get_block_ids(self, request_id: str) -> tuple[list[int], ...]:
        return tuple(ids[1:] for ids in super().get_block_ids(request_id))


@pytest.mark.parametrize(
    ("make", "name", "said"),
    [
        (Raises, "NOCRASH", "free('0') raises RuntimeError('0')"),
        (Leaks, "LEAK", "blocks are free without requests"),
        (Refuses, "L-ADMIT", "request '0' needs 1 of 2 blocks and is refused"),
        (Stops, "DEADLOCK-FREE", "no call brings request '0' a token further"),
        (Mixes, "KV-READ", "r0 reads block 0 slot 0: it holds"),
        (Forgets, "KV-READ", "the table of r0 has 0 blocks, none for token 0"),
    ],
)
def test_a_wrong_manager_is_found_by_what_users_see(make: Any, name: str, said: str) -> None:
    model = ManagerModel(make, CONFIG, num_tokens=3, name=KVCacheManager.encode)
    report = check(model, max_depth=4)
    wrong, detail = found(report)
    assert wrong == name
    assert said in detail
    assert report.violation is not None
    assert render(report.violation, model, colour=False).startswith(f"{name} (")


class Lacks(Wrong):
    append = None  # type: ignore[assignment] # that is what is wrong


class Uncounted(Wrong):
    num_free_blocks = None  # type: ignore[assignment] # that is what is wrong


class OneTooMany(Wrong):
    def get_block_ids(self, request_id: str) -> tuple[list[int], ...]:
        return (*super().get_block_ids(request_id), [])


class Shapeless(Wrong):
    def get_block_ids(self, _: str) -> Any:
        return {"blocks": 1}


class Outside(Wrong):
    def get_block_ids(self, request_id: str) -> tuple[list[int], ...]:
        return tuple([each + 7 for each in ids] for ids in super().get_block_ids(request_id))


class NoBatch(Wrong):
    def take_batch(self) -> Any:
        return super().take_batch().number


class BareHit(Wrong):
    def get_computed_blocks(self, request_id: str) -> Any:
        return super().get_computed_blocks(request_id).num_tokens


class LongHit(Wrong):
    def get_computed_blocks(self, _: str) -> Any:
        return [], 9


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (Unmade, "making one raises OSError('no pool')"),
        (Lacks, "a Lacks has no method append"),
        (Uncounted, "num_free_blocks is None, not a number of them"),
        (OneTooMany, "get_block_ids('0') gives ([0], []), not the ids of blocks"),
        (Shapeless, "get_block_ids('0') gives {'blocks': 1}, not the ids of blocks"),
        (Outside, "get_block_ids('0') names block 7, the pool has 2"),
        (NoBatch, "take_batch() gives 0, not commands"),
        (BareHit, "get_computed_blocks('0') gives 0, not the blocks of a hit and its tokens"),
        (LongHit, "get_computed_blocks('0') gives a hit of 9 tokens of 1"),
    ],
)
def test_a_manager_that_lacks_or_answers_something_else_is_named(make: Any, said: str) -> None:
    model = ManagerModel(make, CONFIG, num_tokens=3, name=KVCacheManager.encode)
    report = check(model, max_depth=4)
    name, detail = found(report)
    assert name == "MANAGER"
    assert said in detail
    assert [each["name"] for each in report.to_json()["properties"]][-1] == "MANAGER"
    assert report.violation is not None
    assert render(report.violation, model, colour=False).startswith("MANAGER (crash)")
