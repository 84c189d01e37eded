# SPDX-License-Identifier: Apache-2.0
"""What connects ranks: steps from rank 0 to all, their reports on each, and sums of tensors.

Why: a follower waits for a step without a time limit, since there may be no requests; every other
wait has one, since a stopped rank must be noticed. A rank that dies closes its sockets, which ends
all waits. Steps and reports are messages between rank 0 and each other rank: only rank 0 acts on a
report, and a broadcast and a reduction of gloo take longer (benches/ranks.py). Tensors have a group
of their own, the fastest there is.
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
"""Bytes of the only message that most steps need: its latency costs time, its size does not."""
NO_TICKET = -1
LOOPBACK = ("127.0.0.1", "::1", "localhost")
FOREVER = timedelta(days=3650)


@attrs.define(eq=False)
class Links:
    """The groups of one rank, made by `connect`. number: of its current batch. lost: why nothing
    can be sent any more.
    """

    rank: int
    world: int
    control: dist.ProcessGroup
    tensors: dist.ProcessGroup
    timeout: timedelta
    number: int = 0
    lost: RankLost | None = None
    ended: dict[int, list[int]] = attrs.field(factory=dict, init=False)
    """On rank 0: the reports on each ticket of a far tier."""
    _awaited: list[tuple[dist.Work, Tensor]] = attrs.field(factory=list, init=False)
    """The reports that were not waited for yet, or this rank's last one until it has gone."""
    _sent: list[tuple[dist.Work, Tensor]] = attrs.field(factory=list, init=False)
    """The messages that the others may not have yet."""
    _reports: list[Tensor] = attrs.field(factory=list, init=False)
    """Memory of reports that were read, for the next ones: to allocate it anew takes 30 us."""
    num_bytes: int = attrs.field(default=0, init=False)
    """Bytes of the steps that were sent or received."""

    def broadcast(self, message: bytes | None = None) -> bytes:
        """Send a step to all from rank 0, or wait for it elsewhere. Raises RankLost, BadStep.

        Rank 0 waits until the others have it in `collect`: they may still compute the last one.
        """
        if message is None:
            return self._receive()
        with self._or_lost():
            # The others begin while this rank makes ready for their reports, which then come even
            # while it computes.
            self._send(message[:FIRST_BYTES].ljust(FIRST_BYTES, b"\0"))
            reports = self._reports or [torch.empty(3, dtype=torch.int64) for _ in self._others]
            self._reports = []
            self._awaited = [
                (_work(dist.irecv(report, rank, self.control)), report)
                for rank, report in zip(self._others, reports, strict=True)
            ]
            if len(message) > FIRST_BYTES:
                self._send(message[FIRST_BYTES:])
        self.num_bytes += len(message)
        return message

    def _receive(self) -> bytes:
        """Wait for a step, for as long as there is none. Raises RankLost, BadStep."""
        received, size = b"", FIRST_BYTES
        while len(received) < size:
            part = torch.empty(size - len(received), dtype=torch.uint8)
            with self._or_lost():
                _work(dist.irecv(part, 0, self.control)).wait(FOREVER)
            received += bytes(part.numpy())
            size = max(step_size(received), FIRST_BYTES)
        size = step_size(received)
        self.num_bytes += size
        return received[:size]

    def report(self, status: int, ticket: int = NO_TICKET, num_pages: int = 0) -> None:
        """Tell rank 0 that a step was applied, or failed. Raises RankLost.

        status: the batch's number, or minus this rank. ticket: of the far tier, if one has ended
        here; num_pages: of its pages, how many are right before the first that is not.
        """
        self.finish_report()
        report = torch.tensor((status, ticket, num_pages))
        with self._or_lost():
            self._awaited = [(_work(dist.isend(report, 0, self.control)), report)]

    def collect(self) -> int:
        """Wait, on rank 0, for the report of each other rank. Returns the least status.

        Raises RankLost.
        """
        least = self.number
        self._finish_sends()
        awaited, self._awaited = self._awaited, []
        for work, report in awaited:
            with self._or_lost():
                work.wait(self.timeout)
            status, ticket, num_pages = report.tolist()
            least = min(least, status)
            if ticket != NO_TICKET:
                self.ended.setdefault(ticket, []).append(num_pages)
        self._reports = [report for _, report in awaited]
        return least

    @property
    def _others(self) -> range:
        return range(1, self.world)

    def _send(self, part: bytes) -> None:
        """Begin to send a part of a step to all others, once they have the one before."""
        self._finish_sends()
        data = torch.frombuffer(bytearray(part), dtype=torch.uint8)
        self._sent = [(_work(dist.isend(data, rank, self.control)), data) for rank in self._others]

    def _finish_sends(self) -> None:
        sent, self._sent = self._sent, []
        for work, _ in sent:
            with self._or_lost():
                work.wait(self.timeout)

    def finish_report(self) -> None:
        """Wait until rank 0 has this rank's last report. Raises RankLost."""
        awaited, self._awaited = self._awaited, []
        for work, _ in awaited:
            with self._or_lost():
                work.wait(self.timeout)

    def gather(self, data: bytes) -> list[bytes]:
        """Exchange as many bytes with each rank. Returns those of all. Raises RankLost."""
        own = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        every = [torch.empty_like(own) for _ in range(self.world)]
        with self._or_lost():
            dist.all_gather(every, own, self.control)
        return [bytes(each.numpy()) for each in every]

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
        if self.lost is not None:
            raise self.lost
        try:
            yield
        except RuntimeError as error:
            reason = str(error).strip().splitlines()[-1]
            self.lost = RankLost(number=self.number, reason=reason)
            raise self.lost from error


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
        control: Any = dist.new_group(timeout=timeout, backend="gloo")
    except (RuntimeError, ValueError) as error:
        raise RankLost(number=0, reason=f"{endpoint}: {error}") from error
    whole: Any = dist.group.WORLD
    return Links(rank, world, control, whole, timeout)


def _work(started: dist.Work | None) -> dist.Work:
    assert started is not None, "this rank is in the group"
    return started
