# SPDX-License-Identifier: Apache-2.0
"""Runs whose calls an observer follows, and the laws of each explanation."""

from __future__ import annotations

from typing import Any

from kvcore.backend import PythonBackend
from kvcore.explain.explanation import CAUSES, LENGTHS, Explanation
from kvcore.explain.observer import AdmissionObserver
from kvcore.state.state import State
from kvcore.trace.calls import Misuse
from kvcore.transitions import QUERIES, TRANSITIONS
from kvcore.types.config import Config
from tests.helpers.lockstep import Lockstep


def check(each: Explanation) -> None:
    """Check EXPLAIN-SUM: lengths fall, and the spans tile the tokens from the hits to the ideal."""
    lengths = list(each.lengths)
    assert lengths == sorted(lengths, reverse=True), each
    place = each.hits
    for span in each.spans:
        assert span.start == place, f"a gap or two causes at token {place}: {each}"
        assert span.end > span.start, each
        assert span.cause in CAUSES, each
        assert (span.removal is not None) == (span.cause in ("evicted", "withdrawn")), each
        place = span.end
    assert place == each.ideal, f"{place} tokens have a cause, {each.ideal} are known: {each}"


class NewestState:
    """The queries that an observer makes, answered by the newest state of a run."""

    def __init__(self, run: Lockstep) -> None:
        self.config = run.state.config
        self._run, self._core = run, self
        self._backend = PythonBackend(self.config)

    def __getattr__(self, name: str) -> Any:
        return lambda *args: self._ask(name, *args)

    def _ask(self, name: str, *args: Any) -> Any:
        self._backend._state = self._run.state
        return getattr(self._backend, name)(*args)


class WatchedLockstep(Lockstep):
    """A run that explains its admissions."""

    def __init__(self, config: Config, *, twin: bool = True) -> None:
        super().__init__(config, twin=twin)
        self.explained: list[Explanation] = []
        self.observer = AdmissionObserver(NewestState(self), self.explained.append)

    def call(self, name: str, *args: Any, **options: Any) -> Any:
        """Make a call, tell the observer, and judge what it says."""
        before = self.state
        if (look := self.observer.before(name)) is not None:
            look(*args, **options)
        value = super().call(name, *args, **options)
        if not isinstance(value, Misuse):
            num_before = len(self.explained)
            self.observer.note(name, value, *args, **options)
            for each in self.explained[num_before:]:
                check(each)
                self._check_found(before, each)
        return value

    def _check_found(self, before: State, each: Explanation) -> None:
        request = before.requests[each.request]
        if not request.skip_reading and before.config.enable_caching:
            hit = QUERIES["get_computed_blocks"](before, each.request)
            computed = each.lengths[LENGTHS.index("this_epoch")]
            if hit.num_tokens > computed:  # where a chunk begins, computed or not
                assert not any(map(any, hit.blocks.blocks)), (hit, each)
                before = TRANSITIONS["truncate"](before, each.request, computed + 1).state
                hit = QUERIES["get_computed_blocks"](before, each.request)
            assert each.lengths[-2] == max(hit.num_tokens, each.hits), (hit, each)
