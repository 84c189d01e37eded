# SPDX-License-Identifier: Apache-2.0
"""A socket that gives what a test says, in the pieces that it says."""

from __future__ import annotations

from collections.abc import Sequence


class Pieces:
    """A socket from which each call reads no more than the rest of one piece."""

    def __init__(self, pieces: Sequence[bytes]) -> None:
        self._pieces = list(pieces)

    def recv(self, size: int) -> bytes:
        if not self._pieces:
            return b""
        piece = self._pieces.pop(0)
        if piece[size:]:
            self._pieces.insert(0, piece[size:])
        return piece[:size]

    def recvmsg_into(self, buffers: Sequence[memoryview | bytearray]) -> tuple[int, None]:
        read = self.recv(sum(map(len, buffers)))
        start = 0
        for each in buffers:
            part = read[start : start + len(each)]
            each[: len(part)] = part
            start += len(part)
        return len(read), None
