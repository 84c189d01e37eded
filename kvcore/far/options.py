# SPDX-License-Identifier: Apache-2.0
"""Options of the exchange with a far tier, and its counts."""

from __future__ import annotations

from collections import Counter
from typing import Literal

import attrs

from kvcore.far.errors import InvalidTier

StorePolicy = Literal["publication", "second_use"]
POLICIES = ("publication", "second_use")
OPERATIONS = ("find", "load", "store")


@attrs.frozen(kw_only=True)
class FarOptions:
    """How an engine uses a far tier.

    staging_pages: number of slots in host memory, at least 3; a third is reserved for loads, a
    third for stores. fetch_timeout_s: the longest that a request waits for its pages.
    store_timeout_s: the time after which a store is given up. lease_s: how long pages that were
    found should be kept. min_fetch_tokens: fewer tokens than this are computed instead of fetched.
    store_policy: store a block once it is computed, or once a second request uses it. weights: a
    digest of the model's weights; if it is missing, `identify` computes it. rank, world: which of
    how many slices of each block this engine holds. Raises InvalidTier.
    """

    staging_pages: int = 256
    fetch_timeout_s: float = 1.0
    store_timeout_s: float = 10.0
    lease_s: float = 30.0
    min_fetch_tokens: int = 64
    store_policy: StorePolicy = "publication"
    weights: str | None = None
    rank: int = 0
    world: int = 1

    def __attrs_post_init__(self) -> None:
        for name in ("fetch_timeout_s", "store_timeout_s", "lease_s"):
            if not getattr(self, name) > 0:
                _refuse(name, getattr(self, name), "more than 0 seconds")
        if self.min_fetch_tokens < 1:
            _refuse("min_fetch_tokens", self.min_fetch_tokens, "at least 1")
        if self.store_policy not in POLICIES:
            _refuse("store_policy", self.store_policy, f"one of {', '.join(POLICIES)}")
        if not 0 <= self.rank < self.world:
            _refuse("rank", self.rank, f"0 to {self.world - 1}")


@attrs.define
class FarCounts:
    """Sums so far.

    pages: number of names by operation ("find", "load", "store") and outcome, a status in lower
    case or "timeout". dropped: pages that were not requested or not used, by the reason. seconds:
    from submit to answer, by operation. num_queried, num_hits: tokens that were looked up, and that
    were loaded. num_loaded: blocks that were loaded.
    """

    pages: Counter[tuple[str, str]] = attrs.field(factory=Counter)
    dropped: Counter[str] = attrs.field(factory=Counter)
    seconds: dict[str, float] = attrs.field(factory=lambda: dict.fromkeys(OPERATIONS, 0.0))
    num_queried: int = 0
    num_hits: int = 0
    num_loaded: int = 0

    @property
    def num_stored(self) -> int:
        """Number of pages that the tier confirmed to keep."""
        return self.pages["store", "ok"]

    @property
    def num_failed(self) -> int:
        """Number of pages that were not loaded or not kept, apart from those it did not have."""
        fine = ("ok", "missing")
        return sum(number for (_, end), number in self.pages.items() if end not in fine)


def _refuse(name: str, value: object, expected: str) -> None:
    raise InvalidTier(name=name, value=value, expected=expected)
