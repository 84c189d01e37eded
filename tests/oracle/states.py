# SPDX-License-Identifier: Apache-2.0
"""A smaller engine for recurrent states and hits inside blocks.

Source: docs/engines.md, "Recurrent states" and "Hits inside blocks". What can be found is stated
from the outside: when a batch is taken, whole blocks, parts that end at multiples of the hash unit,
and kept states are added under their keys; `Evict` takes them away; nothing else does. So a hit has
one right length. A state is the tokens before it: a copy carries it, a forward pass replaces it.
"""

from __future__ import annotations

import hashlib
import math
from collections import defaultdict
from collections.abc import Callable, Iterator
from random import Random
from typing import Any

import attrs

from kvcore import (
    Allocate,
    Command,
    Config,
    CopyOnWrite,
    Evict,
    EvictAll,
    Free,
    Group,
    Hit,
    KvcoreError,
    Refused,
    Request,
    SwapIn,
    SwapOut,
    Zero,
)
from kvcore.types.errors import HeldByOthers, HitInOpenBatch
from tests.oracle.backends import Language, Manager
from tests.oracle.finding import Finding, demand
from tests.oracle.router import first_seen

NUM_MOVES, REQUESTS_MAX, TOKENS_MAX = 60, 4, 14
STATE = -1
"""The place of a state in its block; others are those of slots."""
Tokens = tuple[int, ...]
Place = tuple[str, int]


@attrs.define
class Known:
    """A request. count: computed tokens. base: those before the open batch, hits included; None
    outside of it. found: whether its first call there took a hit. marked: whether its last call
    keeps the state.
    """

    name: str
    tokens: Tokens
    count: int = 0
    base: int | None = None
    found: bool = False
    marked: bool = False
    swapped: bool = False


def draw_config(rng: Random) -> Config:
    """Return a configuration with states, hits inside blocks, or both.

    Which parts of a copied block get keys is left open with `publish="completed"`.
    """
    sizes, unit = (rng.choice((2, 4)), rng.choice((2, 4))), rng.choice((None, 1, 1, 2))
    groups = [Group(sizes[0])]
    if rng.random() < 0.3:
        groups.append(Group(sizes[1], kind="sliding_window", window=rng.randint(1, 6)))
    kept = [Group(rng.choice((2, 4, 8)), kind="state") for _ in range(rng.choice((0, 1, 1, 1, 2)))]
    sizes_of_all = [group.block_size for group in groups + kept]
    partial = unit is not None and unit < math.gcd(*sizes_of_all)
    return Config(
        num_blocks=rng.randint(4, 9) + len(groups) * 3 + len(kept) * 4,
        groups=tuple(groups + kept),
        hash_block_size=unit,
        num_host_blocks=rng.choice((0, 10)),
        eviction=rng.choice(("lru", "uncached_first")),
        publish="scheduled" if partial else rng.choice(("scheduled", "completed")),
        enable_events=rng.random() < 0.5,
        hash_seed=b"oracle",
    )


