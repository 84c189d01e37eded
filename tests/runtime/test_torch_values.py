# SPDX-License-Identifier: Apache-2.0
"""Tensors of torch as arguments of the core, and batches of the core as tensors of torch."""

from __future__ import annotations

import pytest
import torch

from kvcore import Request
from kvcore.types.commands import COLUMNS
from kvcore.types.errors import EmptyTokens, InvalidToken, UnsupportedBuffer, WrongArgument
from tests.conftest import Backend
from tests.helpers.misuse import check_error
from tests.helpers.stories import make, serve, unchanged

PROMPT = [3, 1, 2, 7, 5]


def test_tensors_on_the_cpu_are_read_by_their_type(backend: Backend) -> None:
    manager = make(backend)
    for kind in (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64):
        manager.add_request(Request("a", torch.tensor(PROMPT, dtype=kind)))
        manager.add_tokens("a", torch.tensor([4, 0, 6], dtype=kind)[::2])
        assert list(manager.state().requests["a"].tokens) == [*PROMPT, 4, 6]
        manager.remove_request("a")
    manager.add_request(Request("a", torch.tensor([3, 0, 1, 0, 2, 0, 7, 0, 5])[::2]))
    assert list(manager.state().requests["a"].tokens) == PROMPT


def test_tensors_that_hold_no_tokens_are_refused(backend: Backend) -> None:
    manager = make(backend)
    for tensor, error in (
        (torch.tensor([[1, 2]]), UnsupportedBuffer(name="tokens", format="l", dimensions=2)),
        (torch.tensor([1.0]), UnsupportedBuffer(name="tokens", format="f", dimensions=1)),
        (torch.tensor(3), UnsupportedBuffer(name="tokens", format="l", dimensions=0)),
        (torch.tensor([4, -2]), InvalidToken(value=-2, position=1, least=0)),
        (torch.tensor([], dtype=torch.int32), EmptyTokens(request="b")),
    ):
        with unchanged(manager), pytest.raises(type(error)) as caught:
            manager.add_request(Request("b", tensor))
        check_error(caught.value, error)


def test_tensors_that_numpy_cannot_have_are_refused_with_the_cause(backend: Backend) -> None:
    manager = make(backend)
    serve(manager, "a", [1, 2, 3])
    manager.take_batch()
    for tensor in (
        torch.zeros(1, dtype=torch.int64, device="meta"),
        torch.ones(1, requires_grad=True),
        torch.zeros(1, dtype=torch.bfloat16),
        torch.zeros(1).to_sparse(),
    ):
        for call in (
            lambda tensor: manager.add_request(Request("b", tensor)),
            lambda tensor: manager.append(["a"], tensor),
            lambda tensor: manager.append(tensor, [4]),
        ):
            with unchanged(manager), pytest.raises(WrongArgument) as caught:
                call(tensor)
            assert caught.value.fields["value"] is tensor
            assert caught.value.__cause__ is not None


def test_a_batch_is_a_tensor_without_a_copy(backend: Backend) -> None:
    manager = make(backend)
    serve(manager, "a", [1, 2, 3])
    batch = manager.take_batch()
    rows = torch.frombuffer(batch.buffer, dtype=torch.int32).view(len(COLUMNS), -1)
    assert [row.tolist() for row in rows] == [batch.column(name).tolist() for name in COLUMNS]
    rows[0, 0] = 77
    assert batch.column(COLUMNS[0])[0] == 77
