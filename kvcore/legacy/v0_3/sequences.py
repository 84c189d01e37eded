# SPDX-License-Identifier: Apache-2.0
"""Sequences and sequence groups, as the early block managers read them.

A manager reads the number of a sequence's logical blocks, its id and its status, and never changes
a status. Any classes with these members can be used; statuses of other enumerations compare by
name. Source: S003-06, 07, 30, 36.
"""

from __future__ import annotations

import copy
import enum
from collections.abc import Iterable
from collections.abc import Sequence as Items
from typing import Any

from kvcore.legacy.blocks.named_enum import NamedEnum
from kvcore.legacy.v0_3.errors import KnownSequence, NoLogprob, StrangeSequence
from kvcore.legacy.v0_3.prefixes import Prefix, PrefixPool
from kvcore.legacy.v0_3.tokens import LogicalTokenBlock, SequenceData
from kvcore.types.arguments import read_count

__all__ = [
    "LogicalTokenBlock",
    "Prefix",
    "PrefixPool",
    "Sequence",
    "SequenceData",
    "SequenceGroup",
    "SequenceStatus",
    "has_status",
    "seqs_of",
]

_REASONS = {"STOPPED": "stop", "LENGTH_CAPPED": "length", "ABORTED": "abort", "IGNORED": "length"}


class SequenceStatus(NamedEnum):
    """The state of a sequence between its arrival and its end."""

    WAITING = enum.auto()
    RUNNING = enum.auto()
    SWAPPED = enum.auto()
    FINISHED_STOPPED = enum.auto()
    FINISHED_LENGTH_CAPPED = enum.auto()
    FINISHED_ABORTED = enum.auto()
    FINISHED_IGNORED = enum.auto()

    @staticmethod
    def is_finished(status: SequenceStatus) -> bool:
        """Return whether a sequence of this status needs no more blocks."""
        return status._name_.startswith("FINISHED")

    @staticmethod
    def get_finished_reason(status: SequenceStatus) -> str | None:
        """Return the finish reason that clients see for a status; None if it is not finished."""
        return _REASONS.get(status.name.removeprefix("FINISHED_"))


def has_status(seq: Sequence, status: SequenceStatus) -> bool:
    """Return whether a sequence has this status, or one of the same name in another enumeration."""
    given = seq.status
    return given is status or (type(given) is not type(status) and given.name == status.name)


def seqs_of(seq_group: SequenceGroup, status: SequenceStatus) -> list[Sequence]:
    """Return a group's sequences of one status.

    Does not call the group's own filter, which may compare statuses differently.
    """
    seqs = seq_group.get_seqs()
    return [seq for seq in seqs if seq.status is status or has_status(seq, status)]


class Sequence:
    """The tokens of one prompt and one answer, and the logical blocks that they fill.

    output_text, prefix_offset, read_offset, tokens: kept for the engine's detokenizer.
    """

    def __init__(
        self,
        seq_id: int,
        prompt: str,
        prompt_token_ids: Items[int],
        block_size: int,
        lora_request: Any = None,
    ) -> None:
        self.seq_id = seq_id
        self.prompt = prompt
        self.block_size = read_count("block_size", block_size, 1)
        self.lora_request = lora_request
        self.data = SequenceData(prompt_token_ids)
        self.output_logprobs: list[Any] = []
        self.output_text = ""
        self.logical_token_blocks: list[LogicalTokenBlock] = []
        self._append_tokens_to_blocks(self.data.prompt_token_ids)
        self.status = SequenceStatus.WAITING
        self.prefix_offset = 0
        self.read_offset = 0
        self.tokens: list[str] | None = None

    def __repr__(self) -> str:
        blocks = len(self.logical_token_blocks)
        return f"Sequence(seq_id={self.seq_id}, status={self.status.name}, num_blocks={blocks})"

    @property
    def lora_int_id(self) -> int:
        """The number of the sequence's adapter, 0 without one."""
        return self.lora_request.lora_int_id if self.lora_request else 0

    def _append_tokens_to_blocks(self, token_ids: Items[int]) -> None:
        blocks, size = self.logical_token_blocks, self.block_size
        start = 0
        while start < len(token_ids):
            if not blocks or blocks[-1].is_full():
                blocks.append(LogicalTokenBlock(len(blocks), size))
            end = start + blocks[-1].get_num_empty_slots()
            blocks[-1].append_tokens(token_ids[start:end])
            start = end

    def append_token_id(self, token_id: int, logprobs: Any = None) -> None:
        """Append a token of the answer.

        logprobs: token -> log-probability, this token included; None if not requested. Raises
        NoLogprob.
        """
        if logprobs is not None and token_id not in logprobs:
            raise NoLogprob(sequence=self.seq_id, token=token_id, num_logprobs=len(logprobs))
        self._append_tokens_to_blocks([token_id])
        self.output_logprobs.append(logprobs)
        self.data.append_token_id(token_id, 0.0 if logprobs is None else logprobs[token_id])

    def get_len(self) -> int:
        """Return the number of tokens of prompt and answer."""
        return self.data.get_len()

    def get_prompt_len(self) -> int:
        """Return the number of tokens of the prompt."""
        return self.data.get_prompt_len()

    def get_output_len(self) -> int:
        """Return the number of tokens of the answer."""
        return self.data.get_output_len()

    def get_token_ids(self) -> list[int]:
        """Return the tokens of prompt and answer."""
        return self.data.get_token_ids()

    def get_last_token_id(self) -> int:
        """Return the newest token."""
        return self.data.get_last_token_id()

    def get_output_token_ids(self) -> list[int]:
        """Return the tokens of the answer, as a live list."""
        return self.data.output_token_ids

    def get_cumulative_logprob(self) -> float:
        """Return the sum of the log-probabilities of the answer's tokens."""
        return self.data.cumulative_logprob

    def get_beam_search_score(
        self,
        length_penalty: float = 0.0,
        seq_len: int | None = None,
        eos_token_id: int | None = None,
    ) -> float:
        """Return the cumulative log-probability divided by length ** length_penalty.

        The length does not count an end token.
        """
        if seq_len is None:
            has_end = eos_token_id is not None and self.get_last_token_id() == eos_token_id
            seq_len = self.get_len() - has_end
        return self.get_cumulative_logprob() / float(seq_len**length_penalty)

    def is_finished(self) -> bool:
        """Return whether the sequence needs no more blocks."""
        return SequenceStatus.is_finished(self.status)

    def fork(self, new_seq_id: int) -> Sequence:
        """Return a copy under another id; the caller also forks it in the manager."""
        child = copy.deepcopy(self)
        child.seq_id = new_seq_id
        return child


