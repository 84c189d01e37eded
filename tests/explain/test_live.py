# SPDX-License-Identifier: Apache-2.0
"""`explain_miss`: what a manager remembers says of a miss what an observer of all calls says."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize

from kvcore import Config, KVCacheManager, Request
from kvcore.errors import InvalidConfig, InvalidCount, UnknownRequest
from kvcore.explain.errors import ExplainOff
from kvcore.explain.explanation import LENGTHS, Explanation, Missed, Removal
from kvcore.explain.removed_keys import RemovedKeys
from kvcore.trace.calls import Misuse
from tests.conftest import Backend, need_twin
from tests.explain.watched import WatchedLockstep
from tests.helpers.amount import examples
from tests.helpers.machine import DATA, Machine
from tests.helpers.worlds import configs, inside_blocks

FIRST, SECOND = list(range(8)), list(range(20, 28))


class Remembering(WatchedLockstep):
    """A run beside which a manager that remembers makes the same calls."""

    def __init__(self, config: Config, backend: Backend) -> None:
        super().__init__(config, twin=False)
        self.manager = KVCacheManager(config, backend, explain_entries=10_000)

    def call(self, name: str, *args: Any, **options: Any) -> Any:
        """Make a call on both."""
        num_before = len(self.explained)
        value = super().call(name, *args, **options)
        if not isinstance(value, Misuse):
            getattr(self.manager, name)(*args, **options)
            for each in self.explained[num_before:]:
                missed = self.manager.explain_miss(each.request)
                assert missed is not None
                assert missed.complete
                check_same(missed, each, self.state.config)
        return value


def check_same(missed: Missed, each: Explanation, config: Config) -> None:
    """Check that the remembered account equals the observed one.

    Not compared: a key that was found before its batch was taken back, of which an observer says
    that nothing was computed; and starts of chunks.
    """
    place = missed.hits
    for span in missed.spans:
        assert (span.start, span.end > span.start) == (place, True), missed
        place = span.end
    computed = each.lengths[LENGTHS.index("this_epoch")]
    dropped = max(
        (config.hash_block_size if config.has_tails else each.block_size) * config.drops_last_hit(g)
        for g, each in enumerate(config.groups)
    )
    needed = missed.lengths[0] and missed.lengths[0] + dropped
    if needed > computed or any(g.kind == "chunked_local" for g in config.groups):
        return
    assert missed.lengths == each.lengths[-4:], (missed, each)
    reported, seen = (
        [
            (span.start, span.end, span.cause)
            for span in given.spans
            if span.start < given.lengths[-4] and span.cause != "external"
        ]
        for given in (missed, each)
    )
    assert reported == seen, (missed, each)


class Live(Machine):
    """The machine, beside a manager that remembers."""

    twin = False
    backend: Backend = "python"

    @initialize(data=DATA)
    def start(self, data: st.DataObject) -> None:
        drawn = configs(least=self.least, most=self.most)
        config = data.draw(inside_blocks(drawn) if self.inside else drawn)
        self.run = Remembering(config, self.backend)
        self.hits = []


class LiveTwin(Live):
    """The same over the twin."""

    backend = "rust"

    def __init__(self) -> None:
        need_twin()
        super().__init__()


class LiveInside(LiveTwin):
    """Hits that end inside blocks."""

    inside = True


TestLiveInside = LiveInside.TestCase
TestLiveInside.settings = settings(max_examples=examples(15), stateful_step_count=40)
TestLive = Live.TestCase
TestLive.settings = settings(max_examples=examples(15), stateful_step_count=40)
TestLiveTwin = LiveTwin.TestCase
TestLiveTwin.settings = settings(max_examples=examples(15), stateful_step_count=40)


def run(manager: KVCacheManager, name: str, tokens: list[int]) -> None:
    """Compute a request and free it."""
    manager.add_request(Request(name, tokens))
    hit = manager.get_computed_blocks(name)
    manager.allocate_slots(name, len(tokens) - hit.num_tokens, hit)
    manager.take_batch()
    manager.free(name)


def remembering(backend: Backend, num_blocks: int = 4, entries: int = 100) -> KVCacheManager:
    return KVCacheManager(Config(num_blocks, 4), backend, explain_entries=entries)


def some(value: Any) -> Any:
    """Draw a value of a wrong kind, which types would refuse."""
    return value


def causes(manager: KVCacheManager, name: str) -> list[tuple[int, int, str]]:
    missed = manager.explain_miss(name)
    assert missed is not None
    return [(span.start, span.end, span.cause) for span in missed.spans]


def test_a_waiting_request_is_explained_as_of_now_and_a_running_one_as_of_its_slots(
    backend: Backend,
) -> None:
    manager = remembering(backend)
    run(manager, "a", FIRST)
    for _ in range(4):
        manager.take_batch()
    manager.add_request(Request("b", [*FIRST, 99]))
    assert causes(manager, "b") == []
    manager.add_request(Request("taker", SECOND))
    manager.allocate_slots("taker", 8)  # its batch is still open
    assert causes(manager, "b") == [(4, 8, "evicted")]
    manager.take_batch()
    manager.free("taker")
    hit = manager.get_computed_blocks("b")
    before = manager.encode()
    missed = manager.explain_miss("b")
    assert manager.encode() == before
    assert missed is not None
    (span,) = missed.spans
    assert span.removal == Removal("taker", missed.call - 2, "prompt", 5, 4)
    assert (missed.lengths, missed.hits, missed.complete) == ((8, 4, 4, 4), 4, True)
    manager.allocate_slots("b", 5)  # the hit is not handed in
    assert causes(manager, "b") == [(0, 4, "unused"), (4, 8, "evicted")]
    assert hit.num_tokens == 4


def test_keys_that_were_taken_back_are_withdrawn(backend: Backend) -> None:
    manager = remembering(backend, 9)
    run(manager, "a", FIRST)
    assert manager.reset_prefix_cache()
    manager.add_request(Request("b", [*FIRST, 99]))
    assert causes(manager, "b") == [(0, 8, "withdrawn")]
    manager.advance_epoch()
    assert causes(manager, "b") == [(0, 8, "unknown")]


def test_what_was_dropped_is_unknown_and_said_to_be_incomplete(backend: Backend) -> None:
    manager = remembering(backend, entries=2)
    run(manager, "a", [*FIRST, *range(50, 54)])  # fills the pool
    run(manager, "taker", [*SECOND, *range(60, 64)])
    manager.add_request(Request("b", [*FIRST, *range(50, 55)]))
    missed = manager.explain_miss("b")
    assert missed is not None
    assert not missed.complete
    assert causes(manager, "b") == [(0, 8, "evicted"), (8, 12, "unknown")]
    assert causes(manager, "taker") == []


def test_a_decode_and_a_swap_in_name_who_took(backend: Backend) -> None:
    config = Config(5, 4, num_host_blocks=8)
    manager = KVCacheManager(config, backend, explain_entries=100)
    run(manager, "a", [*FIRST, *SECOND])
    manager.add_request(Request("decoder", [30, 31, 32, 33]))
    manager.allocate_slots("decoder", 4)
    manager.take_batch()
    manager.append(iter(["decoder"]), iter([34]))
    manager.take_batch()
    manager.add_request(Request("b", [*FIRST, *SECOND, 99]))
    missed = manager.explain_miss("b")
    assert missed is not None
    takers = [(span.removal.request, span.removal.kind) for span in missed.spans if span.removal]
    assert takers == [("decoder", "decode"), ("decoder", "prompt")]
    manager.swap_out(["decoder"])
    manager.take_batch()
    run(manager, "c", [*FIRST, *SECOND])
    manager.swap_in(iter(["decoder"]))
    missed = manager.explain_miss("b")
    assert missed is not None
    assert [span.removal and span.removal.kind for span in missed.spans] == ["swap_in"]
    assert missed.spans[0].removal is not None
    assert missed.spans[0].removal.request == "decoder"


def test_a_child_and_a_restored_request_have_no_admission(backend: Backend) -> None:
    manager = remembering(backend, 9)
    manager.add_request(Request("a", FIRST))
    manager.allocate_slots("a", 8)
    manager.take_batch()
    manager.fork("a", "child")
    assert manager.explain_miss("child") is None
    assert manager.explain_miss("a") is not None
    for other in (copy.deepcopy(manager), pickle.loads(pickle.dumps(manager))):
        assert other.explain_miss("a") is None
        other.add_request(Request("b", [*SECOND, 99]))
        missed = other.explain_miss("b")
        assert missed is not None
        assert (missed.complete, missed.lengths) == (False, (0, 0, 0, 0))
    with pytest.raises(UnknownRequest):
        manager.explain_miss("b")


@pytest.mark.parametrize(
    ("ask", "error", "said"),
    [
        (
            lambda backend: KVCacheManager(Config(4, 4), backend).explain_miss("a"),
            ExplainOff,
            r"request 'a' cannot be explained.*explain_entries=n",
        ),
        (lambda backend: remembering(backend).explain_miss("a"), UnknownRequest, "'a'"),
        (lambda backend: remembering(backend).explain_miss(some(7)), UnknownRequest, "7"),
        (lambda backend: remembering(backend, entries=-1), InvalidCount, "-1"),
        (lambda backend: remembering(backend, entries=some("x")), InvalidCount, "'x'"),
    ],
)
def test_misuse_is_a_typed_error(
    ask: Callable[[Backend], object], error: type[Exception], said: str, backend: Backend
) -> None:
    with pytest.raises(error, match=said):
        ask(backend)


def test_a_call_that_raises_or_is_refused_leaves_no_trace(backend: Backend) -> None:
    manager = remembering(backend)
    run(manager, "a", FIRST)
    manager.add_request(Request("b", [*FIRST, 99]))
    before = manager.explain_miss("b")
    for call in (
        lambda: manager.allocate_slots("b", 100),
        lambda: manager.allocate_slots(*some(("b", 5, None, 0))),
        lambda: manager.free("nobody"),
        lambda: manager.append(["b"], [1]),
    ):
        with pytest.raises(Exception):  # noqa: B017, PT011 - each another one
            call()
    assert manager.explain_miss("b") == before


def test_a_manager_that_remembers_nothing_has_its_own_methods(backend: Backend) -> None:
    plain, off = (KVCacheManager(Config(4, 4), backend, **k) for k in ({}, {"explain_entries": 0}))
    assert plain.__dict__.keys() == off.__dict__.keys()
    assert type(off.free) is type(plain.free)
    assert "_live" not in off.__dict__


@pytest.mark.parametrize("num_entries", [1, 2, 3, 7, 64])
def test_the_ring_is_a_dict_of_the_last_removals(num_entries: int) -> None:
    ring, reported = RemovedKeys(num_entries), list[tuple[int, Removal]]()
    for number in range(400):
        key = number * number * 2654435761 % 61 + 2**40 * (number % 3)  # chains, and repeated keys
        removal = Removal(f"r{number // 5}", number // 2, "prompt", 0, number % 2)
        ring.add(key, removal)
        reported.append((key, removal))
        last = dict(reported[-num_entries:])
        keys = sorted({key for key, _ in reported})
        marks = [ring.mark(key) for key in keys]
        found = {key: ring[mark - 2] for key, mark in zip(keys, marks, strict=True) if mark}
        assert found == last
        assert ring.has_dropped == (len(reported) > num_entries)


def test_more_entries_than_fit_in_memory_are_refused(backend: Backend) -> None:
    with pytest.raises(InvalidConfig, match=r"explain_entries=10+: they need 480+ bytes") as caught:
        KVCacheManager(Config(4, 4), backend, explain_entries=10**12)
    assert caught.value.fields["value"] == 10**12


def test_an_entry_takes_at_most_48_bytes() -> None:
    """This also holds if each was removed by another call; the names of takers are not counted."""
    for num_entries in (1_000, 4_096, 6_000):
        ring = RemovedKeys(num_entries)
        for number in range(3 * num_entries):
            ring.add(
                number * 0x9E3779B97F4A7C15 % 2**64, Removal(None, number, "prompt", number, 0)
            )
        columns = [each for each in vars(ring).values() if hasattr(each, "typecode")]
        size = sum(each.itemsize * len(each) for each in columns)
        assert 30 * num_entries < size <= 48 * (num_entries + 1)


def test_keys_that_a_cancel_withdraws_are_remembered(backend: Backend) -> None:
    config = Config(3, 1, null_block=False, max_in_flight=1)
    run = Remembering(config, backend)
    run.call("add_request", Request("a", [0, 0]))
    run.call("allocate_slots", "a", 2)
    run.call("take_batch")
    run.call("free", "a")
    hit = run.hit("a")
    assert hit.num_tokens == 1
    run.call("allocate_slots", "a", 1, hit)  # commands of an open batch that the cancel drops
    run.call("append", ["a"], [0])
    run.call("cancel", 0)
    run.call("load", "a", 1)
    missed = run.manager.explain_miss("a")
    assert missed is not None
    assert missed.lengths[0] == 1, "the manager forgot that the key was published"


def test_a_partial_block_that_is_swapped_in_takes_what_it_evicts(backend: Backend) -> None:
    run = Remembering(Config(2, 2, null_block=False, num_host_blocks=1), backend)
    for name, tokens in (("a", [0, 0]), ("b", [0, 0, 1]), ("c", [0]), ("d", [5])):
        run.call("add_request", Request(name, tokens))
    run.call("allocate_slots", "c", 1)
    run.call("take_batch")
    assert run.call("swap_out", ["c"])
    run.call("take_batch")
    run.call("allocate_slots", "a", 2)
    run.call("allocate_slots", "d", 1)
    run.call("take_batch")
    run.call("free", "a")
    assert run.call("swap_in", ["c"])  # its token is the first of the block that it takes
    run.call("take_batch")
    run.call("free", "c")
    run.call("free", "d")
    run.call("allocate_slots", "b", 3)
    (span,) = run.explained[-1].spans
    assert (span.start, span.end, span.cause) == (0, 2, "evicted")
    assert span.removal is not None
    assert (span.removal.request, span.removal.kind) == ("c", "swap_in")


@pytest.mark.parametrize("backend", ["python", "rust"])
def test_a_part_of_a_block_that_was_taken_is_named(backend: Backend) -> None:
    """Blocks of four tokens with hashes of two: FIRST is in blocks 1 and 2, the last part in 2."""
    if backend == "rust":
        need_twin()
    manager = KVCacheManager(Config(4, 4, hash_block_size=2), backend, explain_entries=9)
    run(manager, "a", FIRST[:6])
    run(manager, "taker", SECOND)
    manager.add_request(Request("b", FIRST))
    missed = manager.explain_miss("b")
    assert missed is not None
    assert missed.lengths == (6, 4, 4, 4)
    (span,) = missed.spans
    assert (span.start, span.end, span.cause) == (4, 6, "evicted")
    assert span.removal is not None
    assert (span.removal.request, span.removal.kind) == ("taker", "prompt")
    assert missed.complete


def test_a_manager_goes_on_explaining_if_hits_end_inside_blocks_of_a_restored_state() -> None:
    manager = KVCacheManager(Config(9, 4), "python", explain_entries=5)
    other = KVCacheManager(Config(4, 4, hash_block_size=2), "python")
    run(other, "a", FIRST[:6])
    manager.restore(other.encode())
    manager.add_request(Request("b", FIRST))
    run(manager, "taker", SECOND)
    missed = manager.explain_miss("b")
    assert missed is not None
    assert missed.lengths == (6, 4, 4, 4)
    assert not missed.complete
