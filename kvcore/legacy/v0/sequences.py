# SPDX-License-Identifier: Apache-2.0
"""Sequences as the V0 block manager reads them, and plain ones for use without an engine.

A manager takes any object with these methods. Statuses and results compare by name, so they equal
those of an engine's own enumerations, whether or not these are ints; a status also compares with
ints, by the original's numbers.
Source: S002-59, 61, 69, 72.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence as List
from functools import total_ordering
from typing import Any, Protocol

from kvcore.legacy.blocks.named_enum import AllocStatus as AllocStatus


@total_ordering
class SequenceStatus(enum.Enum):
    """The status of a sequence. Not an int, which would compare before other enumerations do."""

    WAITING = 0
    RUNNING = 1
    SWAPPED = 2
    FINISHED_STOPPED = 3

    def __eq__(self, other: object) -> bool:
        if isinstance(other, enum.Enum):
            return self._name_ == other._name_
        return self._value_ == other

    def __lt__(self, other: Any) -> bool:
        return self._value_ < int(other)

    def __hash__(self) -> int:
        return hash(self._name_)  # as all enumerations do

    def __index__(self) -> int:
        return self._value_


class DataLike(Protocol):
    """The token counts of a sequence."""

    def get_num_computed_tokens(self) -> int:
        """Return the number of computed tokens."""


class SequenceLike(Protocol):
    """A sequence of tokens."""

    @property
    def seq_id(self) -> int:
        """The id of the sequence."""

    @property
    def data(self) -> DataLike:
        """The token counts of the sequence."""

    def get_token_ids(self) -> list[int]:
        """Return all tokens of the sequence."""

    def extra_hash(self) -> int | None:
        """Return a hash of the inputs, other than tokens, on which the content depends."""

    def is_prefill(self) -> bool:
        """Return whether the prompt is not fully computed yet."""


class GroupLike(Protocol):
    """A group of sequences with one prompt."""

    @property
    def request_id(self) -> str:
        """The id of the request."""

    def get_seqs(self, status: SequenceStatus | None = None) -> List[SequenceLike]:
        """Return the sequences with this status; None: all of them."""


class SequenceData:
    """The token counts of a plain sequence."""

    def __init__(self) -> None:
        self.num_computed_tokens = 0

    def get_num_computed_tokens(self) -> int:
        """Return the number of computed tokens."""
        return self.num_computed_tokens


class Sequence:
    """A sequence for use without an engine."""

    def __init__(
        self,
        seq_id: int,
        token_ids: List[int],
        *,
        extra_hash: int | None = None,
        status: SequenceStatus = SequenceStatus.WAITING,
    ) -> None:
        self.seq_id = seq_id
        self.status = status
        self.data = SequenceData()
        self._token_ids = list(token_ids)
        self._prompt_length = len(self._token_ids)
        self._extra_hash = extra_hash

    def get_token_ids(self) -> list[int]:
        """Return all tokens of the sequence, as a live list."""
        return self._token_ids

    def append_token_id(self, token_id: int) -> None:
        """Append a token."""
        self._token_ids.append(token_id)

    def extra_hash(self) -> int | None:
        """Return a hash of the inputs, other than tokens, on which the content depends."""
        return self._extra_hash

    def is_prefill(self) -> bool:
        """Return whether the prompt is not fully computed yet."""
        return self.data.num_computed_tokens < self._prompt_length

    def fork(self, seq_id: int) -> Sequence:
        """Return a copy under another id, with the same tokens and counts."""
        child = Sequence(seq_id, self._token_ids, extra_hash=self._extra_hash, status=self.status)
        child.data.num_computed_tokens = self.data.num_computed_tokens
        child._prompt_length = self._prompt_length
        return child


class SequenceGroup:
    """A group of sequences with one prompt, for use without an engine."""

    def __init__(
        self, request_id: str, seqs: List[Sequence], encoder_seq: Sequence | None = None
    ) -> None:
        self.request_id = request_id
        self.seqs = list(seqs)
        self.encoder_seq = encoder_seq

    def get_seqs(self, status: SequenceStatus | None = None) -> List[Sequence]:
        """Return the sequences with this status; None: all of them."""
        return [each for each in self.seqs if status is None or each.status == status]

    def is_encoder_decoder(self) -> bool:
        """Return whether there is an encoder sequence."""
        return self.encoder_seq is not None

    def get_encoder_seq(self) -> Sequence | None:
        """Return the encoder sequence."""
        return self.encoder_seq
