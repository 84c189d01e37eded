# SPDX-License-Identifier: Apache-2.0
"""vLLM's scheduler does the same steps over kvcore as over its own manager.

What `make engines-vllm` runs, shorter; and what it says of steps that differ.
"""

from __future__ import annotations

import dataclasses
import os
import re
import subprocess
from types import SimpleNamespace
from typing import Any

import pytest

from benches.peers import install
from benches.vllm.__main__ import FAMILY, PATHS, ROOT
from benches.vllm.first_difference import FirstDifference
from benches.vllm.options import MODES
from benches.vllm.report import Step, statistics, summary, verdict_of
from benches.vllm.rules import Watch, explain, unexplained_keys


@pytest.mark.vllm
def test_every_step_over_kvcore_is_the_one_over_vllms_manager() -> None:
    if not install.is_installed(FAMILY):
        pytest.skip(f"vLLM 0.33.0 is not in {install.home()}: make engines-vllm installs it")
    modes = (
        "async-drafts",
        "async-windows-drafts",
        "async-loads",
        "sync-drafts-loads",
        "sync-states",
        "async-windows-resets",
        "async-drafts-watermark",
        "sync-images",
    )
    options = ["--modes", ",".join(modes), "--seeds", "4", "--steps", "60"]
    done = subprocess.run(
        [str(install.python_of(FAMILY)), "-m", "benches.vllm.compare", *options],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(map(str, PATHS))},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = {line.partition(":")[0]: line for line in done.stdout.splitlines()}
    for mode in modes:
        found = re.match(r".*: (\d+) of 4 runs of 60 steps are the same(.*?): ", lines[mode])
        assert found is not None, done.stdout
        rules = {name: int(count) for count, name in re.findall(r"(\d+) by rule '(\w+)'", found[2])}
        assert int(found[1]) + sum(rules.values()) == 4, done.stdout  # each that parts has a rule
        allowed = {"unsure", "failed"} if MODES[mode].has_loads else set()
        assert rules.keys() <= allowed, done.stdout
        assert int(found[1]) > 0, done.stdout


def decided(**changed: Any) -> dict[str, Any]:
    """Return a side's decisions, with these changes."""
    return {
        "tokens": {"r": 5, "s": 1},
        "drafts": {},
        "starts": {"r": 8, "s": 20},
        "begun": ["r"],
        "preempted": ["q"],
        "blocks": {"r": [[1, 2, 3]], "s": None},
    } | changed


@pytest.mark.parametrize("rule", ["", "unwritten"])
def test_the_first_step_that_differs_is_shown_and_ends_the_run(rule: str) -> None:
    other = decided(blocks={"r": [[1, 2, 4]], "s": None})
    verdict = verdict_of(
        [
            Step(1, decided(), decided()),
            Step(2, decided(), other, rule),
            Step(3, decided(), decided()),
        ]
    )
    assert verdict.differs.splitlines() == [
        "step 2 differs",
        "  blocks",
        "    vLLM:   {'r': [[1, 2, 3]], 's': None}",
        "    kvcore: {'r': [[1, 2, 4]], 's': None}",
    ]
    assert verdict.rule == rule
    line = summary("async", [verdict, verdict_of([])], 3)
    by_rule = f", 1 by rule {rule!r}" if rule else ""
    assert line.startswith(f"async: 1 of 2 runs of 3 steps are the same{by_rule}: 6 tokens")
    assert line.endswith("8 tokens hit, 1 preemptions")


def test_what_schedulers_report_is_compared_but_for_the_last_digits_of_floats() -> None:
    def outputs(usage: float, hits: int) -> list[Any]:
        stats = dataclasses.make_dataclass("Stats", ["kv_cache_usage", "hits"])(usage, hits)
        return [SimpleNamespace(scheduler_stats=each) for each in (None, stats)]

    assert statistics(outputs(0.1 + 0.2, 4)) == {"kv_cache_usage": 0.3, "hits": 4}
    assert statistics(outputs(0.3, 4)) != statistics(outputs(0.3, 5))
    assert statistics(outputs(0.3, 4)) != statistics(outputs(0.30001, 4))
    assert statistics([]) == {}


