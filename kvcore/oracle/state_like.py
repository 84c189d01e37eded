# SPDX-License-Identifier: Apache-2.0
"""Protocols for what the schedule reads of a state, since the oracle does not import the state."""

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
