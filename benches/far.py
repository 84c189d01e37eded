# SPDX-License-Identifier: Apache-2.0
"""Compare a far tier's page transfers with the client library alone: Redis, or Mooncake.

Run: python -m benches.far [--mooncake]. Needs redis-server, or Mooncake's package. Batches of 32
pages, put and got in turns, each first in every third round; the figure is the median of the ratios
of neighbours. One batch at a time shows what a request waits for; several at once show throughput:
the library does one after the other, and the tier has them in its queue, as an engine that fetches
a long prompt or several. The library alone sends the same bytes, and its pages get into the same
slots: those of Redis are copied, Mooncake's client writes them there. The tier hands each batch to
a thread, since an engine must not wait, and checks each page. So the library is measured on a
thread, too, the time of checking is printed, and a second ratio compares the CPU time of this
process. Threads and connections are made anew several times: the system keeps a thread on a core,
which may be the server's.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from statistics import median
from typing import Any, Protocol

import attrs
from kvcore_runtime.demos.processes import make_store, mooncake_store, page_store
from kvcore_runtime.errors import KvcoreRuntimeError, load_extra
from kvcore_runtime.far.exchange import WAIT_S
from kvcore_runtime.far.mooncake_store import MooncakeStore, places
from kvcore_runtime.far.threaded import ThreadedTier

from kvcore.far.page import PAYLOAD_START, PageOwner, begin_page, check_pages, seal_page
from kvcore.far.tier import FarStatus
from kvcore.types.keys import make_key

NUM_PAGES = 32
NUM_CONNECTIONS = 5
NUM_ROUNDS = {64 << 10: 40, 2 << 20: 8}
"""By bytes of a page: with each connection, of one batch; of several at once it is half as many."""
NUM_AT_ONCE = {64 << 10: 4, 2 << 20: 2}
FREED_BYTES = 16 << 20
"""Once so much was freed, the C library keeps what is freed: the library's answers are not new
memory of the system each time, which would slow it down.
"""
PLACE = PageOwner(bytes(range(32)))


class Library(Protocol):
    """A client library without kvcore."""

    def put(self, names: Sequence[str], pages: Sequence[memoryview]) -> None:
        """Store pages."""

    def get(self, names: Sequence[str], slots: Sequence[memoryview]) -> None:
        """Read pages into slots."""

    def clear(self) -> None:
        """Remove all pages."""


class Redis:
    """The client library of Redis."""

    def __init__(self, place: str) -> None:
        redis = load_extra("redis", what="pages in Redis", package="redis", extra="redis")
        self._client: Any = redis.Redis.from_url(place)

    def put(self, names: Sequence[str], pages: Sequence[memoryview]) -> None:
        """See `Library`."""
        with self._client.pipeline(transaction=False) as pipeline:
            for name, page in zip(names, pages, strict=True):
                pipeline.set(name, page, nx=True)
            pipeline.execute()

    def get(self, names: Sequence[str], slots: Sequence[memoryview]) -> None:
        """See `Library`; each answer is new bytes."""
        for slot, answer in zip(slots, self._client.mget(names), strict=True):
            slot[:] = answer

    def clear(self) -> None:
        """See `Library`."""
        self._client.flushall()


class Mooncake:
    """The client library of Mooncake, which reads into the slots by itself.

    It is that of a store, since the system may keep the threads of two clients on other cores.
    """

    def __init__(self, store: MooncakeStore) -> None:
        self._call = store.call

    def put(self, names: Sequence[str], pages: Sequence[memoryview]) -> None:
        """See `Library`."""
        assert not any(self._call("batch_put_from", names, *places(pages)))

    def get(self, names: Sequence[str], slots: Sequence[memoryview]) -> None:
        """See `Library`."""
        assert min(self._call("batch_get_into", names, *places(slots))) > 0

    def clear(self) -> None:
        """See `Library`."""
        self._call("remove_by_regex", ".*", True)


@attrs.frozen
class Seconds:
    """What a call took: by the clock, and of CPU time of this process."""

    wall: float
    cpu: float


def timed(call: Callable[[], object]) -> Seconds:
    """Return the seconds of a call."""
    started, used = time.perf_counter(), time.process_time()
    call()
    return Seconds(time.perf_counter() - started, time.process_time() - used)


def wait(tier: ThreadedTier, tickets: Sequence[int | None]) -> None:
    """Wait as an engine does until the tickets have ended; check that all their names are OK."""
    left = set(tickets)
    while left:
        tier.wait(WAIT_S)
        for done in tier.poll():
            assert set(done.statuses) == {FarStatus.OK}
            left.remove(done.ticket)


@attrs.define
class Turns:
    """The seconds of the library, of the library on a thread of its own, and of the tier."""

    rounds: list[list[Seconds]] = attrs.field(factory=list)

    def run(self, calls: Sequence[Callable[[], object]], before: Callable[[], None]) -> None:
        """Time one more round of calls, of which another one is first each time."""
        seconds: dict[int, Seconds] = {}
        for at in range(len(calls)):
            which = (at + len(self.rounds)) % len(calls)
            before()
            seconds[which] = timed(calls[which])
        self.rounds.append([seconds[which] for which in range(len(calls))])

    def __str__(self) -> str:
        alone = median(each[0].wall / each[2].wall for each in self.rounds)
        threaded = median(each[1].wall / each[2].wall for each in self.rounds)
        cpu = sum(each[0].cpu for each in self.rounds) / sum(each[2].cpu for each in self.rounds)
        return f"{alone:.2f} ({threaded:.2f}), CPU {cpu:.2f}"


@attrs.frozen
class Batch:
    """The names of a batch, its pages, and the slots into which they come back."""

    names: list[str]
    pages: list[memoryview]
    slots: list[memoryview]


def make_batches(memory: memoryview, stride: int) -> list[Batch]:
    """Make sealed pages, and slots for them, of a memory."""
    views = [memory[at : at + stride] for at in range(0, len(memory), stride)]
    num_pages = len(views) // 2
    keys = [make_key(number.to_bytes(32, "little"), 0) for number in range(num_pages)]
    for page, key in zip(views, keys, strict=False):
        begin_page(page, PLACE.identity, key)
        seal_page(page)
    names = [PLACE.name(key) for key in keys]
    parts = [slice(at, at + NUM_PAGES) for at in range(0, num_pages, NUM_PAGES)]
    return [Batch(names[at], views[:num_pages][at], views[num_pages:][at]) for at in parts]


def transfer(
    place: str, memory: memoryview, size: int, puts: Turns, gets: Turns, checks: list[float]
) -> None:
    """Put and get pages of a size in turns, over new connections and threads."""
    stride = PAYLOAD_START + size
    batches = make_batches(memory, stride)
    store = make_store(place)
    library: Library = Mooncake(store) if isinstance(store, MooncakeStore) else Redis(place)
    tier = ThreadedTier(store)
    tier.attach(memory, stride)

    def put() -> None:
        for each in batches:
            library.put(each.names, each.pages)

    def get() -> None:
        for each in batches:
            library.get(each.names, each.slots)

    def check() -> None:
        for each in batches:
            check_pages(each.names, each.slots, [stride] * NUM_PAGES, lambda _: None)

    def put_by_tier() -> None:
        wait(tier, [tier.submit_store(each.names, each.pages) for each in batches])

    def get_by_tier() -> None:
        wait(tier, [tier.submit_load(each.names, each.slots) for each in batches])

    with ThreadPoolExecutor(1) as thread:
        for _ in range(max(1, NUM_ROUNDS[size] // (1 if len(batches) == 1 else 2))):
            puts.run((put, lambda: thread.submit(put).result(), put_by_tier), library.clear)
            gets.run((get, lambda: thread.submit(get).result(), get_by_tier), lambda: None)
            checks.append(timed(check).wall / gets.rounds[-1][2].wall)
    tier.close(5)


def measure(place: str, size: int, num_batches: int) -> str:
    """Return the ratios of put and get (library time over tier time), and MB per second of gets."""
    num_pages = num_batches * NUM_PAGES
    bytearray(FREED_BYTES)
    memory = memoryview(bytearray(2 * num_pages * (PAYLOAD_START + size)))
    puts, gets = Turns(), Turns()
    checks: list[float] = []
    for _ in range(NUM_CONNECTIONS):
        transfer(place, memory, size, puts, gets, checks)
    rate = num_pages * size / median(each[2].wall for each in gets.rounds) / 1e6
    return f"put {puts}  get {gets}  checks {median(checks):.0%} of get  {rate:,.0f} MB/s got"


@contextlib.contextmanager
def server(*, mooncake: bool) -> Iterator[str]:
    """Start a server; provide its place. Exits if there is no redis-server."""
    with mooncake_store() if mooncake else page_store() as place:
        if "://" not in place:
            sys.exit("benches.far needs redis-server")
        yield place


def main() -> None:
    """Start a server, measure, print."""
    parser = argparse.ArgumentParser(prog="benches.far", description=__doc__)
    parser.add_argument("--mooncake", action="store_true", help="Mooncake instead of Redis")
    try:
        with server(mooncake=parser.parse_args().mooncake) as place:
            print("the library's time over the tier's (on a thread, too), batches of 32 pages")
            for size, num_at_once in NUM_AT_ONCE.items():
                for count in (1, num_at_once):
                    print(f"{size >> 10:6,} KiB, {count} at once  {measure(place, size, count)}")
    except KvcoreRuntimeError as error:
        sys.exit(f"benches.far: {error}")


if __name__ == "__main__":
    main()
