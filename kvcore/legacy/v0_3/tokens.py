# SPDX-License-Identifier: Apache-2.0
"""The tokens of a sequence of the first block manager, as a whole and by logical block.

A logical block has a fixed number of slots, one per token. Source: S003-06.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvcore.legacy.v0_3.errors import BlockTooFull, NoLastToken

_BLANK_TOKEN_ID = -1
"""The token id that the original keeps in an empty slot."""


class LogicalTokenBlock:
    """The tokens of a sequence in one block.

    token_ids: one per slot, -1 for an empty slot.
    """

    def __init__(self, block_number: int, block_size: int) -> None:
        self.block_number = block_number
        self.block_size = block_size
        self.token_ids = [_BLANK_TOKEN_ID] * block_size
        self.num_tokens = 0

    def is_empty(self) -> bool:
        """Return whether all slots are empty."""
        return self.num_tokens == 0

    def is_full(self) -> bool:
        """Return whether no slot is empty."""
        return self.num_tokens == self.block_size

    def get_num_empty_slots(self) -> int:
        """Return the number of empty slots."""
        return self.block_size - self.num_tokens

    def append_tokens(self, token_ids: Sequence[int]) -> None:
        """Fill the next slots. Raises BlockTooFull."""
        end = self.num_tokens + len(token_ids)
        if end > self.block_size:
            room = self.get_num_empty_slots()
            raise BlockTooFull(block=self.block_number, given=len(token_ids), num_slots=room)
        self.token_ids[self.num_tokens : end] = token_ids
        self.num_tokens = end

    def get_token_ids(self) -> list[int]:
        """Return the tokens of the block, without empty slots."""
        return self.token_ids[: self.num_tokens]

    def get_last_token_id(self) -> int:
        """Return the newest token of the block. Raises NoLastToken."""
        if not self.num_tokens:
            raise NoLastToken(block=self.block_number)
        return self.token_ids[self.num_tokens - 1]


class SequenceData:
    """The tokens of a sequence, and the sum of its log-probabilities."""

    def __init__(self, prompt_token_ids: Sequence[int]) -> None:
        self.prompt_token_ids = list(prompt_token_ids)
        self.output_token_ids: list[int] = []
        self.cumulative_logprob = 0.0

    def __repr__(self) -> str:
        return (
            f"SequenceData(prompt_token_ids={self.prompt_token_ids}, "
            f"output_token_ids={self.output_token_ids}, "
            f"cumulative_logprob={self.cumulative_logprob})"
        )

    def append_token_id(self, token_id: int, logprob: float) -> None:
        """Append a token of the answer and add its log-probability."""
        self.output_token_ids.append(token_id)
        self.cumulative_logprob += logprob

    def get_len(self) -> int:
        """Return the number of tokens of prompt and answer."""
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    def get_prompt_len(self) -> int:
        """Return the number of tokens of the prompt."""
        return len(self.prompt_token_ids)

    def get_output_len(self) -> int:
        """Return the number of tokens of the answer."""
        return len(self.output_token_ids)

    def get_token_ids(self) -> list[int]:
        """Return the tokens of prompt and answer."""
        return self.prompt_token_ids + self.output_token_ids

    def get_last_token_id(self) -> int:
        """Return the newest token of the sequence."""
        return (self.output_token_ids or self.prompt_token_ids)[-1]
