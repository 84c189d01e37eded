# SPDX-License-Identifier: Apache-2.0
"""A store of pages in a Mooncake store: a master that knows names, and keepers that hold the pages.

A put over a name succeeds and keeps the old bytes, a find says yes for seconds after its keeper
died, and a page can vanish after a put that succeeded. A get from a stopped keeper fails after 30
to 60 s, and still writes into its slots when the keeper goes on: only a closed client does not.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator, Sequence
from ctypes import addressof, c_char
from typing import Any

from kvcore.far.errors import InvalidTier
from kvcore.far.tier import FarStatus, View
from kvcore_runtime.cache.errors import TierUnusable
from kvcore_runtime.errors import load_extra

NAMES = {"what": "pages in Mooncake", "package": "mooncake", "extra": "mooncake"}
MISSING = -704
STATUSES = {0: FarStatus.OK, -200: FarStatus.FULL, MISSING: FarStatus.MISSING}  # others: FAILED


class MooncakeStore:
    """See `BlockingStore`. Raises PackageMissing, InvalidTier, TierUnusable.

    master: host and port. host: the name by which keepers reach this process, with a port or not.
    segment_bytes: memory of this process that keeps pages of anybody. protocol: "tcp" or "rdma".
    required: whether a master that does not answer now is an error; if not, each call tries again.
    """

    def __init__(
        self,
        master: str = "127.0.0.1:50051",
        *,
        host: str = "127.0.0.1",
        segment_bytes: int = 0,
        protocol: str = "tcp",
        required: bool = True,
    ) -> None:
        if segment_bytes < 0:
            raise InvalidTier(name="segment_bytes", value=segment_bytes, expected="at least 0")
        try:
            self._library = load_extra("mooncake.store", **NAMES)
        except ImportError as error:  # of a library of the system
            raise TierUnusable(place="mooncake.store", reason=str(error)) from None
        if ":" not in host:  # the library would try 32 ports while the master does not answer
            with socket.create_server(("", 0)) as found:
                host += f":{found.getsockname()[1]}"
        self._setup = (host, "P2PHANDSHAKE", segment_bytes, 16 << 20, protocol, "", master)
        self._client: Any = None
        self._num_calls = 0
        self._is_ending = self._is_closed = False
        self._slots: list[View] = []
        self._num_registered = 0
        """Of the memories of slots, those that the client has."""
        self._changed = threading.Condition()
        try:
            self.find([], 0)
        except ConnectionError as error:
            if required:
                raise TierUnusable(place=master, reason=str(error)) from None

    def attach(self, memory: View, slot_bytes: int) -> None:
        """See `FarTier`: the slots become memory that keepers can read and write. Several engines
        may each attach theirs.
        """
        del slot_bytes
        self._slots.append(memory)

    def find(self, names: Sequence[str], lease_s: float) -> list[bool]:
        """See `BlockingStore`. Each lease is as long as the master was told, by default 10 s."""
        del lease_s
        answers = self.call("batch_is_exist", list(names))
        _check(min(answers, default=0), "the master does not answer")
        return [each == 1 for each in answers]

    def get(self, names: Sequence[str], views: Sequence[View]) -> list[int | FarStatus]:
        """See `BlockingStore`. A failure ends the client, after its other calls."""
        with self._lent() as client:
            sizes = client.batch_get_into(list(names), *places(views))
        if min(set(sizes) - {MISSING}, default=0) < 0:
            self._end(client)
        return [each if each >= 0 else STATUSES.get(each, FarStatus.FAILED) for each in sizes]

    def put(self, names: Sequence[str], views: Sequence[View]) -> list[FarStatus]:
        """See `BlockingStore`."""
        codes = self.call("batch_put_from", list(names), *places(views))
        return [STATUSES.get(each, FarStatus.FAILED) for each in codes]

    def remove(self, names: Sequence[str]) -> None:
        """See `BlockingStore`: also entries that a lease keeps."""
        self.call("batch_remove", list(names), True)

    def close(self) -> None:
        """See `BlockingStore`. A client in the middle of a call would crash: its last call closes
        it.
        """
        with self._changed:
            self._is_closed = True
            self._close_unused()

    def call(self, name: str, *arguments: object) -> Any:
        """Call a method of the library, which is set up first. Raises ConnectionError."""
        with self._lent() as client:
            return getattr(client, name)(*arguments)

    @contextlib.contextmanager
    def _lent(self) -> Iterator[Any]:
        """Lend the client for a call. Raises ConnectionError."""
        with self._changed:
            self._changed.wait_for(lambda: not self._is_ending)
            if self._client is None:
                client = self._library.MooncakeDistributedStore()
                _check(client.setup(*self._setup), "the master does not answer")
                self._client, self._num_registered, self._is_closed = client, 0, False
            client = self._client
            for address, size in zip(*places(self._slots[self._num_registered :]), strict=True):
                _check(client.register_buffer(address, size), "it takes no slots")
                self._num_registered += 1
            self._num_calls += 1
        try:
            yield client
        finally:
            with self._changed:
                self._num_calls -= 1
                self._changed.notify_all()
                if self._is_closed:
                    self._close_unused()

    def _close_unused(self) -> None:
        if self._client is not None and not self._num_calls and not self._is_ending:
            client, self._client = self._client, None
            client.close()

    def _end(self, client: Any) -> None:
        """Close a client once no call uses it, unless it is closed; the next call makes another."""
        with self._changed:
            self._changed.wait_for(lambda: not self._is_ending)
            if self._client is client:
                self._is_ending = True
                self._changed.wait_for(lambda: not self._num_calls)
                try:
                    client.close()
                finally:
                    self._client, self._is_ending = None, False
                    self._changed.notify_all()


def places(views: Sequence[View]) -> tuple[list[int], list[int]]:
    """Return the addresses of slots, and their sizes."""
    return [addressof(c_char.from_buffer(each)) for each in views], list(map(len, views))


def _check(code: int, what: str) -> None:
    if code < 0:
        raise ConnectionError(f"Mooncake: {what} (code {code})")
