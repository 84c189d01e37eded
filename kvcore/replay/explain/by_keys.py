# SPDX-License-Identifier: Apache-2.0
"""Explains the admissions of a record by keys, which has hashes of blocks instead of tokens.

An observer compares labels. Here the last token of a full block has a number that stands for the
block's hash, and so for all tokens up to there; the others are 0. So blocks are equal if their
hashes are; what is known of the tokens after the last equal block is not told.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs

from kvcore.explain.explanation import LENGTHS, Explanation
from kvcore.explain.known_tokens import LABEL
from kvcore.explain.observer import AdmissionObserver
from kvcore.explain.requests import to_bytes
from kvcore.types.values import Request

WHOLE = LENGTHS.index("whole_blocks")


class ObserverByKeys:
    """Reports calls without tokens to an observer. hashes: those that come with the next call."""

    def __init__(self, manager: Any, explained: Callable[[Explanation], object]) -> None:
        self._fine = manager.config.hash_block_size
        self._observer = AdmissionObserver(manager, lambda each: explained(self._reduced(each)))
        self._numbers: dict[bytes, int] = {}
        self._num_labels = 0
        self.notes, self.before = self._observer.notes, self._observer.before
        self.hashes: Mapping[str, list[bytes]] = {}

    def note(self, name: str, outcome: Any, *args: Any, **options: Any) -> None:
        """Add a call that was made."""
        if name == "add_request":
            args = (self._labelled(args[0]),)
        elif name == "append" and len(args) > 1 and args[1] is not None:
            args = (args[0], self._appended(args[0], len(args[1])), *args[2:])
        elif name == "append" and options.get("tokens") is not None:
            options["tokens"] = self._appended(args[0], len(options["tokens"]))
        elif name == "add_tokens":
            args = (args[0], self._labels(args[0], len(args[1])), *args[2:])
        elif name == "accept":
            drafts = to_bytes(self._labels(args[0], args[1]))
            self._observer.request(args[0]).drafts = drafts
        self._observer.note(name, outcome, *args, **options)

    def _labelled(self, request: Request) -> Request:
        made = self._next(0, len(request.tokens), request.block_hashes or ())
        return attrs.evolve(request, tokens=made, block_hashes=None, cache_salt=None)

    def _appended(self, requests: Any, count: int) -> list[int]:
        return [each for named in list(requests)[:count] for each in self._labels(named, 1)]

    def _labels(self, named: str | int, count: int) -> list[int]:
        """Return labels of the next tokens of a request, by its id or row."""
        request = self._observer.request(named)
        start = len(request.labels) // LABEL
        return self._next(start, count, self.hashes.get(request.name, ()))

    def _next(self, start: int, count: int, hashes: Sequence[bytes]) -> list[int]:
        """Return labels of tokens. A full block without a hash equals no other block."""
        labels, size = [0] * count, self._fine
        for number, place in enumerate(range(size - 1 - start % size, count, size)):
            self._num_labels += 1
            labels[place] = self._num_labels
            if number < len(hashes):
                labels[place] = self._numbers.setdefault(hashes[number], self._num_labels)
        return labels

    def _reduced(self, each: Explanation) -> Explanation:
        """Return the explanation of the tokens in whole blocks."""
        ideal = each.lengths[WHOLE]
        near = each.nearest
        if near is not None:
            start = near.differs_at // self._fine * self._fine
            near = attrs.evolve(near, differs_at=start, token=None, its_token=None)
        spans = [
            attrs.evolve(span, end=min(span.end, ideal))
            for span in each.spans
            if span.start < ideal
        ]
        lengths = (ideal,) * WHOLE + each.lengths[WHOLE:]
        near = near if near is not None and near.differs_at else None
        return attrs.evolve(each, lengths=lengths, spans=tuple(spans), nearest=near)
