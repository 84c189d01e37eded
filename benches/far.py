# SPDX-License-Identifier: Apache-2.0
"""Compare a far tier's page transfers to Redis with the client library alone; needs redis-server.

Run: python -m benches.far. Batches of 32 pages, put and got in turns; the figure is the median of
the ratios of neighbours. The library alone sends the same bytes and does nothing with the answer.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from collections.abc import Callable

from kvcore_runtime.errors import load_extra
from kvcore_runtime.far.redis_store import RedisStore
from kvcore_runtime.far.threaded import ThreadedTier

from kvcore.far.page import PAYLOAD_START, PageOwner, begin_page, seal_page
from kvcore.far.tier import FarStatus
from kvcore.types.keys import make_key

PORT = 16_379
NUM_PAGES = 32
NUM_ROUNDS = 15
SIZES = (64 << 10, 2 << 20)
PLACE = PageOwner(bytes(range(32)))


def timed(call: Callable[[], object]) -> float:
    """Return the seconds of a call."""
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def wait(tier: ThreadedTier, ticket: int | None) -> None:
    """Wait until a ticket has ended, and check that all its names are OK."""
    assert ticket is not None
    while not (done := tier.poll()):
        time.sleep(0.0001)
    assert set(done[0].statuses) == {FarStatus.OK}


def measure(size: int) -> tuple[float, float, float]:
    """Return the ratios of put and get (library time over tier time), and MB per second of gets."""
    library = load_extra("redis", what="pages in Redis", package="redis", extra="redis")
    client = library.Redis(port=PORT)
    tier = ThreadedTier(RedisStore(f"redis://127.0.0.1:{PORT}/0", timeout_s=30))
    keys = [make_key(number.to_bytes(32, "little"), 0) for number in range(NUM_PAGES)]
    names = [PLACE.name(key) for key in keys]
    pages = [memoryview(bytearray(PAYLOAD_START + size)) for _ in keys]
    slots = [memoryview(bytearray(PAYLOAD_START + size)) for _ in keys]
    for page, key in zip(pages, keys, strict=True):
        begin_page(page, PLACE.identity, key)
        seal_page(page)

    def put() -> None:
        with client.pipeline(transaction=False) as pipeline:
            for name, page in zip(names, pages, strict=True):
                pipeline.set(name, page, nx=True)
            pipeline.execute()

    puts, gets, rate = [], [], []
    for _ in range(NUM_ROUNDS):
        client.flushall()
        alone = timed(put)
        client.flushall()
        puts.append(alone / timed(lambda: wait(tier, tier.submit_store(names, pages))))
        alone = timed(lambda: client.mget(names))
        got = timed(lambda: wait(tier, tier.submit_load(names, slots)))
        gets.append(alone / got)
        rate.append(NUM_PAGES * size / got / 1e6)
    tier.close(5)
    return statistics.median(puts), statistics.median(gets), statistics.median(rate)


def main() -> None:
    """Start a server, measure, print."""
    command = f"redis-server --port {PORT} --bind 127.0.0.1 --appendonly no --save"
    server = subprocess.Popen([*command.split(), ""], stdout=subprocess.DEVNULL)
    try:
        time.sleep(1)
        print("the library's time over the tier's, batches of 32 pages")
        for size in SIZES:
            put, get, rate = measure(size)
            print(f"{size >> 10:6,} KiB  put {put:.2f}  get {get:.2f}  {rate:,.0f} MB/s got")
    except FileNotFoundError:
        sys.exit("benches.far needs redis-server")
    finally:
        server.kill()
        server.wait()


if __name__ == "__main__":
    main()
