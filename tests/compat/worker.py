# SPDX-License-Identifier: Apache-2.0
"""A plain request object, a model whose tokens follow from their prefix, and a worker's cache.

The worker's table of a request is written once at its admission and grows by what `allocate_slots`
returns. Each cell holds the prefix that its token ends, so a wrong block is a wrong prefix.
"""

from __future__ import annotations

import attrs

from kvcore import Config
from kvcore.types.groups import skipped_blocks, skipped_tokens

VOCABULARY = 5
Cell = tuple[int, int, int]
"""Group, block, offset."""


@attrs.define(slots=False)  # an engine may set more
class EngineRequest:
    """A request as an engine knows it, by vLLM's names."""

    request_id: str
    prompt: list[int]
    max_tokens: int = 8
    output: list[int] = attrs.field(factory=list)
    num_computed_tokens: int = 0
    spec_token_ids: list[int] = attrs.field(factory=list)
    status: str = "WAITING"

    @property
    def all_token_ids(self) -> list[int]:
        """Prompt and accepted tokens."""
        return self.prompt + self.output

    @property
    def num_tokens(self) -> int:
        """Count those tokens."""
        return len(self.prompt) + len(self.output)


def next_token(prefix: list[int]) -> int:
    """Return the token that the model samples after a prefix."""
    return hash(tuple(prefix)) % VOCABULARY


def answer(prompt: list[int], max_tokens: int) -> list[int]:
    """Return the model's answer to a prompt."""
    tokens = list(prompt)
    for _ in range(max_tokens):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]


class Worker:
    """The cache's contents and the block tables of a model runner."""

    def __init__(self, config: Config) -> None:
        self.groups = config.groups
        self.cells: dict[Cell, tuple[int, ...]] = {}
        self.tables: dict[str, list[list[int]]] = {}

    def write(
        self, request: EngineRequest, tokens: list[int], first: int, end: int, *, query: int
    ) -> None:
        """Write the keys and values of positions [first, end) of these tokens.

        Blocks that no query from this one on sees are left out.
        """
        for index, group in enumerate(self.groups):
            table = self.tables[request.request_id][index]
            kept_from = skipped_blocks(group, query) * group.block_size
            for position in range(max(first, kept_from), end):
                block = table[position // group.block_size]
                assert block != 0, f"{request.request_id} writes the null block"
                cell = (index, block, position % group.block_size)
                self.cells[cell] = tuple(tokens[: position + 1])

    def is_right(self, request: EngineRequest, tokens: list[int], first: int, end: int) -> bool:
        """Tell whether the queries at positions [first, end) see what they should."""
        return all(
            self._holds(request, tokens, index, position)
            for index, group in enumerate(self.groups)
            for position in range(skipped_tokens(group, first), end)
        )

    def num_right(self, request: EngineRequest, num_tokens: int) -> int:
        """Return the most tokens, up to this many, after which a query sees what it should."""
        tokens = request.all_token_ids
        while True:
            wrong = [
                position
                for index, group in enumerate(self.groups)
                for position in range(skipped_tokens(group, num_tokens), num_tokens)
                if not self._holds(request, tokens, index, position)
            ]
            if not wrong:
                return num_tokens
            num_tokens = min(wrong)

    def _holds(self, request: EngineRequest, tokens: list[int], index: int, position: int) -> bool:
        size = self.groups[index].block_size
        block = self.tables[request.request_id][index][position // size]
        return self.cells.get((index, block, position % size)) == tuple(tokens[: position + 1])
