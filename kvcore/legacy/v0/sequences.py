# SPDX-License-Identifier: Apache-2.0
"""Sequences as the V0 block manager reads them, and plain ones for use without an engine.

A manager takes any object with these methods. Statuses and answers compare by name, so an engine's
own enumerations compare equal, whether or not their members are ints; a status also compares with
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
    """Where a sequence stands. No subclass of int, which would compare other enumerations first."""

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
    """What is counted of a sequence."""

    def get_num_computed_tokens(self) -> int:
        """Tokens that were computed."""


class SequenceLike(Protocol):
    """A sequence of tokens."""

    @property
    def seq_id(self) -> int:
        """Its number."""

    @property
    def data(self) -> DataLike:
        """Its counts."""

    def get_token_ids(self) -> list[int]:
        """All its tokens."""

    def extra_hash(self) -> int | None:
        """What the content depends on besides its tokens."""

    def is_prefill(self) -> bool:
        """Whether its prompt is not computed yet."""


class GroupLike(Protocol):
    """Sequences of one prompt."""

    @property
    def request_id(self) -> str:
        """Its name."""

    def get_seqs(self, status: SequenceStatus | None = None) -> List[SequenceLike]:
        """The sequences with this status; None: all of them."""


class SequenceData:
    """What was computed of a sequence."""

    def __init__(self) -> None:
        self.num_computed_tokens = 0

    def get_num_computed_tokens(self) -> int:
        """Tokens that were computed."""
        return self.num_computed_tokens


class Sequence:
    """A plain sequence."""

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
        """All its tokens, as a live list."""
        return self._token_ids

    def append_token_id(self, token_id: int) -> None:
        """Add a token."""
        self._token_ids.append(token_id)

    def extra_hash(self) -> int | None:
        """What the content depends on besides its tokens."""
        return self._extra_hash

    def is_prefill(self) -> bool:
        """Whether its prompt is not computed yet."""
        return self.data.num_computed_tokens < self._prompt_length

    def fork(self, seq_id: int) -> Sequence:
        """Another one that goes on from here."""
        child = Sequence(seq_id, self._token_ids, extra_hash=self._extra_hash, status=self.status)
        child.data.num_computed_tokens = self.data.num_computed_tokens
        child._prompt_length = self._prompt_length
        return child


class SequenceGroup:
    """Plain sequences of one prompt."""

    def __init__(
        self, request_id: str, seqs: List[Sequence], encoder_seq: Sequence | None = None
    ) -> None:
        self.request_id = request_id
        self.seqs = list(seqs)
        self.encoder_seq = encoder_seq

    def get_seqs(self, status: SequenceStatus | None = None) -> List[Sequence]:
        """The sequences with this status; None: all of them."""
        return [each for each in self.seqs if status is None or each.status == status]

    def is_encoder_decoder(self) -> bool:
        """Whether there is an encoder sequence."""
        return self.encoder_seq is not None

    def get_encoder_seq(self) -> Sequence | None:
        """The encoder sequence."""
        return self.encoder_seq
