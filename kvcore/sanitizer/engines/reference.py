# SPDX-License-Identifier: Apache-2.0
"""The adapter for kvcore itself: its manager and `kvcore.scheduler`, followed by commands alone."""

from array import array
from typing import Any, ClassVar

from kvcore.manager import KVCacheManager
from kvcore.oracle.content_oracle import set_entry
from kvcore.sanitizer.chunks import CacheGroup, Chunk
from kvcore.sanitizer.hunter.adapter import EngineAdapter
from kvcore.sanitizer.hunter.driven import Driven
from kvcore.sanitizer.hunter.kit import BatchReporter
from kvcore.scheduler import Scheduler
from kvcore.types.commands import CopyOnWrite, CutTable, SetTable, SwapIn, SwapOut
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

    @property
    def can_decode(self) -> bool:
        return self.has_new_token

    def tokens(self, start: int, end: int) -> Any:
        return array("I", self.all_tokens[start:end])

    def give(self) -> None:
        self.has_new_token = False

    def drop_output(self) -> None:
        """Do nothing: no output is pending."""


class Batches(Scheduler[Sequence]):
    """The scheduler in a loop, with a limit on running requests.

    follow: called with each batch and its chunks, before the answers are known.
    """

    def __init__(self, manager: KVCacheManager, world: Any) -> None:
        swaps = manager.config.num_host_blocks > 0
        super().__init__(manager, token_budget=world.token_budget, swaps=swaps)
        self.manager, self.max_rows = manager, world.max_rows
        self.follow: Any = lambda *_: None
        self.arrived: Any = lambda _: None
        self.leaves: Any = lambda _: None

    def _may_admit(self) -> bool:
        return len(self.running) < self.max_rows and self._budget > 0

    def step(self, token: Any) -> None:
        chunks = self.schedule()
        batch = self.manager.take_batch()
        self.follow(batch, chunks)
        for each in chunks:
            sequence = each.sequence
            if each.num_wanted:
                sequence.all_tokens.append(token(sequence.num_tokens))
                sequence.has_new_token = True
                if sequence.num_tokens == sequence.ends:
                    self.leave(sequence)

    def leave(self, sequence: Sequence) -> None:
        """Remove a finished or aborted request."""
        for queue in (self.running, self.waiting, self.swapped):
            if sequence in queue:
                queue.remove(sequence)
        self.manager.free(sequence.sequence_id)
        self.manager.remove_request(sequence.sequence_id)
        self.leaves(sequence.sequence_id)


class Engine(Driven):
    """The scheduler in its loop, with letters instead of the model's answers."""

    def __init__(self, world: Any) -> None:
        axes = world.axes
        groups = [Group(world.block_size)]
        if axes["window"]:
            groups.append(Group(world.block_size, kind="sliding_window", window=axes["window"]))
        self.num_blocks = world.num_blocks * len(groups) + 1
        manager = KVCacheManager(
            Config(
                self.num_blocks,
                groups=tuple(groups),
                num_host_blocks=axes["num_host_blocks"],
                duplicates=axes["duplicates"],
                eviction=axes["eviction"],
                publish=axes["publish"],
                hash_seed=b"sanitize",
            )
        )
        self.world, self.target = world, Batches(manager, world)
        self.sequences: dict[str, Sequence] = {}

    def arrive(self, arrival: Any) -> None:
        made = Sequence(arrival.name, arrival.prompt, arrival.new, self.target.manager)
        self.sequences[arrival.name] = made
        self.target.waiting.append(made)
        self.target.arrived(made)

    def step(self) -> None:
        self.target.step(self.world.token)

    def abort(self, name: str) -> None:
        self.target.leave(self.sequences.pop(name))

    def reset(self) -> None:
        self.target.manager.reset_prefix_cache()

    def finish_batches(self) -> None:
        self.step()

    @property
    def live(self) -> list[str]:
        target = self.target
        queues = (*target.running, *target.waiting, *target.swapped)
        return [each.sequence_id for each in queues]

    def free(self) -> int:
        return int(self.target.manager.num_free_blocks)

    def total(self) -> int:
        return int(self.num_blocks) - 1


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
        return [
            CacheGroup(block_size=each.block_size, window=each.window, num_null=1)
            for each in engine.target.manager.config.groups
        ]

    @staticmethod
    def attach(target: Any, sanitizer: Any) -> None:
        """Follow the commands of each batch; tables are reported as they are after it."""
        it, tables = BatchReporter(sanitizer), dict[tuple[int, int], tuple[int, ...]]()
        rows: dict[int, str] = {}
        groups = range(len(sanitizer.groups))

        def arrived(sequence: Sequence) -> None:
            rows[sequence.row] = sequence.sequence_id
            tables.update({(sequence.row, group_id): () for group_id in groups})
            it.begin(sequence.sequence_id, sequence.all_tokens)

        def followed(batch: Any, chunks: Any) -> None:
            changed = set[int]()
            for command in batch:
                match command:
                    case CopyOnWrite(source, copy):
                        sanitizer.copy([(source, copy)])
                    case SwapOut(block, host_block):
                        sanitizer.copy([(block, host_block)], target="host")
                    case SwapIn(host_block, block):
                        sanitizer.copy([(host_block, block)], source="host")
                    case SetTable() | CutTable():
                        set_entry(tables, command)
                        changed.add(command.row)
            for row in changed:
                if rows[row] in it.tables:
                    it.show(rows[row], *(tables[row, group_id] for group_id in groups))
            if chunks:
                it.ran([Chunk(c.sequence.sequence_id, c.start, c.end - c.start) for c in chunks])

        target.follow, target.arrived, target.leaves = followed, arrived, it.end
