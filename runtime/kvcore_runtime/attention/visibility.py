# SPDX-License-Identifier: Apache-2.0
"""The keys that a query sees: all before it, a window that slides with it, or its chunk.

The names and the meaning of a window are those of `kvcore.Group`, so that what a layer sees
and what its cache group keeps can be compared. A query always sees its own key. A layer of kind
`state` has no keys: it reads the state before the step and writes the one after it, in one block.
"""

from __future__ import annotations

from typing import Literal, get_args

import attrs
import torch
from torch import Tensor

from kvcore_runtime.errors import UnsupportedModelFile

Kind = Literal["full_attention", "sliding_window", "chunked_local", "state"]


@attrs.frozen(kw_only=True)
class Visibility:
    """The positions that the queries of a layer see.

    window: sliding_window: keys that a query sees, its own included; chunked_local: tokens of a
    chunk, of which a query sees those up to its own; full_attention and state: None.

    Raises UnsupportedModelFile.
    """

    kind: Kind = "full_attention"
    window: int | None = None

    def __attrs_post_init__(self) -> None:
        if self.kind not in get_args(Kind):
            expected = f"one of {', '.join(get_args(Kind))}"
            raise UnsupportedModelFile(what="kind", value=self.kind, expected=expected)
        if self.kind in ("full_attention", "state"):
            if self.window is not None:
                expected = f"None, for {self.kind}"
                raise UnsupportedModelFile(what="window", value=self.window, expected=expected)
        elif type(self.window) is not int or self.window < 1:
            raise UnsupportedModelFile(what="window", value=self.window, expected="1 token or more")

    @property
    def is_state(self) -> bool:
        """Whether the layer keeps a state."""
        return self.kind == "state"

    def seen(self, start: int, end: int) -> range:
        """Return the positions whose blocks a step that computes [start, end) reads or writes."""
        return range(end - 1 if self.is_state else self.first_seen(start), end)

    def blocks(self, start: int, end: int, block_size: int, num_drafts: int = 0) -> range:
        """Return the places of a table that a step which computes [start, end) reads or writes.

        num_drafts: drafts at the last positions, each of which has a state of its own, in the
        places after that of the state before them.
        """
        if self.is_state:
            place = (end - num_drafts - 1) // block_size
            return range(place, place + 1 + num_drafts)
        return range(self.first_seen(start) // block_size, -(-end // block_size))

    def first_seen(self, position: int) -> int:
        """Return the first position whose key the query at this position sees."""
        if self.window is None:
            return 0
        if self.kind == "sliding_window":
            return max(0, position - self.window + 1)
        return position - position % self.window

    def mask(self, queries: range, keys: range, device: torch.device) -> Tensor:
        """Return which of the given keys each query sees, [queries, keys] bool."""
        query = torch.arange(queries.start, queries.stop, device=device).unsqueeze(1)
        key = torch.arange(keys.start, keys.stop, device=device)
        seen = key <= query
        if self.window is None:
            return seen
        if self.kind == "sliding_window":
            return seen & (key > query - self.window)
        return seen & (key >= query - query % self.window)


FULL = Visibility()
STATE = Visibility(kind="state")
