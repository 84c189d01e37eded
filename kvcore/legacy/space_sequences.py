# SPDX-License-Identifier: Apache-2.0
"""What the early block managers are asked about: sequences, groups of them, and shared prefixes.

Rules: a manager reads the number of a sequence's logical blocks, its id and its status, and never
changes a status; it writes the block table of a prefix. Whoever has classes with these members may
use those: a status of another enumeration counts by its name. Source: S003-06, 07, 13, 30, 36.
Twin: none.
"""

from __future__ import annotations

import copy
import enum
from collections.abc import Iterable
from collections.abc import Sequence as Items
from typing import TYPE_CHECKING, Any

from kvcore.arguments import read_count
from kvcore.legacy.named import NamedEnum
from kvcore.legacy.space_errors import WrongPrefix

if TYPE_CHECKING:
    from kvcore.legacy.block_allocator import PhysicalTokenBlock


class SequenceStatus(NamedEnum):
    """Where a sequence is between its arrival and its end."""

    WAITING = enum.auto()
    RUNNING = enum.auto()
    SWAPPED = enum.auto()
    FINISHED_STOPPED = enum.auto()
    FINISHED_LENGTH_CAPPED = enum.auto()
    FINISHED_ABORTED = enum.auto()
    FINISHED_IGNORED = enum.auto()

    @staticmethod
    def is_finished(status: SequenceStatus) -> bool:
        """Whether a sequence of this status needs no blocks any more."""
        return status.name.startswith("FINISHED")


def has_status(seq: Sequence, status: SequenceStatus) -> bool:
    """Whether a sequence's status is this one, or of its name in an engine's own enumeration."""
    given = seq.status
    return given is status or (type(given) is not type(status) and given.name == status.name)


def seqs_of(seq_group: SequenceGroup, status: SequenceStatus) -> list[Sequence]:
    """A group's sequences of one status; the group is not asked, since it may compare otherwise."""
    return [seq for seq in seq_group.get_seqs() if has_status(seq, status)]


class LogicalTokenBlock:
    """Some tokens of a sequence that lie in one block."""

    def __init__(self, block_number: int, block_size: int) -> None:
        self.block_number = block_number
        self.block_size = block_size
        self.token_ids: list[int] = []

    @property
    def num_tokens(self) -> int:
        """How many tokens it has."""
        return len(self.token_ids)

    def is_empty(self) -> bool:
        """Whether it has no token."""
        return not self.token_ids

    def is_full(self) -> bool:
        """Whether it has no slot left."""
        return len(self.token_ids) == self.block_size

    def get_num_empty_slots(self) -> int:
        """How many slots it has left."""
        return self.block_size - len(self.token_ids)

    def get_token_ids(self) -> list[int]:
        """Its tokens."""
        return list(self.token_ids)


class Sequence:
    """Tokens of one prompt and one answer, and the logical blocks that they fill."""

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
        self.status = SequenceStatus.WAITING
        self.logical_token_blocks: list[LogicalTokenBlock] = []
        self.output_logprobs: list[Any] = []
        self._token_ids: list[int] = []
        self._num_prompt_tokens = len(prompt_token_ids)
        for token_id in prompt_token_ids:
            self._append(token_id)

    def __repr__(self) -> str:
        blocks = len(self.logical_token_blocks)
        return f"Sequence(seq_id={self.seq_id}, status={self.status.name}, num_blocks={blocks})"

    def _append(self, token_id: int) -> None:
        if not self.logical_token_blocks or self.logical_token_blocks[-1].is_full():
            number = len(self.logical_token_blocks)
            self.logical_token_blocks.append(LogicalTokenBlock(number, self.block_size))
        self.logical_token_blocks[-1].token_ids.append(token_id)
        self._token_ids.append(token_id)

    def append_token_id(self, token_id: int, logprobs: Any = None) -> None:
        """Add a token of the answer."""
        self._append(token_id)
        self.output_logprobs.append(logprobs)

    def get_len(self) -> int:
        """Tokens of prompt and answer."""
        return len(self._token_ids)

    def get_prompt_len(self) -> int:
        """Tokens of the prompt."""
        return self._num_prompt_tokens

    def get_output_len(self) -> int:
        """Tokens of the answer."""
        return len(self._token_ids) - self._num_prompt_tokens

    def get_token_ids(self) -> list[int]:
        """Tokens of prompt and answer."""
        return list(self._token_ids)

    def get_last_token_id(self) -> int:
        """The newest token."""
        return self._token_ids[-1]

    def get_output_token_ids(self) -> list[int]:
        """Tokens of the answer."""
        return self._token_ids[self._num_prompt_tokens :]

    def is_finished(self) -> bool:
        """Whether it needs no blocks any more."""
        return SequenceStatus.is_finished(self.status)

    def fork(self, new_seq_id: int) -> Sequence:
        """A sequence of the same tokens and status under another id; tell the manager too."""
        child = copy.deepcopy(self)
        child.seq_id = new_seq_id
        return child


