# SPDX-License-Identifier: Apache-2.0
"""A recorded list of operations, prepared so that replaying it costs the driver almost nothing.

Uses the standard library only, since every peer's own environment imports it. `benches/record.py`
writes the list. Twin: benches/operations/mod.rs.
"""

from __future__ import annotations

import array
import sys
from dataclasses import dataclass
from pathlib import Path

MAGIC, VERSION = 0x6B76_6F70, 1
STEP, ADD, PREFILL, DECODE, PREEMPT, FINISH = range(6)
"""The operations, each followed by its arguments.

STEP: ends a step. ADD, request: create it with its prompt. PREFILL, request, end: look up if it is
the first since ADD or PREEMPT, then allocate up to end. DECODE, count, requests: each appends its
next output token and needs a slot for it. PREEMPT, request: free its blocks, keep its tokens.
FINISH, request: free its blocks and forget it.
"""
SIZES = {STEP: 1, ADD: 2, PREFILL: 3, PREEMPT: 2, FINISH: 2}

Operation = tuple[int, int, int]


@dataclass(frozen=True)
class Decode:
    """One token for each of some requests; `requests` is one object while they stay the same."""

    requests: list[int]
    tokens: list[int]
    buffer: array.array[int]  # the same tokens


@dataclass(frozen=True)
class Work:
    """The list. Operations of one step are (code, request, end), or (DECODE, place, 0)."""

    block_size: int
    num_blocks: int
    prompts: list[array.array[int]]
    steps: list[list[Operation]]
    decodes: list[Decode]
    num_tokens_max: int  # of the longest request

    @property
    def num_decoded(self) -> int:
        """The number of appended tokens."""
        return sum(len(decode.requests) for decode in self.decodes)

    def pure_decodes(self) -> list[int]:
        """Return the steps that only decode, for the largest number of requests of any step."""
        most = max((len(decode.requests) for decode in self.decodes), default=0)
        return [
            number
            for number, step in enumerate(self.steps)
            if len(step) == 1
            and step[0][0] == DECODE
            and len(self.decodes[step[0][1]].requests) == most
        ]


def read(path: Path) -> Work:
    """Read the list from a file. Raises ValueError."""
    words = array.array("I", path.read_bytes())
    if sys.byteorder == "big":
        words.byteswap()
    magic, version, block_size, num_blocks, num_requests, num_tokens, num_words = words[:7]
    if (magic, version) != (MAGIC, VERSION):
        raise ValueError(f"{path} is no list of operations")
    lengths = words[7 : 7 + 2 * num_requests]
    place = 7 + 2 * num_requests
    prompts, outputs = [], []
    for prompt_len, output_len in zip(lengths[::2], lengths[1::2], strict=True):
        prompts.append(words[place : place + prompt_len])
        outputs.append(words[place + prompt_len : place + prompt_len + output_len])
        place += prompt_len + output_len
    if len(words) != place + num_words or place != 7 + 2 * num_requests + num_tokens:
        raise ValueError(f"{path} is not as long as it says")
    steps, decodes = split(words[place:].tolist(), outputs)
    most = max(map(sum, zip(lengths[::2], lengths[1::2], strict=True)))
    return Work(block_size, num_blocks, prompts, steps, decodes, most)


def split(
    words: list[int], outputs: list[array.array[int]]
) -> tuple[list[list[Operation]], list[Decode]]:
    """Return the operations of each step, and the tokens that each decode appends."""
    steps: list[list[Operation]] = [[]]
    decodes: list[Decode] = []
    appended = [0] * len(outputs)
    place = 0
    while place < len(words):
        code = words[place]
        if code == DECODE:
            requests = words[place + 2 : place + 2 + words[place + 1]]
            if decodes and decodes[-1].requests == requests:
                requests = decodes[-1].requests
            tokens = [outputs[request][appended[request]] for request in requests]
            for request in requests:
                appended[request] += 1
            steps[-1].append((DECODE, len(decodes), 0))
            decodes.append(Decode(requests, tokens, array.array("I", tokens)))
            place += 2 + len(requests)
            continue
        if code == STEP:
            steps.append([])
        else:
            end = words[place + 2] if code == PREFILL else 0
            steps[-1].append((code, words[place + 1], end))
        place += SIZES[code]
    return steps[:-1], decodes