def test_resets_that_were_done_and_images_are_counted() -> None:
    happened = {
        "interrupted": [("reset", False), ("reset running", True), ("PAUSED_NEW", None)],
        "images": {"r": [0, 1], "s": [2]},
    }
    verdict = verdict_of([Step(1, decided(**happened), decided(**happened))])
    assert summary("sync", [verdict], 1).endswith(", 1 resets of the cache, 3 images computed")


class Table:
    """A manager of requests that hold what they are given, and lose all by `free`."""

    def __init__(self, *found: list[int]) -> None:
        self.keys = {1, 2, 3, 4}
        self.found = iter(found)
        self.tables: dict[str, list[int]] = {}
        self.withdraws: set[int] = set()

    def get_block_ids(self, who: str) -> tuple[list[int]]:
        return (self.tables.get(who, []),)

    def get_blocks(self, who: str) -> Any:
        return SimpleNamespace(get_block_ids=lambda: self.get_block_ids(who))

    def get_computed_blocks(self, _: Any) -> tuple[Any, int]:
        found = next(self.found)
        return SimpleNamespace(get_block_ids=lambda: (found,)), 4 * len(found)

    get_computed_blocks_for_connector = get_computed_blocks

    def allocate_slots(self, request: Any, _: int) -> Any:
        self.tables.setdefault(request.request_id, []).extend(next(self.found))
        return self.get_blocks(request.request_id)

    def free(self, request: Any) -> None:
        self.keys -= self.withdraws & {*self.tables.pop(request.request_id)}

    pop_blocks_for_free = free

    def take_new_block_ids(self) -> list[int]:
        return []


def watched(*found: list[int], withdraws: tuple[int, ...] = ()) -> tuple[Any, Watch]:
    """Return a manager that gives or finds these blocks in turn, and the log of its calls."""
    manager = Table(*found)
    manager.withdraws = {*withdraws}
    return manager, Watch(manager, 4, lambda block: block in manager.keys)


def requested(manager: Any, *, over: bool, lowered: int = 0, hit: bool) -> None:
    """Schedule a request, and abort it before or after it has finished; then add another."""
    request = SimpleNamespace(request_id="r", num_computed_tokens=lowered)
    manager.allocate_slots(request, 8)
    if over:
        manager.take_new_block_ids()
    request.num_computed_tokens = 0
    manager.free(request)
    other = SimpleNamespace(request_id="s", num_computed_tokens=0)
    manager.get_computed_blocks(other) if hit else manager.allocate_slots(other, 8)


@pytest.mark.parametrize(
    ("over", "count", "rule"), [(False, 0, "unwritten"), (True, 0, "unsure"), (True, 4, "failed")]
)
@pytest.mark.parametrize("hit", [False, True])
def test_a_key_that_went_by_a_rule_explains_what_is_found_or_used_again(
    over: bool, count: int, rule: str, hit: bool
) -> None:
    vllm, own = watched([1, 2], [1, 2] if hit else [3, 2])
    kvcore, ours = watched([1, 2], [1] if hit else [2, 3], withdraws=(2,))
    for manager in (vllm, kvcore):
        requested(manager, over=over, lowered=count, hit=hit)
    assert explain(own, ours) == rule
    assert unexplained_keys(own, ours, 5) == set()
    own.begin()
    ours.begin()
    assert explain(own, ours) == ""
    # A block that was used again has other content, whose key no rule withdrew.
    assert unexplained_keys(own, ours, 5) == (set() if hit else {2})


def test_what_no_rule_explains_has_none() -> None:
    for theirs, mine in (([1, 2], [1, 3]), ([1], [1, 2])):
        (vllm, own), (kvcore, ours) = watched(theirs), watched(mine)
        for manager in (vllm, kvcore):
            manager.get_computed_blocks(SimpleNamespace(request_id="s"))
        kvcore.keys.discard(4)
        assert explain(own, ours) == ""
        assert unexplained_keys(own, ours, 5) == {4}


