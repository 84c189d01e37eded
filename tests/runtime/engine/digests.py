# SPDX-License-Identifier: Apache-2.0
"""The engine over a model without tensors: a token is a digest of all that it reads from blocks.

Blocks are lists, carried through by the commands of batches alone, and each position is read by
the table of its row. A token that comes too late, in a wrong slot or from another history gives
another answer, and so does a slot that was never written.
"""

from __future__ import annotations

from array import array
from collections import defaultdict
from types import SimpleNamespace
from typing import Any
from zlib import crc32

import torch
from kvcore_runtime.cache.guard import Reads
from kvcore_runtime.cache.transfers import Finished
from kvcore_runtime.engine.batch_executor import BatchExecutor
from kvcore_runtime.engine.engine import Engine, EngineOptions
from kvcore_runtime.engine.forward import Computed, Forward, StepInputs
from kvcore_runtime.model.model import Llama
from kvcore_runtime.model.sampling import uniform

from kvcore import Batch, Config
from kvcore.types.commands import Allocate, CopyOnWrite, CutTable, SetTable, SwapIn, SwapOut

UNWRITTEN = 0xFFFFFFFF


class Memory:
    """Stands for the runtime: the blocks of both tiers as lists of tokens, and the tables."""

    def __init__(self, config: Config) -> None:
        self.sizes = [group.block_size for group in config.groups]
        self.windows = [group.window for group in config.groups]
        self.cache = SimpleNamespace(device=torch.device("cpu"))
        self.blocks: dict[int, list[int]] = {}
        self.hosts: dict[int, list[int]] = {}
        self.tables: defaultdict[tuple[int, int], list[int]] = defaultdict(list)
        self.next_number = 0

    def apply(self, batch: Batch) -> None:
        """Carry out the commands in their order."""
        assert batch.number == self.next_number
        self.next_number += 1
        blocks, hosts = self.blocks, self.hosts
        for each in batch:
            match each:
                case Allocate(block):
                    blocks[block] = [UNWRITTEN] * max(self.sizes)
                case CopyOnWrite(source, target):
                    blocks[target] = list(blocks[source])
                case SwapOut(block, host):
                    hosts[host] = list(blocks[block])
                case SwapIn(host, block):
                    blocks[block] = list(hosts[host])
                case SetTable(row, group, position, block):
                    table = self.tables[row, group]
                    table[position : position + 1] = [block]
                case CutTable(row, group, length):
                    del self.tables[row, group][length:]

    def skip(self, next_number: int) -> None:
        """Leave out batches that were cancelled."""
        self.next_number = next_number

    def take_finished(self) -> list[Finished]:
        """Return none: there are no stores and loads."""
        return []

    def write(self, row: int, position: int, token: int) -> None:
        """Put a token into its slot of each group."""
        for group, size in enumerate(self.sizes):
            block = self.tables[row, group][position // size]
            self.blocks[block][position % size] = token

    def digest(self, row: int, position: int) -> int:
        """Return a digest of the tokens that a query at a position sees in each group. Raises if
        one is missing.
        """
        value = 0
        for group, (size, window) in enumerate(zip(self.sizes, self.windows, strict=True)):
            table = self.tables[row, group]
            first = 0 if window is None else max(0, position + 1 - window)
            seen = [self.blocks[table[at // size]][at % size] for at in range(first, position + 1)]
            assert UNWRITTEN not in seen, f"row {row} reads what was never written, at {position}"
            value = crc32(array("I", seen).tobytes(), value)
        return value


class DigestForward(Forward):
    """Stands for the forward pass: writes all tokens of a step, then reads what each query sees."""

    def __init__(self, memory: Memory, num_ids: int) -> None:
        self._memory = memory
        self._num_ids = num_ids
        self._last: dict[int, int] = {}
        self._kinds = []

    def begin(self, inputs: StepInputs) -> Any:
        """See `Forward`: nothing is set up."""
        return inputs

    def compute(self, inputs: Any) -> Computed:
        """See `Forward`."""
        numbers = iter(array("q", inputs.numbers))
        tokens, to_come, rows_to_come, wanted, newest, newest_rows = (
            [next(numbers) for _ in range(size)] for size in inputs.sizes
        )
        for place, row in zip(to_come, rows_to_come, strict=True):
            tokens[place] = self._last[row]
        reads = Reads(*inputs.reads)
        at = [
            (row, position)
            for row, start, end in zip(reads.rows, reads.starts, reads.ends, strict=True)
            for position in range(start, end)
        ]
        for (row, position), token in zip(at, tokens, strict=True):
            self._memory.write(row, position, token)
        digests = [self._memory.digest(*at[place]) for place in wanted]
        sampled = [
            int(uniform(digests[index] ^ (how["seed"] if how else 0), place) * self._num_ids)
            for index, how, place in zip(*inputs.draws, strict=True)
        ]
        for place, row in zip(newest, newest_rows, strict=True):
            self._last[row] = sampled[place]
        return Computed(logits=None, tokens=sampled)


class DigestEngine(Engine):
    """The engine over such a model. model: gives limits and layers, and computes nothing."""

    def __init__(self, model: Llama, config: Config, options: EngineOptions, **others: Any) -> None:
        super().__init__(model, config, options, **others)
        memory: Any = Memory(config)
        self.runtime = memory
        self.forward = DigestForward(memory, model.config.vocab_size)
        if config.max_in_flight:
            self._executor = BatchExecutor(memory, self.forward)