class StatesEngine:
    """A manager, the contents of its blocks, and what can be found in them."""

    def __init__(self, seed: int, languages: tuple[Language, ...]) -> None:
        self.rng = Random(seed)
        self.config = draw_config(self.rng)
        self.manager = Manager(self.config, languages)
        self.known: dict[str, Known] = {}
        self.held: defaultdict[Place, dict[int, tuple[int, Tokens]]] = defaultdict(dict)
        self.found: dict[tuple[bytes, int], tuple[int, Tokens]] = {}
        self.num_named = 0
        self.unit = self.config.hash_block_size
        sizes = [group.block_size for group in self.config.groups]
        attention = [group.block_size for group in self.config.groups if group.kind != "state"]
        self.partial = self.unit < math.gcd(*sizes)
        self.step = self.unit if self.partial else math.lcm(*attention)

    def call(self, name: str, *args: Any, **options: Any) -> Any:
        """Make a call that may be refused because others hold or hit the blocks."""
        try:
            return self.manager.call(name, *args, **options)
        except (HitInOpenBatch, HeldByOthers) as error:
            return error
        except KvcoreError as error:
            raise Finding(f"{name}{args!r} {options!r}: {error!r}") from error

    def key(self, tokens: Tokens, at: int) -> bytes:
        """Return the key after these tokens in a group: of the hash that requests bring along."""
        return hashlib.sha256(repr(tokens).encode()).digest() + at.to_bytes(4, "big")

    def pick(self, fits: Callable[[Known], bool]) -> Known | None:
        """Return one of the requests that fit."""
        able = [each for each in self.known.values() if fits(each)]
        return self.rng.choice(able) if able else None

    def add(self) -> None:
        """Add a request, most often with tokens that others have."""
        if len(self.known) < REQUESTS_MAX:
            self.num_named += 1
            others = [each.tokens for each in self.known.values()] + [(0,) * 9, (0, 0, 1) * 3]
            prefix = self.rng.choice(others)[: self.rng.randint(1, 10)]
            more = tuple(self.rng.randrange(2) for _ in range(self.rng.randint(0, 3)))
            tokens, name = (prefix + more)[:TOKENS_MAX], f"r{self.num_named}"
            ends = range(self.unit, len(tokens) + 1, self.unit)
            hashes = [self.key(tokens[:end], 0)[:32] for end in ends]
            self.call("add_request", Request(name, list(tokens), block_hashes=hashes))
            self.known[name] = Known(name, tokens)

    def grow(self) -> None:
        """Schedule tokens of a request, after its hit if it has no blocks."""
        request = self.pick(lambda each: not each.swapped and each.count < len(each.tokens))
        if request is None:
            return
        hit: Hit | None = None
        if not request.count and self.rng.random() < 0.8:
            hit = self.manager.call("get_computed_blocks", request.name)
        first = request.count + (hit.num_tokens if hit else 0)
        new = self.rng.randint(1, len(request.tokens) - first)
        marked, has_states = False, any(group.kind == "state" for group in self.config.groups)
        if self.rng.random() < 0.3:
            new, marked = self.call("checkpoint_stop", request.name, new, hit)
        elif has_states and (first + new) % self.step == 0:
            marked = self.rng.random() < 0.5
        got = self.call("allocate_slots", request.name, new, hit, checkpoint=marked)
        if isinstance(got, Refused):
            demand(got.needed > got.available, f"{got!r} with enough blocks")
            self.free()
            return
        if request.base is None:
            request.base, request.found = first, bool(hit and hit.num_tokens)
        request.count, request.marked = first + new, marked

    def fork(self) -> None:
        """Fork a request."""
        parent = self.pick(lambda each: not each.swapped)
        if parent is not None and len(self.known) < REQUESTS_MAX:
            self.num_named += 1
            child = Known(f"r{self.num_named}", parent.tokens)
            self.call("fork", parent.name, child.name)
            self.known[child.name] = child
            child.count = self.fallen(child, parent)

    def fallen(self, request: Known, was: Known) -> int:
        """Return the count of a request behind a call that others' steps do not outlive: that
        before the step, or 0.
        """
        count: int = self.manager.ask("num_computed_tokens", request.name)
        right = (was.count,) if was.base is None else (0, was.base if not was.found else 0)
        demand(count in right, f"{request.name} counts {count} tokens, not one of {right}")
        return count

    def free(self) -> None:
        """Free a request; perhaps remove it."""
        request = self.pick(lambda each: each.name in self.known)
        if request is None or self.call("free", request.name) is not None:
            return
        request.count, request.base, request.swapped = 0, None, False
        if self.rng.random() < 0.5:
            self.call("remove_request", request.name)
            del self.known[request.name]

    def truncate(self) -> None:
        """Cut a request: a count that is cut falls to 0."""
        request = self.pick(lambda each: not each.swapped)
        if request is None:
            return
        keep = self.rng.randint(1, len(request.tokens))
        if self.call("truncate", request.name, keep) is None:
            has_states = any(group.kind == "state" for group in self.config.groups)
            if request.base is None and has_states and keep < request.count:
                request.count = 0
            elif not has_states:
                request.count = self.manager.ask("num_computed_tokens", request.name)
                demand(request.count <= keep, f"{request.name} counts more than it keeps")
            else:
                request.count = self.fallen(request, request)
                demand(request.count <= keep, f"{request.name} counts more than it keeps")
            request.tokens, request.base = request.tokens[:keep], None

    def swap(self) -> None:
        """Swap a request out, or in."""
        request = self.pick(lambda each: each.count > 0)
        if request is None or not self.config.num_host_blocks:
            return
        said = self.call("swap_in" if request.swapped else "swap_out", [request.name])
        if not isinstance(said, Refused | KvcoreError):
            if not request.swapped:
                request.count = self.fallen(request, request)
            request.swapped, request.base = not request.swapped and request.count > 0, None

    def take(self) -> None:
        """Take the batch, execute it, add what can be found now, and check all hits."""
        running = [each for each in self.known.values() if each.base is not None]
        tables = {each.name: self.manager.ask("get_block_ids", each.name) for each in running}
        for command in self.call("take_batch"):
            self.execute(command)
        passes = (self.write, self.read, self.keep)  # all writes of a layer are before its reads
        for each in passes:
            for request in running:
                for at in range(len(self.config.groups)):
                    each(request, at, tables[request.name][at])
        for request in running:
            request.base, request.marked, request.found = None, False, False
        for (key, block), (at, tokens) in self.found.items():
            self.check_kept(at, tokens, block, key)
        for request in self.known.values():
            self.check_hit(request)

    def execute(self, command: Command) -> None:
        """Follow what a command does to contents, and to what can be found."""
        match command:
            case Evict(block=block, key=key):
                self.found.pop((key, block), None)
            case EvictAll():
                self.found.clear()
            case Allocate(block=block):
                kept = [key for key, of in self.found if of == block]
                demand(not kept, f"{command}, whose content can be found")
                self.held["device", block] = {}
            case Free(block=block, cached=False):
                self.held["device", block] = {}
            case Zero(block=block):
                self.held["device", block] = {STATE: (-1, ())}
            case CopyOnWrite(source=source, target=target):
                self.held["device", target] = dict(self.held["device", source])
            case SwapOut(block=block, host_block=host):
                self.held["host", host] = dict(self.held["device", block])
            case SwapIn(host_block=host, block=block):
                self.held["device", block] = dict(self.held["host", host])

    def write(self, request: Known, at: int, table: list[int]) -> None:
        """Fill the slots of a step; or replace the state before it by the one after it."""
        assert request.base is not None
        size, tokens = self.config.groups[at].block_size, request.tokens
        if self.config.groups[at].kind == "state":
            block = table[(request.count - 1) // size]
            want = (at, tokens[: request.base]) if request.base else (-1, ())
            is_there = self.held["device", block].get(STATE)
            demand(is_there == want, f"{request.name}: block {block} has {is_there}, not {want}")
            self.held["device", block] = {STATE: (at, tokens[: request.count])}
            return
        for place in range(request.base, request.count):
            self.held["device", table[place // size]][place % size] = at, tokens[: place + 1]

    def read(self, request: Known, at: int, table: list[int]) -> None:
        """Read what the queries of a step see."""
        group, tokens = self.config.groups[at], request.tokens
        if group.kind != "state":
            assert request.base is not None
            for place in range(first_seen(group, request.base), request.count):
                slots = self.held["device", table[place // group.block_size]]
                right = slots.get(place % group.block_size) == (at, tokens[: place + 1])
                demand(right, f"{request.name}, group {at} reads token {place}, which is not there")

    def keep(self, request: Known, at: int, table: list[int]) -> None:
        """Add what a step makes findable: whole blocks and parts, or its last state."""
        assert request.base is not None
        size, tokens, end = self.config.groups[at].block_size, request.tokens, request.count
        if self.config.groups[at].kind == "state":
            if end % size == 0 or request.marked:
                self.found[self.key(tokens[:end], at), table[(end - 1) // size]] = at, tokens[:end]
            return
        copied = size if request.found else self.unit  # the copy of a hit has keys of its own
        for stop in range(request.base // copied * copied + self.unit, end + 1, self.unit):
            if self.partial or stop % size == 0:
                block = table[(stop - 1) // size]
                self.found[self.key(tokens[:stop], at), block] = at, tokens[:stop]

    def check_kept(self, at: int, tokens: Tokens, block: int, key: bytes) -> None:
        """Demand that a block that can be found holds what its key says."""
        size, held = self.config.groups[at].block_size, self.held["device", block]
        wrong = f"block {block} of group {at} has another content than its key {key.hex()}"
        if self.config.groups[at].kind == "state":
            demand(held.get(STATE) == (at, tokens), wrong)
            return
        for place in range((len(tokens) - 1) // size * size, len(tokens)):
            demand(held.get(place % size) == (at, tokens[: place + 1]), wrong)

    def check_hit(self, request: Known) -> None:
        """Compare a request's hit with the longest one that its groups can go on from."""
        if request.count or request.swapped:
            return
        hit: Hit = self.call("get_computed_blocks", request.name)
        want = next(self.lengths(request.tokens), 0)
        wrong = f"{request.name} hits {hit.num_tokens} tokens, and could hit {want}"
        demand(hit.num_tokens == want, wrong)

    def lengths(self, tokens: Tokens) -> Iterator[int]:
        """Yield the lengths at which a request can go on, the longest first."""
        there = {key for key, _ in self.found}
        for length in range((len(tokens) - 1) // self.step * self.step, 0, -self.step):
            ends: list[tuple[int, int]] = []
            for at, group in enumerate(self.config.groups):
                ends.append((at, length))
                if group.kind != "state":
                    size = group.block_size
                    first = min(first_seen(group, length), length - 1) // size
                    ends += [(at, (p + 1) * size) for p in range(first, length // size)]
            if all(self.key(tokens[:end], at) in there for at, end in ends):
                yield length


MOVES = {
    StatesEngine.add: 5,
    StatesEngine.grow: 14,
    StatesEngine.take: 9,
    StatesEngine.free: 4,
    StatesEngine.fork: 2,
    StatesEngine.truncate: 1,
    StatesEngine.swap: 2,
}


def run(seed: int, languages: tuple[Language, ...]) -> tuple[StatesEngine, str | None]:
    """Make the run of a seed; return its engine, and the finding if there is one."""
    engine = StatesEngine(seed, languages)
    moves = engine.rng.choices(list(MOVES), list(MOVES.values()), k=NUM_MOVES)
    try:
        for move in moves:
            move(engine)
    except Finding as finding:
        return engine, f"seed {seed}: {finding}"
    return engine, None