class Prefix:
    """Whole blocks of tokens with which several prompts begin.

    computed: set by the engine once a forward pass wrote the blocks. Raises WrongPrefix.
    """

    def __init__(self, token_ids: Items[int], block_size: int) -> None:
        self.token_ids = tuple(token_ids)
        self.block_size = read_count("block_size", block_size, 1)
        self.length = len(self.token_ids)
        if self.length % block_size:
            raise WrongPrefix(num_tokens=self.length, block_size=block_size)
        self.block_table: list[PhysicalTokenBlock] | None = None
        self.computed = False

    def __repr__(self) -> str:
        blocks = None if self.block_table is None else self.get_block_numbers()
        return f"Prefix(length={self.length}, blocks={blocks}, computed={self.computed})"

    @property
    def allocated(self) -> bool:
        """Whether it has blocks."""
        return self.block_table is not None

    def get_num_blocks(self) -> int:
        """Blocks that its tokens fill."""
        return self.length // self.block_size

    def get_block_numbers(self) -> list[int]:
        """Numbers of its blocks, none before it is allocated."""
        return [block.block_number for block in self.block_table or ()]

    def get_length(self) -> int:
        """Its tokens."""
        return self.length

    def set_block_table(self, block_table: Iterable[PhysicalTokenBlock]) -> None:
        """Give it blocks: a manager calls this."""
        self.block_table = list(block_table)


class PrefixPool:
    """The prefixes of an engine: of equal tokens there is one."""

    def __init__(self, block_size: int) -> None:
        self.block_size = read_count("block_size", block_size, 1)
        self.prefixes: dict[tuple[int, ...], Prefix] = {}

    def add_or_get_prefix(self, token_ids: Items[int]) -> Prefix | None:
        """The prefix of these tokens, cut to whole blocks; None where no block is full."""
        length = len(token_ids) // self.block_size * self.block_size
        if not length:
            return None
        tokens = tuple(token_ids[:length])
        return self.prefixes.setdefault(tokens, Prefix(tokens, self.block_size))


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

    def __repr__(self) -> str:
        return f"SequenceGroup(request_id={self.request_id!r}, num_seqs={len(self.seqs_dict)})"

    def get_seqs(self, status: SequenceStatus | None = None) -> list[Sequence]:
        """All sequences, or those of one status."""
        seqs = list(self.seqs_dict.values())
        return seqs if status is None else [seq for seq in seqs if has_status(seq, status)]

    def num_seqs(self, status: SequenceStatus | None = None) -> int:
        """How many these are."""
        return len(self.get_seqs(status))

    def get_unfinished_seqs(self) -> list[Sequence]:
        """Sequences that need blocks."""
        return [seq for seq in self.get_seqs() if not seq.is_finished()]

    def get_finished_seqs(self) -> list[Sequence]:
        """Sequences that need none any more."""
        return [seq for seq in self.get_seqs() if seq.is_finished()]

    def add(self, seq: Sequence) -> None:
        """Add a sequence, such as a fork."""
        self.seqs_dict[seq.seq_id] = seq

    def remove(self, seq_id: int) -> None:
        """Forget a sequence. Raises KeyError."""
        del self.seqs_dict[seq_id]

    def find(self, seq_id: int) -> Sequence:
        """The sequence of an id. Raises KeyError."""
        return self.seqs_dict[seq_id]

    def is_finished(self) -> bool:
        """Whether no sequence needs blocks."""
        return not self.get_unfinished_seqs()
