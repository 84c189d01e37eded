# SPDX-License-Identifier: Apache-2.0
"""The block that stands in a table where a sliding window has passed.

Rules: it is a block of the GPU like any other, but nobody writes it, moves it or gives it back.
Source: S002-69, 70.
"""

from __future__ import annotations

from kvcore.legacy.v0.block_interfaces import Block, BlockId
from kvcore.legacy.v0.errors import NotSupported, WrongValue


class NullBlock(Block):
    """A block that cannot be changed."""

    def __init__(self, proxy: Block) -> None:
        """proxy: the block that it is."""
        self._proxy = proxy

    def append_token_ids(self, token_ids: list[int]) -> None:
        """Raises WrongValue."""
        reason = f"the null block {self.block_id} takes no tokens, {len(token_ids)} are given"
        raise WrongValue(reason=reason, block=self.block_id)

    @property
    def block_id(self) -> BlockId | None:
        """The physical block."""
        return self._proxy.block_id

    @block_id.setter
    def block_id(self, value: BlockId | None) -> None:
        reason = f"the null block {self.block_id} cannot become block {value}"
        raise WrongValue(reason=reason, block=self.block_id)

    @property
    def token_ids(self) -> list[int]:
        """None."""
        return self._proxy.token_ids

    @property
    def num_empty_slots(self) -> int:
        """A block's size: it holds nothing."""
        return self._proxy.num_empty_slots

    @property
    def is_full(self) -> bool:
        """False: it holds nothing."""
        return self._proxy.is_full

    @property
    def prev_block(self) -> Block | None:
        """None."""
        return self._proxy.prev_block

    @property
    def content_hash(self) -> int | None:
        """None."""
        return self._proxy.content_hash

    @property
    def extra_hash(self) -> int | None:
        """None."""
        return self._proxy.extra_hash

    @property
    def num_tokens_total(self) -> int:
        """Raises NotSupported."""
        raise NotSupported(reason=f"the null block {self.block_id} does not count tokens")

    @property
    def computed(self) -> bool:
        """Whether it was found computed."""
        return self._proxy.computed

    @computed.setter
    def computed(self, value: bool) -> None:
        self._proxy.computed = value

    @property
    def last_accessed(self) -> float:
        """When it was used; NotSupported where its kind of block does not know."""
        return self._proxy.last_accessed

    @last_accessed.setter
    def last_accessed(self, last_accessed_ts: float) -> None:
        self._proxy.last_accessed = last_accessed_ts
