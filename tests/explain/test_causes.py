# SPDX-License-Identifier: Apache-2.0
"""The cause of each missed token, against a naive history of the same random calls."""

from __future__ import annotations

from random import Random
from typing import Any

import attrs
import pytest

from kvcore import Config, Group, KVCacheManager, KvcoreError, Request
from kvcore.explain.explanation import Explanation
from kvcore.explain.observer import AdmissionObserver
from kvcore.types.values import Refused
from tests.explain.naive import Lost, Naive, used_tokens

GROUPS = {
    "ones": (Group(1),),
    "twos": (Group(2),),
    "sizes": (Group(1), Group(2)),
    "window": (Group(2), Group(2, kind="sliding_window", window=3)),
    "sliding": (Group(1, kind="sliding_window", window=2),),
}
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
        try:
            outcome = getattr(self.manager, name)(*args, **options)
        except KvcoreError:
            return
        self.calls.append((name, *args, options))
        self.observer.note(name, outcome, *args, **options)
        request_id = args[0] if name == "allocate_slots" else None
        if request_id and not isinstance(outcome, Refused):
            hit = options.get("hit")
            if not any(map(any, self.naive.state.requests[request_id].tables)):
                self._compare(request_id, used_tokens(hit))
        assert not self.explained
        self.naive.note(name, self.manager.state(), *args)

    def _compare(self, request_id: str, used: int) -> None:
        said = self.explained.pop()
        expected = self.naive.explain(request_id, used, 0)
        causes: list[tuple[str, Lost | None]] = []
        for span in said.spans:
            lost = span.removal
            its = None if lost is None else attrs.astuple(lost)
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
        waits = [n for n, r in requests.items() if not any(r.tables)]
        runs = [n for n, r in requests.items() if any(r.tables)]
        if way == "add" and name not in requests:
            salt = random.choice([None, None, None, "salt"])
            prompt = random.choices([1, 2], [3, 1], k=random.randint(1, 8))
            run.call("add_request", Request(name, prompt, cache_salt=salt))
        elif way == "admit" and waits:
            name = random.choice(waits)
            hit = random.choice([manager.get_computed_blocks(name)] * 3 + [None])
            num_new = len(requests[name].tokens) - used_tokens(hit)
            num_new = random.choice([num_new, num_new, random.randint(1, num_new)])
            run.call(
                "allocate_slots", name, num_new, hit=hit, delay_cache_blocks=random.random() < 0.1
            )
        elif way == "go_on" and runs:
            name = random.choice(runs)
            left = len(requests[name].tokens) - requests[name].num_computed
            if left > 0:
                run.call("allocate_slots", name, random.randint(1, left))
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
            run.call("truncate", name, random.randint(1, len(requests[name].tokens)))
        elif way == "evict":
            run.call("evict_blocks", random.sample(range(1, manager.config.num_blocks), 2))
        elif way == "reset":
            run.call("reset_prefix_cache")
        elif way == "epoch":
            run.call("advance_epoch")
        elif way == "swap" and requests:
            name = random.choice(list(requests))
            run.call(random.choice(["swap_out", "swap_in"]), [name])


@pytest.mark.parametrize("groups", GROUPS.values(), ids=GROUPS)
def test_each_token_has_the_cause_of_its_history(groups: tuple[Group, ...]) -> None:
    for seed in range(NUM_RUNS):
        check_run(seed, groups)


def check_run(seed: int, groups: tuple[Group, ...]) -> None:
    random = Random(seed)
    config = Config(
        random.randint(6, 16),
        groups=groups,
        num_host_blocks=random.choice([0, 8]),
        eviction=random.choice(["lru", "uncached_first"]),
        duplicates=random.choice(["keep", "keep", "merge"]),
        use_eagle=random.random() < 0.2,
    )
    play(Run(config), random, 60)
