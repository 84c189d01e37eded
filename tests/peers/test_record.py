# SPDX-License-Identifier: Apache-2.0
"""Recorded lists of operations: the same each time, whole, and never in want of a block."""

from __future__ import annotations

from array import array
from pathlib import Path

import pytest

from benches import record
from benches.peers import work
from benches.peers.work import ADD, DECODE, FINISH, PREEMPT, PREFILL, Work
from kvcore.replay.synthetic import generate


def made_list(folder: Path, *arguments: object) -> Work:
    """Return a recorded list, read back."""
    file = folder / "list.ops"
    record.main([*map(str, arguments), "--out", str(file)])
    return work.read(file)


def most_blocks(read: Work) -> int:
    """Count the most blocks that any moment of the list needs of a pool without sharing."""
    tokens = [0] * len(read.prompts)
    most = 0
    for step in read.steps:
        for code, request, end in step:
            if code == PREFILL:
                assert end > tokens[request]
                tokens[request] = end
            elif code == DECODE:
                for each in read.decodes[request].requests:
                    tokens[each] += 1
            elif code in (PREEMPT, FINISH):
                tokens[request] = 0
            most = max(most, sum(-(-count // read.block_size) for count in tokens))
    return most


@pytest.mark.parametrize("seed", range(3))
def test_a_pool_without_sharing_always_has_room(seed: int, tmp_path: Path) -> None:
    read = made_list(
        tmp_path,
        "--made",
        seed,
        "--blocks",
        40,
        "--block-size",
        4,
        "--budget",
        64,
        "--max-running",
        8,
    )
    codes = [code for step in read.steps for code, _, _ in step]
    assert most_blocks(read) <= 39
    assert codes.count(ADD) == codes.count(FINISH) == len(read.prompts)
    assert codes.count(PREEMPT) > 0


def test_each_token_is_decoded_once_and_in_order(tmp_path: Path) -> None:
    requests = record.made(7)
    read = made_list(tmp_path, "--made", 7, "--blocks", 64, "--block-size", 4)
    decoded = [array("I") for _ in requests]
    for decode in read.decodes:
        for request, token in zip(decode.requests, decode.tokens, strict=True):
            decoded[request].append(token)
    assert [prompt + output for prompt, output in zip(read.prompts, decoded, strict=True)] == [
        request.tokens for request in requests
    ]


def test_decoding_starts_when_every_prompt_is_computed(tmp_path: Path) -> None:
    read = made_list(tmp_path, "--decode", 20)
    steps = read.pure_decodes()
    assert len(steps) == record.DECODE_STEPS
    assert all(len(decode.requests) == 20 for decode in read.decodes)
    assert read.decodes[0].requests is read.decodes[-1].requests


def test_the_same_hash_id_is_the_same_tokens() -> None:
    requests = record.traced(generate("shared", 12, 1))
    again = record.traced(generate("shared", 12, 1))
    assert [request.tokens for request in requests] == [request.tokens for request in again]
    starts = [request.tokens[: record.MADE_PROMPT].tobytes() for request in requests]
    assert 1 < len(set(starts)) < len(starts)


def test_a_request_that_no_pool_holds_is_left_out(tmp_path: Path) -> None:
    few = made_list(tmp_path, "--made", 1, "--blocks", 8, "--block-size", 4)
    assert 0 < len(few.prompts) < record.MADE_REQUESTS


def test_what_is_no_list_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "no.ops"
    file.write_bytes(b"\0" * 64)
    with pytest.raises(ValueError, match="no list of operations"):
        work.read(file)
    record.main(["--made", "1", "--blocks", "64", "--block-size", "4", "--out", str(file)])
    file.write_bytes(file.read_bytes()[:-4])
    with pytest.raises(ValueError, match="not as long as it says"):
        work.read(file)
