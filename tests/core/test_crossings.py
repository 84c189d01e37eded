# SPDX-License-Identifier: Apache-2.0
"""The number of crossings into the twin per step, and of hashes per token: counted, never timed.

One fixed list of an engine's operations (admission, chunked prompts, decoding, preemption, the end)
is played by one call per request and by one call per step. A crossing is a call of a method of the
twin; a frame is a call of a Python function of kvcore on the way there.
"""

from __future__ import annotations

import array
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from types import FrameType
from typing import Any

import pytest

from kvcore import Config, KVCacheManager, Request
from kvcore.hashing.block_hash import hash_blocks
from tests.conftest import need_twin

TWIN = "kvcore._rust"
BLOCK_SIZE = 4
NAMES = ("a", "b", "c")
PROMPT_LEN = 10
DECODE_STEPS = 9
PREFILL_CALLS = ("add_request", "get_computed_blocks", "allocate_slots", "take_batch")


class Player:
    """Plays the list; batched: a step's appends are one call, by rows."""

    def __init__(self, backend: Any, *, batched: bool) -> None:
        self.manager = KVCacheManager(Config(64, BLOCK_SIZE, hash_seed=b"seed"), backend)
        self.batched = batched
        self.rows = array.array("i")

    def prompt(self, number: int) -> Any:
        """Return a prompt that begins like all others."""
        tokens = [*range(2 * BLOCK_SIZE), 100 + number, 200 + number]
        return array.array("I", tokens) if self.batched else tokens

    def prefill(self) -> None:
        """Add each request and compute it in one step; the next one hits what it computed."""
        for number, name in enumerate(NAMES):
            self.rows.append(self.manager.add_request(Request(name, self.prompt(number))))
            self.schedule(name)

    def schedule(self, name: str) -> None:
        """Look up and allocate the whole of a request, as one step."""
        hit = self.manager.get_computed_blocks(name)
        count = self.manager.num_tokens(name) - hit.num_tokens
        assert self.manager.allocate_slots(name, count, hit)
        self.manager.take_batch()

    def decode(self) -> None:
        """Make one step of a token each."""
        if self.batched:
            self.manager.append(self.rows, array.array("I", [7] * len(NAMES)))
        else:
            for name in NAMES:
                self.manager.append([name], [7])
        self.manager.take_batch()

    def preempt(self) -> None:
        """Preempt the last request and compute it again."""
        self.manager.free(NAMES[-1])
        self.schedule(NAMES[-1])

    def finish(self) -> None:
        """Remove all requests."""
        for name in NAMES:
            self.manager.free(name)
            self.manager.remove_request(name)


def count(work: Callable[[], None]) -> tuple[Counter[str], Counter[str]]:
    """Count the calls of the twin's methods by name, and of kvcore's Python functions."""
    crossings: Counter[str] = Counter()
    frames: Counter[str] = Counter()

    def note(frame: FrameType, event: str, called: Any) -> None:
        if event == "c_call" and type(getattr(called, "__self__", None)).__module__ == TWIN:
            crossings[called.__name__] += 1
        elif event == "call" and frame.f_globals.get("__name__", "").startswith("kvcore"):
            frames[frame.f_code.co_qualname] += 1

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(before)
    return crossings, frames


@pytest.mark.parametrize("batched", [True, False])
def test_a_step_of_decoding_crosses_as_often_as_it_must_and_runs_no_python(batched: bool) -> None:
    need_twin()
    player = Player("rust", batched=batched)
    player.prefill()
    for _ in range(DECODE_STEPS):
        crossings, frames = count(player.decode)
        assert crossings == {"append": 1 if batched else len(NAMES), "take_batch": 1}
        assert not frames


@pytest.mark.parametrize("num_requests", [256, 1024])
def test_a_step_ahead_is_one_crossing(num_requests: int) -> None:
    need_twin()
    manager = KVCacheManager(Config(4 * num_requests, BLOCK_SIZE, max_in_flight=1), "rust")
    rows = array.array("i")
    for number in range(num_requests):
        rows.append(manager.add_request(Request(str(number), [1, 2, 3])))
        manager.allocate_slots(str(number), 3)
    last = manager.take_batch().number
    tokens = array.array("I", [7] * num_requests)

    def step(sampled: Any) -> None:
        batch = None if sampled is None else last - 1
        num_grown.append(len(manager.append(rows, sampled, batch=batch).grown[0]))
        manager.complete(last)

    num_grown: list[int] = []
    for sampled in (None, tokens, tokens):
        crossings, _ = count(partial(step, sampled))
        assert crossings == {"append": 1, "complete": 1}  # `grown` is read from the value
        last = manager.take_batch().number
    assert num_grown == [0, num_requests, 0]
    assert manager.num_output_placeholders("0") == 1


@pytest.mark.parametrize("batched", [True, False])
def test_a_request_crosses_once_a_call(batched: bool) -> None:
    need_twin()
    player = Player("rust", batched=batched)
    crossings, _ = count(player.prefill)
    assert crossings == dict.fromkeys([*PREFILL_CALLS, "num_tokens"], len(NAMES))
    crossings, frames = count(player.finish)
    assert crossings == {"free": len(NAMES), "remove_request": len(NAMES)}
    assert not frames


def test_each_full_block_is_hashed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    hashed = Counter[str]()

    def note(*args: Any, **options: Any) -> Iterator[bytes]:
        made = list(hash_blocks(*args, **options))
        hashed["blocks"] += len(made)
        return iter(made)

    monkeypatch.setattr("kvcore.transitions.requests.hash_blocks", note)
    player = Player("python", batched=True)
    player.prefill()
    for _ in range(DECODE_STEPS):
        player.decode()
    player.preempt()
    player.finish()
    assert hashed["blocks"] == len(NAMES) * ((PROMPT_LEN + DECODE_STEPS) // BLOCK_SIZE)
