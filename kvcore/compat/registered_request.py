# SPDX-License-Identifier: Apache-2.0
"""The adapter's record of a request, in addition to the core's own state."""

from __future__ import annotations

import attrs

from kvcore.compat.engine_request import EngineRequest, read_hashes


@attrs.define(eq=False)
class RegisteredRequest:
    """A request as the core knows it.

    row: in the core. last_token: the last of its tokens. num_hashes: number of its own hashes, None
    if the core hashes. last_hash: the last of those, empty if there is none. drafts: after its
    tokens. counted: lower bound of the engine's count when it was last scheduled. end: the most
    tokens that were scheduled since it holds blocks. num_computed: the core's count if it can
    continue by `append`, else 0; num_ahead of those are to come. decodes: whether it continued so
    since counted and end were noted. batch: mark of the last batch in which it continued.
    """

    request: EngineRequest
    row: int
    last_token: int
    num_hashes: int | None
    last_hash: bytes = b""
    drafts: list[int] = attrs.field(factory=list)
    counted: int = 0
    end: int = 0
    num_computed: int = 0
    num_ahead: int = 0
    decodes: bool = False
    batch: object = None

    def look_at(self) -> None:
        """Note what was left to note while it decoded; it does not until its counts are noted."""
        if self.decodes:
            self.counted = self.num_computed - 1
            self.end = max(self.end, self.num_computed)
        self.num_computed, self.decodes = 0, False

    @property
    def least_computed(self) -> int:
        """The engine's count when the request was scheduled last; less was lowered."""
        return self.num_computed - 1 if self.decodes else self.counted

    def is_another(self, request: EngineRequest) -> bool:
        """Whether this object is not the request that is known, or its own hashes changed: those
        before the last follow from it.
        """
        hashes = read_hashes(request)
        if request is not self.request or hashes is None or not self.num_hashes:
            return request is not self.request
        return len(hashes) < self.num_hashes or hashes[self.num_hashes - 1] != self.last_hash
