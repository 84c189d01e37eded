# SPDX-License-Identifier: Apache-2.0
"""Random engines over real managers, whose events go over a bad network to an index."""

from __future__ import annotations

import random
from typing import Literal

from kvcore import Config, Group, KVCacheManager, Request
from kvcore.codec.event_msgpack import event_maps
from kvcore.event_index import EventIndex, EventLog, Message

SIZE = 4
RESTART = 10**6
FULL: tuple[Group, ...] = (Group(SIZE),)
HYBRID = (Group(SIZE), Group(SIZE, kind="sliding_window", window=10))


class Engine:
    """A manager of few blocks, so that it evicts, under prompts of few families."""

    def __init__(
        self, seed: int, backend: Literal["rust", "python"], groups: tuple[Group, ...] = FULL
    ) -> None:
        self.random = random.Random(seed)
        self.groups = groups
        self.manager = KVCacheManager(
            Config(num_blocks=28, groups=groups, enable_events=True, hash_seed=b"for all"),
            backend=backend,
        )
        self.running: list[str] = []
        self.count = 0

    def prompt(self) -> list[int]:
        draw = self.random.randrange
        return [draw(4)] * (SIZE * draw(1, 4)) + [draw(3) for _ in range(draw(1, 9))]

    def step(self) -> None:
        """Admit what fits, decode, and let some end; at times the prefix cache is reset."""
        manager, draw = self.manager, self.random
        for _ in range(draw.randrange(3)):
            name, tokens = f"r{self.count}", self.prompt()
            self.count += 1
            manager.add_request(Request(name, tokens, cache_salt=draw.choice((None, "tenant"))))
            hit = manager.get_computed_blocks(name)
            if manager.allocate_slots(name, len(tokens) - hit.num_tokens, hit):
                self.running.append(name)
            else:
                manager.remove_request(name)
        manager.take_batch()
        for name in self.running if draw.random() < 0.7 else ():
            manager.append([name], [draw.randrange(3)])
        manager.take_batch()
        chance = 1.0 if draw.random() < 0.02 else 0.3
        for name in [each for each in self.running if draw.random() < chance]:
            manager.free(name)
            manager.remove_request(name)
            self.running.remove(name)
        if chance == 1.0:
            manager.take_batch()
            manager.reset_prefix_cache()

    def ask(self, tokens: list[int], salt: str | None) -> tuple[list[bytes], int]:
        """Return the hashes of a prompt's full blocks, and how many of them the manager has."""
        manager = self.manager
        manager.add_request(Request("?", [*tokens, 10**6], cache_salt=salt))
        hashes = [key[:32] for key in manager.get_block_keys("?")[0]]
        found = manager.get_computed_blocks("?").num_tokens // SIZE
        manager.remove_request("?")
        return hashes, found


class Line:
    """From one engine to the index. Faults stop as soon as `heal` is called."""

    def __init__(self, name: str, engine: Engine, seed: int, **form: object) -> None:
        self.name, self.engine = name, engine
        self.random = random.Random(seed)
        self.whole = form == {"whole_hashes": True}
        self.next_first = RESTART
        self.flying: list[Message] = []
        self.log = self._new_log(1)

    def _new_log(self, first_number: int) -> EventLog:
        log = EventLog(first_number, kept_max=5)
        self.flying.append(log.begin(0.0))
        return log

    def step(self) -> None:
        """Publish one step of the engine, perhaps over a full queue, perhaps after a restart."""
        chance = self.random.random()
        if chance < 0.02:
            engine = self.engine
            self.engine = Engine(engine.random.randrange(10**6), "rust", engine.groups)
            self.log = self._new_log(self.next_first)
            self.next_first += RESTART
        self.engine.step()
        maps = event_maps(
            self.engine.manager.take_events(),
            groups=self.engine.groups,
            whole_hashes=self.whole,
        )
        if chance > 0.95:
            self.log.skip(maps)
        elif maps:
            self.flying += self.log.append(maps, 0.0)

    def deliver(self, index: EventIndex, faults: float) -> None:
        """Let what is flying arrive: some lost, some twice, some late."""
        draw = self.random.random
        late = [each for each in self.flying if draw() < faults]
        for message in [each for each in self.flying if each not in late]:
            for _ in range(2 if draw() < faults else 0 if draw() < faults else 1):
                index.apply(self.name, 0, message.number, message.payload)
        self.flying = late

    def heal(self, index: EventIndex) -> None:
        """Everything arrives, and what is missing is asked for."""
        for _ in range(3):
            for message in self.flying:
                index.apply(self.name, 0, message.number, message.payload)
            self.flying = self.log.replay(index.expected(self.name, 0), 0.0)
        assert not self.flying
