# SPDX-License-Identifier: Apache-2.0
"""Worlds: how far an exploration goes, by which moves, and which names it folds together.

A world is plain data, so that the same world is explored in both languages. A move is what an
engine does at once: one call, or a few that belong together.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping
from typing import Any, Literal

import attrs
from msgspec.structs import replace
from pyrsistent import pvector

from kvcore.check.world.keyed import OWN
from kvcore.check.world.remembered import forget_times
from kvcore.state.open_batch import make_open_batch
from kvcore.state.state import RequestState, State
from kvcore.trace.calls import Call
from kvcore.types.config import Config
from kvcore.types.values import Outcome, PrefixCacheStats

BASIC_CALLS = frozenset(
    {"add_request", "allocate_slots", "append", "fork", "free", "remove_request"}
    | {"reset_prefix_cache"}
)
EXTRA_KEYS = frozenset({"lora", "media", "cache_salt", "prompt_embeds"})
Script = Generator[Call, Outcome[State, Any], None]
"""The calls of a move: each is yielded, and its outcome sent back."""


@attrs.frozen
class Symmetry:
    """The names that are renamed to fold states: those of requests, blocks and tokens."""

    requests: bool = True
    blocks: bool = True
    tokens: bool = True


@attrs.frozen
class Move:
    """Calls that an engine makes at once, in one batch, and its name for them."""

    name: str
    script: Callable[[], Script]


Moves = Callable[["World", State], Iterable[Call | Move]]


def script_of(move: Call | Move) -> Script:
    """Yield the calls of a move, or a call by itself."""
    if isinstance(move, Call):
        yield move
    else:
        yield from move.script()


def proceed(script: Script, outcome: Outcome[State, Any]) -> Call | None:
    """Return the next call of a script after the outcome of the last one; None at its end."""
    try:
        return script.send(outcome)
    except StopIteration:
        return None


def by_row(state: State) -> list[RequestState]:
    """Return the requests of a state in the order of their rows."""
    return sorted(state.requests.values(), key=lambda request: request.row)


def drained(state: State) -> State:
    """Return a state whose events, statistics and new blocks were taken."""
    return replace(
        state,
        events=pvector(),
        stats=PrefixCacheStats(),
        new_blocks=(pvector(),) * len(state.new_blocks),
    )


def closed(state: State) -> State:
    """Return a drained state whose batch was taken and is empty, and whose numbers begin anew."""
    requests = state.requests
    for name, request in state.requests.items():
        if request.output_from or request.samplers:
            requests = requests.set(name, replace(request, output_from=0, samplers=()))
    device, number = forget_times(state.device, state.batch.number)
    return replace(
        drained(state),
        device=device,
        batch=make_open_batch(number, len(state.rows)),
        requests=requests,
    )


@attrs.frozen(kw_only=True)
class Far:
    """A far tier below a world, and what goes wrong with it. A prompt then has all its tokens.

    num_slots: of the staging memory. num_tickets: most without an answer. num_faults: answers that
    are wrong or late, and entries that are lost or damaged, along one run. stored: tokens of which
    the tier has every page at first. num_epochs: weights that follow the first.
    """

    num_slots: int = 1
    num_tickets: int = 1
    num_faults: int = 1
    stored: tuple[int, ...] = ()
    num_epochs: int = 0


@attrs.frozen(kw_only=True)
class World:
    """How far an exploration goes, and by which moves.

    num_requests, num_tokens: most requests at a time, and most tokens each. num_prompt: most tokens
    of a new request. num_letters: different tokens that can follow one prefix. num_drafts: most
    drafts at a time. num_lookahead, num_external: most of these tokens per call; an
    engine's moves use all lookahead slots, and no external tokens.
    num_encoder: encoder tokens that a request brings with its first slots. num_pins: most pins at a
    time; no store begins while this many operations are in flight.
    delays: whether calls delay the caching of their blocks, or not, each in turn. marks: whether
    calls also keep the state after their tokens, where hits can end.
    num_output_placeholders: most positions to come that one call schedules; above 0, batches are
    planned before the output of the ones before them, which is handed in at any later moment.
    num_outputs: most outputs that such an engine has yet to hand in.
    forgets_overwritten: whether what a batch to come overwrites before anything reads it counts as
    unknown, and commands that lead to the same tables as equal, which folds states.
    kinds_of_requests: extra keys and flags of new requests, each in turn; with `block_hashes=()` in
    all of them, the engine hands in its own hashes by `add_block_hashes`. moves_per_batch: most
    moves between two `take_batch`. loads_fail: every load of external tokens also fails, from each
    of its tokens on. calls: names of the transitions to try. moves: "calls" tries each call by
    itself; "engine" what an engine does at once: admit, resume, decode, fork, finish, preempt,
    abort; or a function that gives the moves of a state. far: the far tier below, whose client then
    makes the stores and loads; None for none.
    """

    config: Config
    num_requests: int
    num_tokens: int
    num_prompt: int
    num_letters: int = 2
    num_drafts: int = 0
    num_lookahead: int = 0
    num_external: int = 0
    num_encoder: int = 0
    num_pins: int = 1
    num_output_placeholders: int = 0
    num_outputs: int = 2
    forgets_overwritten: bool = False
    delays: tuple[bool, ...] = (False,)
    marks: bool = False
    kinds_of_requests: tuple[Mapping[str, Any], ...] = ({},)
    moves_per_batch: int = 1
    loads_fail: bool = False
    calls: frozenset[str] = BASIC_CALLS
    moves: Literal["calls", "engine"] | Moves = "calls"
    far: Far | None = None

    def __attrs_post_init__(self) -> None:
        """Raise ValueError for hashes that a state's name does not tell apart, or that are one for
        two prefixes.
        """
        own = [each.get("block_hashes") for each in self.kinds_of_requests]
        if own not in ([None] * len(own), [()] * len(own)):
            raise ValueError("block_hashes is () in each of kinds_of_requests, or in none")
        if () not in own:
            return
        if any(EXTRA_KEYS & each.keys() for each in self.kinds_of_requests):
            raise ValueError(
                "block_hashes stand for tokens alone: kinds_of_requests has extra keys"
            )
        prefixes = sum(self.num_letters**size for size in range(1, self.num_tokens + 1))
        if prefixes > len(OWN):
            most = f"there are hashes for {len(OWN)}"
            raise ValueError(f"num_letters and num_tokens give {prefixes} prefixes: {most}")