class SequenceGroup:
    """The sequences of one request, which begin with one prompt."""

    def __init__(
        self,
        request_id: str,
        seqs: Iterable[Sequence],
        sampling_params: Any = None,
        arrival_time: float = 0.0,
        lora_request: Any = None,
        prefix: Prefix | None = None,
    ) -> None:
        self.request_id = request_id
        self.seqs_dict = {seq.seq_id: seq for seq in seqs}
        self.sampling_params = sampling_params
        self.arrival_time = arrival_time
        self.lora_request = lora_request
        self.prefix = prefix
        self.prompt_logprobs: Any = None

    def __repr__(self) -> str:
        return f"SequenceGroup(request_id={self.request_id!r}, num_seqs={len(self.seqs_dict)})"

    @property
    def prompt(self) -> str:
        """The prompt text, with which all sequences begin."""
        return next(iter(self.seqs_dict.values())).prompt

    @property
    def prompt_token_ids(self) -> list[int]:
        """The tokens of the prompt."""
        return next(iter(self.seqs_dict.values())).data.prompt_token_ids

    @property
    def lora_int_id(self) -> int:
        """The number of the sequence's adapter, 0 without one."""
        return self.lora_request.lora_int_id if self.lora_request else 0

    def get_seqs(self, status: SequenceStatus | None = None) -> list[Sequence]:
        """Return all sequences, or those of one status."""
        seqs = list(self.seqs_dict.values())
        return seqs if status is None else [seq for seq in seqs if has_status(seq, status)]

    def num_seqs(self, status: SequenceStatus | None = None) -> int:
        """Return the number of all sequences, or of those of one status."""
        return len(self.get_seqs(status))

    def get_unfinished_seqs(self) -> list[Sequence]:
        """Return the sequences that still need blocks."""
        return [seq for seq in self.get_seqs() if not seq.is_finished()]

    def num_unfinished_seqs(self) -> int:
        """Return the number of sequences that still need blocks."""
        return len(self.get_unfinished_seqs())

    def get_finished_seqs(self) -> list[Sequence]:
        """Return the sequences that need no more blocks."""
        return [seq for seq in self.get_seqs() if seq.is_finished()]

    def num_finished_seqs(self) -> int:
        """Return the number of sequences that need no more blocks."""
        return len(self.get_finished_seqs())

    def get_max_num_running_seqs(self) -> int:
        """Return the largest number of sequences that will run at once from now on."""
        best_of: int = self.sampling_params.best_of
        if self.sampling_params.use_beam_search or best_of > self.num_seqs():
            return best_of
        return self.num_unfinished_seqs()

    def add(self, seq: Sequence) -> None:
        """Add a sequence, such as a fork. Raises KnownSequence."""
        if seq.seq_id in self.seqs_dict:
            raise KnownSequence(sequence=seq.seq_id, group=self.request_id)
        self.seqs_dict[seq.seq_id] = seq

    def remove(self, seq_id: int) -> None:
        """Remove a sequence. Raises StrangeSequence."""
        del self.seqs_dict[self.find(seq_id).seq_id]

    def find(self, seq_id: int) -> Sequence:
        """Return the sequence with an id. Raises StrangeSequence."""
        if seq_id not in self.seqs_dict:
            name, count = self.request_id, len(self.seqs_dict)
            raise StrangeSequence(sequence=seq_id, group=name, num_seqs=count)
        return self.seqs_dict[seq_id]

    def is_finished(self) -> bool:
        """Return whether no sequence needs blocks any more."""
        return not self.get_unfinished_seqs()
