# SPDX-License-Identifier: Apache-2.0
"""The cause of each missed token, against a naive history of the same random calls."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
from msgspec.structs import astuple

from kvcore import Config, Group, KVCacheManager, KvcoreError, MediaItem, Request
from kvcore.explain.explanation import Explanation
from kvcore.explain.lost_keys import NEVER, LostKeys, make_lost_keys
from kvcore.explain.observed import observed
from kvcore.explain.observer import AdmissionObserver
from kvcore.types.values import Refused
from tests.conftest import Backend, need_twin
from tests.explain.naive import Lost, Naive, used_tokens

GROUPS = {
    "ones": (Group(1),),
    "twos": (Group(2),),
    "sizes": (Group(1), Group(2)),
    "window": (Group(2), Group(2, kind="sliding_window", window=3)),
    "sliding": (Group(1, kind="sliding_window", window=2),),
    "chunks": (Group(1), Group(2, kind="chunked_local", window=4)),
    "chunk": (Group(1, kind="chunked_local", window=3),),
    "parts": (Group(4),),
    "parts-sizes": (Group(2), Group(4)),
    "parts-window": (Group(2), Group(4, kind="sliding_window", window=3)),
    "parts-chunks": (Group(4), Group(2, kind="chunked_local", window=4)),
    "states": (Group(1), Group(2, kind="state")),
    "parts-states": (Group(2), Group(4, kind="state")),
}
UNITS = {"parts": 2, "parts-sizes": 1, "parts-window": 1, "parts-chunks": 1, "parts-states": 1}
"""Tokens per hash where hits may end inside blocks."""
WAYS = {
    "add": 6,
    "admit": 12,
    "go_on": 5,
    "append": 8,
    "take": 10,
    "free": 5,
    "remove": 1,
    "fork": 1,
    "truncate": 1,
    "evict": 1,
    "reset": 0.5,
    "epoch": 0.3,
    "swap": 2,
    "load": 3,
    "end": 3,
    "fail": 1,
    "complete": 8,
    "cancel": 1,
}
"""How often each kind of call is drawn."""
NUM_RUNS = 70
"""Runs per kind of groups."""


class Run:
    """A manager whose admissions are explained twice."""

    def __init__(self, config: Config) -> None:
        self.manager = KVCacheManager(config, "python")
        self.explained: list[Explanation] = []
        self.observer = AdmissionObserver(self.manager, self.explained.append)
        self.naive = Naive(self.manager.state())
        self.calls: list[Any] = []
        self.seen: set[str] = set()

    def call(self, name: str, *args: Any, **options: Any) -> None:
        """Make a call, unless it is misuse; compare the explanation of each admission."""
        if (look := self.observer.before(name)) is not None:
            look(*args, **options)
        try:
            outcome = getattr(self.manager, name)(*args, **options)
        except KvcoreError:
            return
        self.calls.append((name, *args, options))
        self.observer.note(name, outcome, *args, **options)
        refused = isinstance(outcome, Refused)
        hit = None if refused else options.get("hit")
        if name in ("allocate_slots", "load") and not refused:
            external = options.get("num_external_computed_tokens", 0)
            external = args[1] if name == "load" else external
            if not any(map(len, self.naive.state.requests[args[0]].tables)):
                self._compare(args[0], used_tokens(hit), external)
        assert not self.explained
        self.naive.note(name, self.manager.state(), *args, hit=hit, refused=refused)

    def _compare(self, request_id: str, used: int, external: int) -> None:
        said = self.explained.pop()
        expected = self.naive.explain(request_id, used, external)
        causes: list[tuple[str, Lost | None]] = []
        for span in said.spans:
            lost = span.removal
            its = None if lost is None else astuple(lost)
            causes += [(span.cause, its)] * (span.end - span.start)
        assert causes == expected, (said, self.calls)
        assert said.again == (request_id in self.naive.admitted), self.calls
        self.seen |= {cause for cause, _ in causes}


def play(run: Run, random: Random, num_calls: int) -> None:
    """Make random calls."""
    manager, names = run.manager, "abcdefgh"
    for _ in range(num_calls):
        way = random.choices(list(WAYS), list(WAYS.values()))[0]
        requests = dict(sorted(manager.state().requests.items()))
        name = random.choice(names)
        waits = [n for n, r in requests.items() if not any(map(len, r.tables))]
        runs = [n for n, r in requests.items() if any(map(len, r.tables))]
        if way == "add" and name not in requests:
            salt = random.choice([None, None, None, "salt"])
            prompt = random.choices([1, 2], [3, 1], k=random.randint(1, 8))
            media: tuple[MediaItem, ...] = ()
            if len(prompt) > 2 and random.random() < 0.3:
                media = (MediaItem(random.choice("ab"), 1, 1),)
            run.call("add_request", Request(name, prompt, cache_salt=salt, media=media))
        elif way == "admit" and waits:
            name = random.choice(waits)
            hit = random.choice([manager.get_computed_blocks(name)] * 3 + [None])
            num_new = len(requests[name].tokens) - used_tokens(hit)
            num_new = random.choice([num_new, num_new, random.randint(1, num_new)])
            options: dict[str, Any] = {"delay_cache_blocks": random.random() < 0.1}
            options |= marks(run, random)
            if random.random() < 0.2:
                external = random.randint(1, num_new)
                options["num_external_computed_tokens"] = external
                num_new = random.randint(0, num_new - external)
            run.call("allocate_slots", name, num_new, hit=hit, **options)
        elif way == "go_on" and runs:
            name = random.choice(runs)
            left = len(requests[name].tokens) - requests[name].num_computed
            if left > 0:
                run.call("allocate_slots", name, random.randint(1, left), **marks(run, random))
        elif way == "append" and runs:
            some = random.sample(runs, random.randint(1, len(runs)))
            some = [n for n in some if requests[n].num_computed == len(requests[n].tokens)]
            run.call("append", some, [random.choice([1, 1, 2]) for _ in some])
        elif way == "take":
            run.call("take_batch")
        elif way == "free" and runs:
            run.call("free", random.choice(runs))
        elif way == "remove" and waits:
            run.call("remove_request", random.choice(waits))
        elif way == "fork" and name not in requests and runs:
            run.call("fork", random.choice(list(requests)), name)
        elif way == "truncate" and requests:
            name = random.choice(list(requests))
            least = 2 if run.naive.media[name] else 1
            run.call("truncate", name, random.randint(least, len(requests[name].tokens)))
        elif way == "evict":
            run.call("evict_blocks", random.sample(range(1, manager.config.num_blocks), 2))
        elif way == "reset":
            run.call("reset_prefix_cache")
        elif way == "epoch":
            run.call("advance_epoch")
        elif way == "swap" and requests:
            name = random.choice(list(requests))
            run.call(random.choice(["swap_out", "swap_in"]), [name])
        else:
            play_transfers(run, random, way)


def marks(run: Run, random: Random) -> dict[str, bool]:
    """Draw whether a call keeps the state after it."""
    return {"checkpoint": random.random() < 0.5} if run.manager.config.has_states else {}


def play_transfers(run: Run, random: Random, way: str) -> None:
    """Make a random call of a way that begins or ends a load or a batch in flight."""
    manager = run.manager
    requests = dict(sorted(manager.state().requests.items()))
    waits = [n for n, r in requests.items() if not any(map(len, r.tables))]
    runs = [n for n in requests if n not in waits]
    if way == "load" and waits:
        name, hit = random.choice(waits), None
        if random.random() < 0.5:
            hit = manager.get_computed_blocks(name)
        run.call("load", name, random.randint(1, 8), hit=hit)
    elif way == "end" and manager.state().operations:
        number = random.choice(sorted(manager.state().operations))
        run.call("complete_operation", number, random.random() < 0.7)
    elif way == "fail" and runs:
        name = random.choice(runs)
        run.call("rewind", [name], random.randint(0, requests[name].num_computed))
    elif way == "complete" and manager.in_flight:
        run.call("complete", manager.in_flight[0])
    elif way == "cancel" and manager.in_flight:
        run.call("cancel", random.choice(manager.in_flight))


@pytest.mark.parametrize("kind", GROUPS)
def test_each_token_has_the_cause_of_its_history(kind: str) -> None:
    for seed in range(NUM_RUNS):
        check_run(seed, kind)


@pytest.mark.parametrize("kind", GROUPS)
def test_the_twin_explains_the_same_calls_alike(kind: str) -> None:
    need_twin()
    for seed in range(10):
        random = Random(seed)
        run = Run(draw_config(random, kind))
        play(run, random, 60)
        explained: list[list[Explanation]] = []
        backends: tuple[Backend, ...] = ("python", "rust")
        for backend in backends:
            real, heard = KVCacheManager(run.manager.config, backend), list[Explanation]()
            manager = observed(real, AdmissionObserver(real, heard.append))
            for name, *args, options in run.calls:
                getattr(manager, name)(*args, **options)
            explained.append(heard)
        assert explained[0] == explained[1]


def test_the_twin_knows_the_same_losses() -> None:
    need_twin()
    random, here, there = Random(7), LostKeys(4), make_lost_keys(None, 4)
    known = [0, *(random.getrandbits(64) for _ in range(5_000))]
    known += [each ^ 1 << 63 for each in known]  # the same slots
    for number in range(300):
        keys = random.sample(known, random.choice([0, 1, 7, 200]))
        here.lose(keys, number)
        there.lose(keys, number)
    assert [here.mark(key) for key in known] == [there.mark(key) for key in known]
    there.clear()
    assert there.mark(known[1]) == NEVER


def check_run(seed: int, kind: str) -> None:
    random = Random(seed)
    play(Run(draw_config(random, kind)), random, 60)


def draw_config(random: Random, kind: str) -> Config:
    """Draw a configuration of a kind. Blocks of several hashes are larger, so fewer."""
    num_blocks = random.randint(6, 16)
    return Config(
        num_blocks // 2 + 1 if kind in UNITS else num_blocks,
        groups=GROUPS[kind],
        num_host_blocks=random.choice([0, 8]),
        eviction=random.choice(["lru", "uncached_first"]),
        duplicates=random.choice(["keep", "keep", "merge"]),
        use_eagle=random.random() < 0.2,
        max_in_flight=random.choice([0, 0, 1, 2]),
        publish=random.choice(["scheduled", "scheduled", "completed"]),
        hash_block_size=UNITS.get(kind),
    )


def test_late_output_of_an_earlier_request_is_known() -> None:
    run = Run(Config(9, 2))
    run.call("add_request", Request("early", [1, 1, 2, 1], cache_salt="salt"))
    run.call("truncate", "early", 2)
    run.call("allocate_slots", "early", 2)
    run.call("add_request", Request("later", [1, 1, 1, 2], cache_salt="other"))
    run.call("take_batch")
    run.call("append", ["early"], [1])
    run.call("take_batch")
    run.call("free", "early")
    run.call("allocate_slots", "later", 4)
    assert run.seen == {"namespace"}


def test_what_a_load_has_not_brought_yet_is_computed_by_nobody() -> None:
    run = Run(Config(9, 1))
    for name in "rst":
        run.call("add_request", Request(name, [1, 2, 3, 4]))
    run.call("load", "r", 3)
    run.call("take_batch")
    run.call("allocate_slots", "s", 4)
    assert run.seen == {"not_computed"}
    run.call("free", "s")  # its batch was not taken
    for operation in range(3):
        run.call("complete_operation", operation, True)
    run.call("allocate_slots", "t", 4)
    assert run.seen == {"not_computed", "unused"}


def test_what_failed_after_a_swap_that_was_refused_was_not_computed() -> None:
    run = Run(Config(9, 1, num_host_blocks=2))
    for name in "rs":
        run.call("add_request", Request(name, [1, 2, 3, 4]))
    run.call("allocate_slots", "r", 4)
    run.call("take_batch")
    run.call("swap_out", ["r"])
    run.call("rewind", ["r"], 2)
    run.call("free", "r")
    run.call("allocate_slots", "s", 4)
    assert run.seen == {"unused", "not_computed"}


def test_a_load_that_was_given_up_in_its_batch_computed_nothing() -> None:
    run = Run(Config(9, 1))
    run.call("add_request", Request("r", [1, 2, 3]))
    run.call("load", "r", 2)
    run.call("free", "r")
    run.call("allocate_slots", "r", 3)
    assert run.seen == set()


def test_what_failed_in_its_batch_and_was_given_up_again_was_not_computed() -> None:
    run = Run(Config(7, 2))
    run.call("add_request", Request("r", [2, 1, 1]))
    run.call("allocate_slots", "r", 3)
    run.call("take_batch")
    run.call("append", ["r"], [1])
    run.call("rewind", ["r"], 0)
    run.call("allocate_slots", "r", 4)
    run.call("free", "r")
    run.call("allocate_slots", "r", 0, num_external_computed_tokens=3)
    assert run.seen == set()


def test_a_block_that_leaves_a_window_and_is_taken_by_the_same_call_names_its_taker() -> None:
    run = Run(Config(11, groups=GROUPS["sliding"]))
    prompt = [1, 1, 1, 1, 2]
    for name, media in (("f", ()), ("c", (MediaItem("a", 1, 1),))):
        run.call("add_request", Request(name, prompt, media=media))
    run.call("allocate_slots", "f", 5)
    run.call("load", "c", 2)
    run.call("take_batch")
    run.call("free", "f")
    run.call("allocate_slots", "f", 1)
    run.call("free", "f")
    run.call("allocate_slots", "f", 5)
    run.call("rewind", ["f"], 4)
    hit = run.manager.get_computed_blocks("f")
    run.call("allocate_slots", "f", 0, hit=hit, num_external_computed_tokens=2)
    run.call("add_request", Request("d", [1] * 7))
    run.call("allocate_slots", "d", 5, hit=run.manager.get_computed_blocks("d"))
    assert "evicted" in run.seen


def test_a_swapped_request_that_waits_again_begins_in_the_new_epoch() -> None:
    run = Run(Config(9, 1, num_host_blocks=8, max_in_flight=1, publish="completed"))
    run.call("add_request", Request("b", [1] * 8))
    run.call("allocate_slots", "b", 7)
    run.call("take_batch")
    run.call("swap_out", ["b"])
    run.call("complete", 0)
    run.call("add_request", Request("e", [1] * 6 + [2]))
    run.call("take_batch")
    run.call("cancel", 1)
    run.call("advance_epoch")
    run.call("load", "b", 3)
    run.call("allocate_slots", "e", 4)
    assert "old_epoch" in run.seen


def test_other_media_over_other_tokens_is_another_prefix() -> None:
    run = Run(Config(9, 1))
    for name, item, token in (("r", "a", 1), ("s", "b", 2)):
        media = (MediaItem(item, 1, 1),)
        run.call("add_request", Request(name, [7, token, 8], media=media))
        run.call("allocate_slots", name, 3)
        run.call("take_batch")
    assert run.explained == []
    assert run.seen == {"unused"}
