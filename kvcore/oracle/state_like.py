# SPDX-License-Identifier: Apache-2.0
"""What the schedule reads of a state: protocols, since the oracle does not import the state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Sized
from typing import Protocol

from kvcore.types.config import Config

Tables = Sequence[Sequence[int]]
"""Block ids, one table per group."""


class RequestLike(Protocol):
    """A request: its tokens, how many are computed, and its tables in both tiers."""

    @property
    def request_id(self) -> str: ...
    @property
    def tokens(self) -> Sized: ...
    @property
    def num_computed(self) -> int: ...
    @property
    def num_output_placeholders(self) -> int: ...
    @property
    def num_scheduled_drafts(self) -> int: ...
    @property
    def tables(self) -> Tables: ...
    @property
    def host_tables(self) -> Tables: ...
    @property
    def epoch(self) -> int: ...


class OperationLike(Protocol):
    """A load or store, and the first token that it brings."""

    @property
    def request_id(self) -> str | None: ...
    @property
    def first_token(self) -> int: ...


class ReporterLike(Protocol):
    """A request that can report that a load failed, and rests on it if it counts its tokens."""

    @property
    def request_id(self) -> str: ...
    @property
    def counted(self) -> int: ...


class LoadLike(Protocol):
    """Tokens from outside that may still be missing, from the first one on."""

    @property
    def first(self) -> int: ...
    @property
    def end(self) -> int: ...
    @property
    def reporters(self) -> Sequence[ReporterLike]: ...


class PoolLike(Protocol):
    """Device blocks: those before the first one are null blocks."""

    @property
    def first_block(self) -> int: ...


class StateLike(Protocol):
    """A state."""

    @property
    def config(self) -> Config: ...
    @property
    def device(self) -> PoolLike: ...
    @property
    def requests(self) -> Mapping[str, RequestLike]: ...
    @property
    def rows(self) -> Sequence[str | None]: ...
    @property
    def operations(self) -> Mapping[int, OperationLike]: ...
    @property
    def epoch(self) -> int: ...
    @property
    def loads(self) -> Sequence[LoadLike]: ...


def kept_by(state: StateLike, request_id: str, named: Sequence[str], num_tokens: int) -> int:
    """Return how many tokens a rewind leaves a request. A request that it does not name keeps those
    before the first load that it rests on and that is reported, unless the rewind also takes back
    what stands in front of all reported loads.
    """
    firsts, mine = [], []
    for load in state.loads if request_id not in named else ():
        able = {each.request_id: each.counted for each in load.reporters}
        if load.end > num_tokens and not able.keys().isdisjoint(named):
            firsts.append(load.first)
            mine += [load.first] if able.get(request_id) else []
    is_in_front = min(firsts, default=0) > num_tokens
    return num_tokens if is_in_front else max(num_tokens, min(mine, default=0))