def test_tokens_that_a_shadow_schedules_in_runs_are_recorded() -> None:
    manager, watch = watched([1], [2])
    requests = [SimpleNamespace(request_id=name, num_computed_tokens=3) for name in ("r", "s")]
    for request in requests:
        manager.allocate_slots(request, 3)
    watch.begin()
    empty = SimpleNamespace(get_block_ids=lambda: ([],))

    def stops_at_the_second(given: Any) -> Any:
        return next(each for each in given if each is requests[1])

    compat = SimpleNamespace(
        append=lambda _: empty,
        append_within_blocks=stops_at_the_second,
        empty_kv_cache_blocks=empty,
    )
    watch.watch_tokens(compat)
    assert compat.append_within_blocks(iter(requests)) is requests[1]
    assert watch.calls == [("allocate_slots", "r", [1])], "the second is left to `append`"
    compat.append(requests[1])
    assert watch.calls[1:] == [("allocate_slots", "s", [2])]
    assert watch.scheduled == watch.ends == {"r", "s"}


class Shadowed:
    """Both managers of a shadow, as far as `FirstDifference` reads them; no answer is compared.

    kvcore gives blocks 1 and 2 to a request, and 2 loses its key when that is freed.
    """

    def __init__(self, theirs: list[int], mine: list[int]) -> None:
        self.own, (self.kvcore, watch) = Table(theirs), watched([1, 2], mine, withdraws=(2,))
        self.kvcore.compat = SimpleNamespace(append=None, append_within_blocks=None)
        self.reported: list[str] = []
        self.first_difference = FirstDifference(self, watch)
        first = SimpleNamespace(request_id="r", num_computed_tokens=0)
        self.kvcore.allocate_slots(first, 8)
        self.kvcore.free(first)
        assert watch.lost == {2: "unwritten"}

    def answer(self, *, is_look_up: bool) -> tuple[Any, Any]:
        """The answers of vLLM's manager and of kvcore about a second request."""
        request = SimpleNamespace(request_id="s", num_computed_tokens=0)
        if is_look_up:
            return self.own.get_computed_blocks(request), self.kvcore.get_computed_blocks(request)
        return self.own.allocate_slots(request, 8), self.kvcore.allocate_slots(request, 8)

    def part(self, name: str, *_: Any) -> None:
        self.reported.append(name)

    def _same_blocks(self, *_: Any) -> bool:
        return True


@pytest.mark.parametrize(
    ("theirs", "mine", "is_look_up", "rule"),
    [
        ([1, 3], [1, 3], True, None),
        ([1, 2], [1], True, "unwritten"),  # kvcore cannot find the block without a key
        ([1, 3], [1], True, ""),  # the block still has its key
        ([1, 3, 2], [1], True, ""),  # only the first block that differs counts
        ([3], [3, 2], True, ""),  # kvcore finds a block that has no key
        ([3, 4], [2, 3], False, "unwritten"),  # kvcore uses the block again since it has no key
        ([3, 4], [4, 2], False, ""),
        ([2, 3], [3, 4], False, ""),  # vLLM uses it again: no key is missing there
    ],
)
def test_the_shadow_excuses_only_a_block_whose_key_went_by_a_rule(
    theirs: list[int], mine: list[int], is_look_up: bool, rule: str | None
) -> None:
    shadowed = Shadowed(theirs, mine)
    own, ours = shadowed.answer(is_look_up=is_look_up)
    if is_look_up and theirs != mine:
        shadowed.part("get_computed_blocks", "s", own, ours)
        assert shadowed.reported == ["get_computed_blocks"]
    else:
        shadowed._same_blocks(*(answer[0] if is_look_up else answer for answer in (own, ours)))
    assert shadowed.first_difference.rule == rule
    assert shadowed.first_difference.is_unexplained == (rule == "")


def test_the_shadow_excuses_no_other_difference_and_judges_the_first() -> None:
    refused = Shadowed([3, 4], [2, 3])
    own, _ = refused.answer(is_look_up=False)
    refused.part("allocate_slots", "s", own, None)
    assert refused.first_difference.is_unexplained
    moved = Shadowed([3, 4], [2, 3])
    moved._same_blocks(*moved.answer(is_look_up=False))
    # What follows comes from where the blocks lie now.
    moved.first_difference.watch.calls.append(("get_computed_blocks", "t", [9]))
    moved._same_blocks(None, None)
    moved.part("allocate_slots", "t", None, None)
    assert moved.first_difference.rule == "unwritten"
    assert not moved.first_difference.is_unexplained
