# SPDX-License-Identifier: Apache-2.0
"""Worlds of the hunter: an engine's options, the sizes of its pool, and the moves made on it.

One generator draws the worlds of every engine. A world is plain data: it can be stored as JSON, run
again, and shrunk move by move, since no move depends on another: moves of missing requests are
skipped.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import attrs

Axes = Mapping[str, Sequence[Any]]
"""An engine's options by name; the first value is the default. `block_size` is always one."""

STEP, EPOCH, RESET = "step", "epoch", "reset"
NUM_LETTERS = 8
NUM_STEMS = 2
PRIORITIES = 3


@attrs.frozen
class Arrive:
    """A request arrives: a prompt, at most `new` new tokens, and a number of samples. tenant: its
    owner; 0 for none.
    """

    name: str
    prompt: tuple[int, ...]
    new: int
    priority: int = 0
    samples: int = 1
    tenant: int = 0


@attrs.frozen
class Abort:
    """The client of a request leaves."""

    name: str


Move = Arrive | Abort | str
"""`step`, `epoch` (the weights change) and `reset` (of the prefix cache) are plain words."""


@attrs.frozen
class HuntWorld:
    """Everything that a run depends on. num_blocks: besides those that the engine reserves."""

    axes: Mapping[str, Any]
    num_blocks: int
    token_budget: int
    max_rows: int
    moves: tuple[Move, ...] = ()

    @property
    def block_size(self) -> int:
        """Tokens per block."""
        return int(self.axes["block_size"])

    @property
    def max_tokens(self) -> int:
        """The longest request, including the answer, that fits with one block of slack."""
        return (self.num_blocks - 1) * self.block_size

    @staticmethod
    def token(position: int, sample: int = 0) -> int:
        """Return the fake model's answer: a letter that depends on the position and the sample."""
        return 1 + (position * position + 3 * position // 2 + 3 * sample) % NUM_LETTERS

    def to_json(self) -> dict[str, Any]:
        """Return the world as plain data."""
        moves = [move if isinstance(move, str) else attrs.asdict(move) for move in self.moves]
        return {**attrs.asdict(self, recurse=False), "axes": dict(self.axes), "moves": moves}


def world_from_json(data: Mapping[str, Any]) -> HuntWorld:
    """Decode a world that `HuntWorld.to_json` encoded."""
    return HuntWorld(**{**data, "moves": tuple(_move(each) for each in data["moves"])})


def _move(data: str | Mapping[str, Any]) -> Move:
    if isinstance(data, str):
        return data
    if "prompt" in data:
        return Arrive(**{**data, "prompt": tuple(data["prompt"])})
    return Abort(**data)


def playable(world: HuntWorld, known: Collection[str]) -> Iterator[Move]:
    """Yield the moves of a world that an engine supports, in the supported form.

    known: an adapter's MOVES. A request that cannot fit, or whose name is taken, is left out.
    """
    names: set[str] = set()
    for move in world.moves:
        match move:
            case Arrive():
                if move.name not in names and len(move.prompt) + move.new <= world.max_tokens:
                    names.add(move.name)
                    samples = move.samples if "samples" in known else 1
                    tenant = move.tenant if "tenants" in known else 0
                    yield attrs.evolve(move, samples=samples, tenant=tenant)
            case Abort():
                if "abort" in known:
                    yield move
            case _:
                if move == STEP or move in known:
                    yield move


class Generator:
    """Draws worlds, often near rare ones. Deterministic, given the seed and the kept worlds."""

    def __init__(self, axes: Axes, seed: int, fixed: Mapping[str, Any] | None = None) -> None:
        """fixed: values of axes that do not vary."""
        self.axes = axes
        self.fixed = dict(fixed or {})
        self.random = random.Random(seed)
        self.rare: list[HuntWorld] = []

    def next(self) -> HuntWorld:
        """Draw the next world."""
        if self.rare and self.random.random() < 0.3:
            return self._near(self.random.choice(self.rare[-16:]))
        return self._draw()

    def keep(self, world: HuntWorld) -> None:
        """Keep a world that reached rare goals; some of the next ones are drawn near it."""
        self.rare.append(world)

    def _draw(self) -> HuntWorld:
        choose = self.random.choice
        drawn = choose((0.4, 1.0))  # these options vary; the others have their defaults
        axes = {
            name: self.fixed.get(
                name, choose(values if self.random.random() < drawn else values[:1])
            )
            for name, values in self.axes.items()
        }
        size = axes["block_size"]
        low, high = choose(((3, 8), (8, 20)))
        num_blocks = self.random.randint(low, high)
        budget = choose((size, 2 * size, 3 * size + 1, 8 * size))
        world = HuntWorld(axes, num_blocks, budget, choose((2, 4, 8)))
        return attrs.evolve(world, moves=tuple(_Moves(self.random, world).draw()))

    def _near(self, world: HuntWorld) -> HuntWorld:
        """Return a world with some moves removed, doubled or redrawn, or with another size or
        option.
        """
        moves = list(world.moves)
        for _ in range(self.random.randint(1, 4)):
            place = self.random.randrange(len(moves) + 1)
            match self.random.randrange(6):
                case 0:
                    del moves[place : place + self.random.randint(1, 3)]
                case 1:
                    moves[place:place] = [STEP] * self.random.randint(1, 4)
                case 2:
                    moves[place:place] = _Moves(self.random, world).few(moves)
                case 3:
                    moves = [_changed(self.random, world, move) for move in moves]
                case 4:
                    near = self.random.choice((-1, 1)) + world.num_blocks
                    world = attrs.evolve(world, num_blocks=max(3, near))
                case _:
                    world = self._with_another_option(world)
        return attrs.evolve(world, moves=tuple(moves))

    def _with_another_option(self, world: HuntWorld) -> HuntWorld:
        """Redraw one option of the engine, or the size of its steps, but not the block size."""
        other = self._draw()
        match self.random.choice(("token_budget", "max_rows", *self.axes)):
            case "block_size":
                return world  # requests would no longer fit
            case "token_budget":
                budget = other.token_budget * world.block_size // other.block_size
                return attrs.evolve(world, token_budget=budget)
            case "max_rows":
                return attrs.evolve(world, max_rows=other.max_rows)
            case name:
                return attrs.evolve(world, axes={**world.axes, name: other.axes[name]})


def _changed(rng: random.Random, world: HuntWorld, move: Move) -> Move:
    """Change the length or priority of a request, at random."""
    if not isinstance(move, Arrive) or rng.random() < 0.7:
        return move
    longer = rng.choice((rng.randint(-2, 2), -world.block_size, world.block_size))
    length = max(1, len(move.prompt) + longer)
    more = tuple(world.token(position, 5) for position in range(len(move.prompt), length))
    return attrs.evolve(
        move,
        prompt=(move.prompt + more)[:length],
        new=max(1, move.new + rng.randint(-1, 2)),
        priority=rng.randrange(PRIORITIES),
    )


class _Moves:
    """Draws the moves of one world. Each world draws the probability of each kind of move: some
    have no aborts at all, some hardly a step between two arrivals.
    """

    def __init__(self, rng: random.Random, world: HuntWorld) -> None:
        self.random = rng
        self.world = world
        self.prompts: list[tuple[int, ...]] = []
        longest = world.max_tokens
        self.stems = [self._letters(longest) for _ in range(NUM_STEMS)]
        self.names = 0
        kinds = {
            "arrive": rng.choice((1.0, 2.0, 3.0)),
            STEP: rng.choice((2.0, 5.0, 10.0, 20.0)),
            "abort": rng.choice((0.0, 0.3, 1.0)),
            EPOCH: rng.choice((0.0, 0.0, 0.5)),
            RESET: rng.choice((0.0, 0.0, 0.5)),
        }
        self.kinds, self.weights = list(kinds), list(kinds.values())
        self.burst, self.most = rng.choice((1, 3)), rng.choice((2, 4, 100))
        self.samples = rng.choice(((1,), (1, 1, 2)))
        self.urgent = rng.random() < 0.8
        self.only_long = rng.random() < 0.4
        self.tenants = rng.choice((1, 1, 3))

    def draw(self) -> list[Move]:
        """Draw 6, 12, 25 or 50 moves, an arrival first."""
        length = self.random.choice((6, 12, 25, 50))
        moves: list[Move] = [self._arrival()]
        while len(moves) < length:
            moves += self._kind(self.random.choices(self.kinds, self.weights)[0])
        return moves

    def few(self, beside: Sequence[Move]) -> list[Move]:
        """Draw one or a few more moves for a world, with new names."""
        there = [move for move in beside if isinstance(move, Arrive)]
        numbers = [int(move.name[1:]) for move in there]
        self.names = 1 + max(numbers, default=-1)
        self.most += self.names
        self.prompts = [move.prompt for move in there]
        return self._kind(self.random.choices(self.kinds, self.weights)[0])

    def _kind(self, kind: str) -> list[Move]:
        if kind == "arrive" and self.names >= self.most:
            return [STEP]
        if kind == "arrive":
            return [self._arrival() for _ in range(self.random.randint(1, self.burst))]
        if kind == "abort":
            newest = max(0, self.names - 6)
            return [Abort(f"r{self.random.randint(newest, max(newest, self.names - 1))}")]
        return [kind]

    def _arrival(self) -> Arrive:
        name = f"r{self.names}"
        self.names += 1
        new = self.random.choice((1, 2, 3, self.world.block_size, 2 * self.world.block_size))
        new = min(new, self.world.max_tokens - 1)
        if self.prompts and self.random.random() < 0.3:
            prompt = self._again(self.world.max_tokens - new)
        else:
            prompt = self._prompt(self.world.max_tokens - new)
        self.prompts.append(prompt)
        priority = self.random.randrange(PRIORITIES) if self.urgent else 0
        samples, tenant = self.random.choice(self.samples), self.random.randrange(self.tenants)
        return Arrive(name, prompt, new, priority, samples, tenant)

    def _again(self, longest: int) -> tuple[int, ...]:
        """Repeat an earlier prompt, sometimes with its answer and a second turn."""
        prompt = self.random.choice(self.prompts)
        if self.random.random() < 0.3:
            length = len(prompt) + self.random.randint(1, self.world.block_size)
            prompt += tuple(self.world.token(place) for place in range(len(prompt), length))
            prompt += self._letters(self.random.randint(1, 3))
        return prompt[:longest]

    def _prompt(self, longest: int) -> tuple[int, ...]:
        size = self.world.block_size
        most = max(1, longest // size)
        lengths = [(1, min(2, most)), (1, most), (most, most)]
        if self.only_long:
            lengths = [(1 + most // 2, most)]
        pages = self.random.randint(*self.random.choice(lengths))
        if self.random.random() < 0.5:
            length = pages * size + self.random.choice((-1, 0, 1))
        else:
            least = pages * size - size if self.only_long else 0
            length = self.random.randint(least + 1, pages * size)
        length = max(1, min(length, longest))
        stem = self.random.choice(self.stems)
        shared = self.random.choice((0, length, self.random.randint(0, length)))
        return stem[:shared] + self._letters(length - shared)

    def _letters(self, length: int) -> tuple[int, ...]:
        return tuple(self.random.randint(1, NUM_LETTERS) for _ in range(length))
