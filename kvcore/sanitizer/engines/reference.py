# SPDX-License-Identifier: Apache-2.0
"""The adapter for kvcore itself: its manager and `kvcore.scheduler`, followed by commands alone."""

from array import array
from typing import Any, ClassVar

from kvcore.manager import KVCacheManager
from kvcore.oracle.content_oracle import Pass
from kvcore.sanitizer.chunks import CacheGroup
from kvcore.sanitizer.engines.kvcore import Observer, groups_of
from kvcore.sanitizer.hunter.adapter import EngineAdapter
from kvcore.sanitizer.hunter.driven import Driven
from kvcore.sanitizer.hunter.kit import around
from kvcore.scheduler import Scheduler
from kvcore.types.config import Config
from kvcore.types.groups import Group
from kvcore.types.values import Request


class Sequence:
    """A request as the scheduler sees it."""

    has_new_token, sampled_by, num_to_come = False, None, 0

    def __init__(self, name: str, prompt: Any, new: int, manager: KVCacheManager) -> None:
        self.sequence_id, self.all_tokens, self.ends = name, list(prompt), len(prompt) + new
        self.row = manager.add_request(Request(name, self.all_tokens))

    @property
    def num_tokens(self) -> int:
        return len(self.all_tokens)

    @property
    def newest(self) -> int:
        return int(self.all_tokens[-1])

    def tokens(self, start: int, end: int) -> Any:
        return array("I", self.all_tokens[start:end])

    def give(self) -> None:
        self.has_new_token = False

    def drop_output(self) -> None:
        """Do nothing: no output is pending."""


class Engine(Driven, Scheduler[Any]):
    """The scheduler in a loop, with letters instead of the model's answers."""

    def __init__(self, world: Any) -> None:
        options = dict(world.axes)
        size, window = options.pop("block_size"), options.pop("window")
        groups = [Group(size)]
        if window:
            groups.append(Group(size, kind="sliding_window", window=window))
        self.num_blocks = world.num_blocks * len(groups) + 1
        self.config = Config(
            self.num_blocks, groups=tuple(groups), hash_seed=b"sanitize", **options
        )
        self.manager = KVCacheManager(self.config)
        swaps = self.config.num_host_blocks > 0
        super().__init__(self.manager, token_budget=world.token_budget, swaps=swaps)
        self.world, self.target = world, self
        self.sequences: dict[str, Sequence] = {}

    def arrive(self, arrival: Any) -> None:
        sequence = Sequence(arrival.name, arrival.prompt, arrival.new, self.manager)
        self.sequences[arrival.name] = sequence
        self.waiting.append(sequence)

    def _may_admit(self) -> bool:
        return len(self.running) < self.world.max_rows and self._budget > 0

    def step(self) -> None:
        chunks = self.schedule()
        self.update(self.manager.take_batch(), chunks)

    def update(self, batch: Any, chunks: Any) -> None:
        """Give each sequence whose tokens a batch has computed its next one."""
        del batch
        for each in chunks:
            sequence = each.sequence
            if each.num_wanted:
                sequence.all_tokens.append(self.world.token(sequence.num_tokens))
                sequence.has_new_token = True
                if sequence.num_tokens == sequence.ends:
                    self.leave(sequence.sequence_id)

    def leave(self, name: str) -> None:
        """Remove a finished or aborted request."""
        sequence = self.sequences.pop(name)
        for queue in (self.running, self.waiting, self.swapped):
            if sequence in queue:
                queue.remove(sequence)
        self.manager.free(name)
        self.manager.remove_request(name)

    def abort(self, name: str) -> None:
        self.leave(name)

    def reset(self) -> None:
        self.manager.reset_prefix_cache()

    @property
    def live(self) -> list[str]:
        return list(self.sequences)

    def free(self) -> int:
        return int(self.manager.num_free_blocks)


class Adapter(EngineAdapter):
    NAME = "kvcore"
    AXES: ClassVar[dict[str, tuple[Any, ...]]] = {
        "block_size": (4, 2, 8),
        "num_host_blocks": (0, 6),
        "duplicates": ("keep", "merge"),
        "eviction": ("lru", "uncached_first"),
        "publish": ("scheduled", "completed"),
        "window": (None, 6),
    }
    MOVES = frozenset({"abort", "reset"})
    Engine = Engine

    @staticmethod
    def version() -> str:
        return "this one"

    @staticmethod
    def groups(engine: Any) -> list[CacheGroup]:
        return groups_of(engine.config)

    @staticmethod
    def attach(target: Any, sanitizer: Any) -> None:
        """Follow the commands of each batch."""
        it = Observer(target.config, sanitizer)

        @around(target, "update")
        def updated(inner: Any, batch: Any, chunks: Any) -> None:
            it.apply(batch)
            it.follow(
                [
                    Pass(
                        request_id=each.sequence.sequence_id,
                        row=each.sequence.row,
                        start=each.start,
                        end=each.end,
                        nodes=each.sequence.all_tokens,
                    )
                    for each in chunks
                ]
            )
            inner(batch, chunks)

        @around(target, "leave")
        def left(inner: Any, name: str) -> None:
            inner(name)
            it.end(name)
