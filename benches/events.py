# SPDX-License-Identifier: Apache-2.0
"""Measure what publishing events costs the engine's thread, compared with its manager.

Run: python -m benches.events. Requests of shared prompts are admitted, decoded and freed on the
Rust twin; the same work runs with and without a publisher, in turns. The time is CPU time of the
engine's thread; the publisher has a thread of its own.
"""

from __future__ import annotations

import random
import tempfile
import time
from collections import deque

from kvcore_runtime.events.publisher import EventPublisher

from kvcore import Config, KVCacheManager, Request

BLOCK_SIZE, NUM_BLOCKS, RUNNING = 16, 4_096, 64
STEPS, ROUNDS = 2_000, 5


def work(publisher: EventPublisher | None) -> tuple[float, float, int]:
    """Run the engine. Returns seconds in the manager and in `publish`, and the events published."""
    draw = random.Random(0)
    manager = KVCacheManager(
        Config(num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, enable_events=True)
    )
    prefixes = [[draw.randrange(10**5) for _ in range(256)] for _ in range(8)]
    running: deque[str] = deque()
    in_manager = in_publish = 0.0
    count = 0
    for step in range(STEPS):
        own = [draw.randrange(10**5) for _ in range(128)]
        prompt = draw.choice(prefixes) + own
        tokens = [draw.randrange(10**5) for _ in range(len(running))]
        began = time.thread_time()
        manager.append(list(running), tokens)
        if len(running) == RUNNING:
            ended = running.popleft()
            manager.take_batch()
            manager.free(ended)
            manager.remove_request(ended)
        manager.add_request(Request(str(step), prompt))
        hit = manager.get_computed_blocks(str(step))
        if manager.allocate_slots(str(step), len(prompt) - hit.num_tokens, hit):
            running.append(str(step))
        manager.take_batch()
        in_manager += time.thread_time() - began
        if publisher is not None:
            began = time.thread_time()
            count += publisher.publish(manager)
            in_publish += time.thread_time() - began
        elif step % 100 == 99:
            manager.take_events()
    return in_manager, in_publish, count


def main() -> None:
    """Print the ratio of the best rounds."""
    managers, publishes = [], []
    for _ in range(ROUNDS):
        managers.append(work(None)[0])
        with tempfile.TemporaryDirectory() as folder:
            ends = (f"ipc://{folder}/events", f"ipc://{folder}/replay")
            with EventPublisher(*ends) as publisher:
                _, seconds, count = work(publisher)
                publishes.append(seconds)
    manager, publish = min(managers), min(publishes)
    print(f"manager      {1e6 * manager / STEPS:8.2f} us per step")
    print(f"publish      {1e6 * publish / STEPS:8.2f} us per step, {count / STEPS:.1f} events")
    print(f"publish / manager   {publish / manager:.3f}")


if __name__ == "__main__":
    main()
