# SPDX-License-Identifier: Apache-2.0
"""What connects ranks: steps from rank 0 to all, their agreement on each, and sums of tensors.

Why: there are three groups. A follower waits for a step as long as there are no requests, so steps
have a group without a time limit; agreement has a limit, since a stopped rank must be noticed;
tensors use the fastest group there is. A rank that dies closes its sockets, which ends all waits.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

import attrs
import torch
import torch.distributed as dist
from torch import Tensor

from kvcore_runtime.ranks.errors import RankLost
from kvcore_runtime.ranks.step_wire import step_size

FIRST_BYTES = 4096
"""Bytes of the only broadcast that most steps need: its latency costs time, its size does not."""
LOOPBACK = ("127.0.0.1", "::1", "localhost")
FOREVER = timedelta(days=3650)


@attrs.define(eq=False)
class Links:
    """The groups of one rank, made by `connect`. number: of its current batch, for errors."""

    rank: int
    world: int
    steps: dist.ProcessGroup
    agreement: dist.ProcessGroup
    tensors: dist.ProcessGroup
    number: int = 0
    num_bytes: int = attrs.field(default=0, init=False)
    """Bytes of the steps that were sent or received."""

    def broadcast(self, message: bytes | None = None) -> bytes:
        """Send a step to all from rank 0, or wait for it elsewhere. Raises RankLost, BadStep."""
        buffer = bytearray(FIRST_BYTES)
        if message is not None:
            head = message[:FIRST_BYTES]
            buffer[: len(head)] = head
        with self._or_lost():
            dist.broadcast(torch.frombuffer(buffer, dtype=torch.uint8), 0, self.steps)
        received = bytes(buffer)
        size = step_size(received)
        if size > FIRST_BYTES:
            rest = bytes(size - FIRST_BYTES) if message is None else message[FIRST_BYTES:]
            tail = torch.frombuffer(bytearray(rest), dtype=torch.uint8)
            with self._or_lost():
                dist.broadcast(tail, 0, self.steps)
            received += bytes(tail.numpy())
        self.num_bytes += size
        return received[:size]

    def agree(self, *values: int) -> list[int]:
        """Return the minimum of each value over all ranks. Raises RankLost."""
        least = torch.tensor(values, dtype=torch.int64)
        with self._or_lost():
            dist.all_reduce(least, dist.ReduceOp.MIN, self.agreement)
        result: list[int] = least.tolist()
        return result

    def reduce(self, part: Tensor) -> Tensor:
        """Sum a tensor over all ranks: the `reduce` of a shard. Raises RankLost."""
        with self._or_lost():
            dist.all_reduce(part, dist.ReduceOp.SUM, self.tensors)
        return part

    def close(self) -> None:
        """Leave the groups, which ends the waits of other ranks. A second call does nothing."""
        if dist.is_initialized():
            dist.destroy_process_group()

    @contextlib.contextmanager
    def _or_lost(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            reason = str(error).strip().splitlines()[-1]
            raise RankLost(number=self.number, reason=reason) from error


def connect(
    rank: int,
    world: int,
    endpoint: str = "tcp://127.0.0.1:29500",
    *,
    tensors: str = "gloo",
    timeout_s: float = 30.0,
) -> Links:
    """Join the ranks that meet at an endpoint. Returns when all have joined.

    endpoint: of rank 0, by default on the loopback interface. tensors: the backend of the sums,
    "gloo" or "nccl". timeout_s: the time after which a rank that does not answer is lost. Raises
    RankLost.
    """
    timeout = timedelta(seconds=timeout_s)
    if urlsplit(endpoint).hostname in LOOPBACK and sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # else gloo takes the host's own address
    try:
        dist.init_process_group(
            tensors, init_method=endpoint, rank=rank, world_size=world, timeout=timeout
        )
        steps: Any = dist.new_group(timeout=FOREVER, backend="gloo")
        agreement: Any = dist.new_group(timeout=timeout, backend="gloo")
    except (RuntimeError, ValueError) as error:
        raise RankLost(number=0, reason=f"{endpoint}: {error}") from error
    whole: Any = dist.group.WORLD
    return Links(rank, world, steps, agreement, whole)
