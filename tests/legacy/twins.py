# SPDX-License-Identifier: Apache-2.0
"""Two facades, one per backend, that get the same calls and must give the same answers.

After each call the blocks behind them are compared; a call that raises leaves the blocks as they
were.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvcore.legacy.blocks.blocks import Backing
from kvcore.legacy.v0.prefix_caching_block import Block
from kvcore.types.errors import KvcoreError


class Refusal(Exception):
    """Both backends raised the same error."""


class Twins:
    """Two instances of a facade, one per backend, that give the same answers."""

    def __init__(self, pair: list[Any], backings: list[Backing]) -> None:
        self.pair = pair
        self.backings = backings
        self.known = [backing.state() for backing in backings]
        self.seen: set[str] = set()
        self.must: str | None = None

    def call(self, name: str, *args: Any, **options: Any) -> Any:
        """Return the answer of both. Raises Refusal if both raise the same."""
        return self.each(lambda facade: getattr(facade, name)(*args, **options))

    def each(self, call: Callable[[Any], Any]) -> Any:
        """Do the same for any call on one of them; blocks are compared by their ids."""
        before = self.known[0]
        answers = [_answer(call, facade) for facade in self.pair]
        after = self.known = [backing.state() for backing in self.backings]
        reported = [_told(answer) for answer in answers]
        assert reported[0] == reported[1], reported
        assert after[0] == after[1]
        if isinstance(answers[0], KvcoreError):
            assert after[0] == before, answers[0]
            assert self.must is None, (self.must, answers[0])
            raise Refusal(str(answers[0]))
        return answers

    def batch(self) -> None:
        """Assert that both hand out the same batch."""
        self.seen |= {type(command).__name__ for command in self.call("take_batch")[0]}


def _answer(call: Callable[[Any], Any], facade: Any) -> Any:
    try:
        return call(facade)
    except KvcoreError as error:
        return error


def _told(answer: Any) -> Any:
    """Return an answer in a form that is equal on both backends."""
    if isinstance(answer, KvcoreError):
        return type(answer), str(answer)
    if isinstance(answer, Block):
        return answer.block_id, answer.token_ids, answer.content_hash, answer.computed
    if isinstance(answer, list):
        return [_told(each) for each in answer]
    if hasattr(answer, "buffer"):
        return answer.number, bytes(answer.buffer), answer.keys
    return answer
