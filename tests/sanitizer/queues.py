# SPDX-License-Identifier: Apache-2.0
"""Random queues of observations of a manager that is often wrong, to be played more than once.

Blocks are given at random: free ones, ones that another request fills with the same prefix, any.
Chunks begin where a request's tables end, or earlier, or too late. Steps complete late, out of
order, or are cancelled. Tokens stay unknown, drafts are rejected, weights change, requests fork,
tables are edited, and KV comes from elsewhere.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import attrs

from kvcore.sanitizer import CacheGroup, Chunk, Finding, Sanitizer, SlotChunk

Observation = tuple[str, tuple[Any, ...]]
LETTERS = 2
TIERS = ("device", "device", "host")


@attrs.define
class LiveRequest:
    """A request as the generator knows it."""

    tokens: list[int]
    tables: list[list[int]]
    computed: int = 0


@attrs.define
class Queue:
    """A generator of observations.

    numbers: decide all. fault: how often the manager errs. late: all tokens are known when a step
    is issued, and no step is cancelled. most_live: requests at a time.
    """

    numbers: random.Random
    groups: Sequence[CacheGroup]
    num_blocks: int
    fault: float
    late: bool = False
    most_live: int = 3
    moves: list[Observation] = attrs.field(factory=list)
    live: dict[str, LiveRequest] = attrs.field(factory=dict)
    pending: list[int] = attrs.field(factory=list)
    num_begun: int = 0
    num_steps: int = 0

    def make(self, length: int) -> list[Observation]:
        """This many moves, each one or more observations."""
        weights = {
            self.begin: 3,
            self.leave: 1,
            self.preempt: 1,
            self.step: 8,
            self.columns: 3,
            self.transfer: 1,
            self.complete: 3,
            self.edit: 0.7,
            self.epoch: 0.3,
        }
        for _ in range(length):
            self.numbers.choices(list(weights), list(weights.values()))[0]()
        for step in sorted(self.pending):
            self.say("complete", step)
        return self.moves

    def say(self, what: str, *arguments: Any) -> None:
        """Append an observation."""
        self.moves.append((what, arguments))

    def wrong(self) -> bool:
        """Decide whether the manager errs here."""
        return self.numbers.random() < self.fault

    def begin(self) -> None:
        """Begin a request with few letters, or a fork."""
        if len(self.live) >= self.most_live:
            return
        dice, name = self.numbers, f"r{self.num_begun}"
        self.num_begun += 1
        parent = dice.choice(list(self.live)) if self.live and dice.random() < 0.2 else None
        tokens = [dice.randrange(LETTERS) for _ in range(dice.randint(1, 6))]
        if parent is not None:
            tokens = list(self.live[parent].tokens)
        salt = dice.choice([None, None, None, "other"])
        self.say("begin", name, tokens, (None, salt), parent)
        self.live[name] = LiveRequest(tokens, [[] for _ in self.groups])

    def leave(self) -> None:
        """End a request."""
        if self.live:
            name = self.numbers.choice(list(self.live))
            self.say("end", name)
            del self.live[name]

    def preempt(self) -> None:
        """Preempt a request, which gives up its tables."""
        if self.live:
            name = self.numbers.choice(list(self.live))
            self.say("drop", name)
            requested = self.live[name]
            requested.tables, requested.computed = [[] for _ in self.groups], 0
            if self.numbers.random() < 0.5:
                self.say("renew", name)

    def edit(self) -> None:
        """Replace a block of a table, cut a table, or bring tokens from elsewhere."""
        dice = self.numbers
        asked_of = {name: requested for name, requested in self.live.items() if requested.tables[0]}
        if not asked_of:
            return
        name, requested = dice.choice(list(asked_of.items()))
        what, group_id = dice.choice(["replace", "cut", "load"]), dice.randrange(len(self.groups))
        table, size = requested.tables[group_id], self.groups[group_id].block_size
        at = dice.randrange(len(table) + (what == "cut")) if table else 0
        if what == "replace" and table:
            table[at] = self.block(group_id)
            self.say("extend", name, group_id, [table[at]], at)
            self.say("load", name, at * size, max(0, min(size, len(requested.tokens) - at * size)))
        elif what == "cut":
            del table[at:]
            self.say("cut", name, group_id, at)
            requested.computed = min(requested.computed, at * size)
        else:
            self.extend(name, requested, len(requested.tokens))
            count = max(0, len(requested.tokens) - requested.computed)
            self.say("load", name, requested.computed, count)
            requested.computed = max(0, requested.computed + count - self.wrong())

    def step(self) -> None:
        """Give some requests blocks and a chunk."""
        dice = self.numbers
        chunks: list[Chunk | SlotChunk] = []
        for name, requested in self.live.items():
            if (chunk := self.chunk(name, requested)) is not None:
                self.extend(name, requested, chunk.start + chunk.num_tokens)
                chunks += self.chunks(requested, chunk)
        self.say("issue", self.num_steps, chunks)
        self.pending.append(self.num_steps)
        self.num_steps += 1
        if dice.random() < 0.6:
            self.complete()
        self.sample()

    def columns(self) -> None:
        """Make a step by columns, with the blocks, and complete it at once."""
        chunks: list[Chunk] = []
        tables: dict[int, list[list[int]]] = {}
        for name, requested in self.live.items():
            if (chunk := self.chunk(name, requested)) is not None:
                blocks = self.blocks(requested, chunk.start + chunk.num_tokens)
                if any(blocks):
                    tables[len(chunks)] = blocks
                chunks.append(chunk)
        drafts = {at: chunk.drafts for at, chunk in enumerate(chunks) if chunk.drafts}
        names, starts = [chunk.name for chunk in chunks], [chunk.start for chunk in chunks]
        counts = [chunk.num_tokens for chunk in chunks]
        self.say("step", self.num_steps, names, starts, counts, drafts, tables)
        self.num_steps += 1
        self.sample()

    def chunk(self, name: str, requested: LiveRequest) -> Chunk | None:
        """Return what is computed of a request next, if anything."""
        dice = self.numbers
        if dice.random() < 0.3 or len(requested.tokens) <= requested.computed:
            return None
        if requested.computed == 0 and not requested.tables[0]:
            requested.computed = self.hit(name, requested)
        room = len(requested.tokens) - requested.computed
        count, start = dice.randint(1, max(1, room)), requested.computed
        if self.wrong():
            start = max(0, start + dice.choice([-2, -1] if self.late else [-2, -1, 1]))
        drafts = [dice.randrange(-1, LETTERS) for _ in range(dice.choice([0, 0, 0, 1, 2]))]
        drafts = drafts if start + count == len(requested.tokens) else []
        requested.computed = start + count
        return Chunk(name, start, count + len(drafts), drafts)

    def sample(self) -> None:
        """Append one token to most requests whose tokens are all computed."""
        for name, requested in self.live.items():
            if requested.computed >= len(requested.tokens) and self.numbers.random() < 0.8:
                self.say("grow", name, self.numbers.randrange(LETTERS))
                requested.tokens = [*requested.tokens, self.moves[-1][1][1]]

    def chunks(self, requested: LiveRequest, chunk: Chunk) -> list[Chunk | SlotChunk]:
        """Return a chunk of all groups, or the slots of each."""
        name, start, count = chunk.name, chunk.start, chunk.num_tokens
        if chunk.drafts or self.numbers.random() < 0.8:
            return [chunk]
        chunks: list[Chunk | SlotChunk] = []
        for group_id, group in enumerate(self.groups):
            table, size = requested.tables[group_id], group.block_size
            end = start if group.ring else start + count
            first = group.first(start)
            slots = [
                table[at // size % len(table) if group.ring else at // size] * size + at % size
                for at in range(max(end, start + count))
            ]
            writes, reads = slots[start : start + count], slots[first:end]
            if self.wrong():
                reads = reads[1:]
            chunks.append(SlotChunk(name, group_id, start, count, writes, reads))
        return chunks

    def extend(self, name: str, requested: LiveRequest, end: int) -> None:
        """Append blocks for all positions before an end, each group's by itself."""
        for group_id, blocks in enumerate(self.blocks(requested, end)):
            if blocks:
                self.say("extend", name, group_id, blocks)

    def blocks(self, requested: LiveRequest, end: int) -> list[list[int]]:
        """Put blocks for all positions before an end into each table; a ring gets all at once."""
        new = []
        for group_id, group in enumerate(self.groups):
            table = requested.tables[group_id]
            missing = -(-end // group.block_size) - len(table)
            if group.ring:
                missing = 0 if table else 3
            new.append([self.block(group_id) for _ in range(missing)])
            table += new[-1]
        return new

    def block(self, group_id: int) -> int:
        """Return an unused block; now and then any."""
        group = self.groups[group_id]
        taken = {
            block
            for requested in self.live.values()
            for other, table in zip(self.groups, requested.tables, strict=True)
            if other.pool == group.pool
            for block in table
        }
        first = group.num_null * (not self.wrong())
        free = [block for block in range(first, self.num_blocks) if block not in taken]
        if free and not self.wrong():
            return self.numbers.choice(free)
        return self.numbers.randrange(first, self.num_blocks)

    def hit(self, name: str, requested: LiveRequest) -> int:
        """Take over the full blocks of a request with the same prefix; how many tokens that is."""
        for other in self.live.values():
            common = 0
            for mine, theirs in zip(requested.tokens, other.tokens, strict=False):
                if mine != theirs:
                    break
                common += 1
            sizes = [group.block_size for group in self.groups if not group.ring]
            if other is requested or len(sizes) < len(self.groups) or self.numbers.random() < 0.3:
                continue
            most = min(common, other.computed, len(requested.tokens) - 1)
            most = most // max(sizes) * max(sizes)
            if self.wrong():
                most += max(sizes)
            for group_id, size in enumerate(sizes):
                blocks = other.tables[group_id][: most // size]
                requested.tables[group_id] += blocks
                self.say("extend", name, group_id, blocks)
            return min(most, len(requested.tokens) - 1)
        return 0

    def complete(self) -> None:
        """Complete a step, not always the oldest; or drop it."""
        if self.pending:
            at = 0 if self.numbers.random() < 0.8 else self.numbers.randrange(len(self.pending))
            is_lost = not self.late and self.wrong() and self.wrong()
            what = "cancel" if is_lost else "complete"
            self.say(what, self.pending.pop(at))

    def transfer(self) -> None:
        """Copy, move, zero or lose blocks; seldom, since they can belong to any request."""
        if not self.wrong():
            return
        dice, group_id = self.numbers, self.numbers.randrange(len(self.groups))
        blocks = [dice.randrange(self.num_blocks) for _ in range(2)]
        what = dice.choice(["copy", "copy", "move", "zero", "fail"])
        if what in ("zero", "fail"):
            self.say(what, blocks[:1], group_id)
        else:
            self.say(what, [tuple(blocks)], group_id, dice.choice(TIERS), dice.choice(TIERS))

    def epoch(self) -> None:
        """Change the weights."""
        self.say("epoch")


def play(moves: Sequence[Observation], sanitizer: Sanitizer) -> list[list[Finding]]:
    """Return the findings of each completed step."""
    tokens: dict[str, list[int]] = {}
    found = []
    for what, arguments in moves:
        match what:
            case "begin":
                name, given, namespace, parent = arguments
                tokens[name] = list(given)
                sanitizer.begin(name, tokens[name], namespace, parent)
            case "grow":
                tokens[arguments[0]].append(arguments[1])
            case "complete" | "cancel" | "step":
                found.append(getattr(sanitizer, what)(*arguments))
            case _:
                getattr(sanitizer, what)(*arguments)
    return found
