# SPDX-License-Identifier: Apache-2.0
"""The adapter's record of a request, in addition to the core's own state."""

from __future__ import annotations

import attrs

from kvcore.compat.engine_request import EngineRequest, read_hashes


@attrs.define(eq=False)
class RegisteredRequest:
    """A request as the core knows it.

    row: in the core. last_token: the last of its tokens, None if it was not read. is_read: whether
    its new tokens are read; else the core has zeros for them. num_hashes: number of its own hashes,
    None if the core hashes. last_hash: the last of those, empty if there is none. drafts: after its
    tokens. counted: lower bound of the engine's count when it was last scheduled. end: the most
    tokens that were scheduled since it got blocks. num_computed: the core's count if it can
    continue by `append`, else 0; num_ahead of those are to come. decodes: whether it continued by
    `append` since counted and end were noted. batch: mark of the last batch in which it did.
    """

    request: EngineRequest
    row: int
    last_token: int | None
    is_read: bool
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
        """Note the counts that the fast path left out, and end it until counts are noted again."""
        if self.decodes:
            self.counted = self.num_computed - 1
            self.end = max(self.end, self.num_computed)
        self.num_computed, self.decodes = 0, False

    @property
    def least_computed(self) -> int:
        """The engine's count when the request was scheduled last; a lower one was lowered since."""
        return self.num_computed - 1 if self.decodes else self.counted

    def is_another(self, request: EngineRequest) -> bool:
        """Return whether this object is another request than the known one, or its own hashes
        changed. Comparing the last known hash suffices, since it depends on those before it.
        """
        hashes = read_hashes(request)
        if request is not self.request or hashes is None or not self.num_hashes:
            return request is not self.request
        return len(hashes) < self.num_hashes or hashes[self.num_hashes - 1] != self.last_hash
