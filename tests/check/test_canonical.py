# SPDX-License-Identifier: Apache-2.0
"""EQUIVARIANCE: names do not matter, which is what allows states to be folded by them.

A run and the same run with other names for requests, blocks and tokens must stay each other's
image: equal canonical names, equal values, and the same commands with the blocks renamed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from kvcore import Hit, KVCacheBlocks, Request
from kvcore.check.names.canonical import canonical
from kvcore.check.search.moves import moves
from kvcore.check.search.search import check
from kvcore.check.world.world import Symmetry, World
from kvcore.oracle.prefixes import Prefixes
from kvcore.pool.block_pool import make_pool
from kvcore.state.open_batch import make_open_batch
from kvcore.state.state import State, make_state
from kvcore.trace.calls import Call, perform
from kvcore.types.commands import Command, Evict
from tests.check.worlds import world

WORLDS = [
    world(3, 2, 4, "truncate", "evict_blocks"),
    world(3, 2, 3, "swap_out", "swap_in", num_host_blocks=2),
]
NAMES = {"0": "one", "1": "zero", "2": "two"}


class Renaming:
    """Other names: requests by a table, blocks by a permutation, tokens by flips below prefixes."""

    def __init__(self, blocks: Sequence[int], flips: Sequence[bool]) -> None:
        self.blocks = blocks
        self._flips = flips

    def tokens(self, tokens: Sequence[int]) -> list[int]:
        """Exchange each token for the other letter or not, depending on its whole prefix."""
        renamed = []
        for position, token in enumerate(tokens):
            prefix = sum(2**at * (1 + value) for at, value in enumerate(tokens[:position]))
            renamed.append(token ^ self._flips[prefix % len(self._flips)])
        return renamed

    def call(self, state: State, call: Call) -> Call:
        """Return the renamed call. state: the one that the call is made on."""
        first: Any = call.args[0] if call.args else None
        match call.name:
            case "add_request":
                renamed = Request(NAMES[first.request_id], self.tokens(first.tokens))
                return Call(call.name, (renamed,))
            case "append":
                before = list(state.requests[first[0]].tokens)
                token = self.tokens([*before, call.args[1][0]])[-1]
                return Call(call.name, ([NAMES[first[0]]], [token]))
            case "swap_out" | "swap_in":
                return Call(call.name, ([NAMES[name] for name in first],))
            case "evict_blocks":
                return Call(call.name, ([self.blocks[block] for block in first],))
            case _:
                return Call(call.name, tuple(self.value(each) for each in call.args))

    def value(self, value: Any) -> Any:
        """Return the renamed value of a call."""
        match value:
            case str():
                return NAMES.get(value, value)
            case KVCacheBlocks(groups):
                return KVCacheBlocks(tuple(tuple(self.blocks[b] for b in each) for each in groups))
            case Hit(blocks, num_tokens):
                return Hit(self.value(blocks), num_tokens)
            case _:
                return value

    def commands(self, commands: Sequence[Command]) -> list[Command]:
        """Return the renamed commands without keys, since hashes are names of tokens."""
        return [self._command(command) for command in commands]

    def _command(self, command: Command) -> Command:
        changes: dict[str, Any] = {
            name: self.blocks[getattr(command, name)]
            for name in ("block", "source", "target")
            if hasattr(command, name)
        }
        return without_key(replace(command, **changes))


def without_key(command: Command) -> Command:
    """Return a command with its key blanked."""
    return Evict(command.block, b"") if isinstance(command, Evict) else command


def closed(state: State) -> State:
    """Return the state with an empty open batch."""
    return replace(state, batch=make_open_batch(0, len(state.rows)))


@given(
    st.sampled_from(WORLDS),
    st.permutations(range(3)),
    st.lists(st.booleans(), min_size=16, max_size=16),
    st.lists(st.integers(0, 10_000), max_size=25),
)
def test_renamed_run_is_the_image_of_the_run(
    where: World, blocks: list[int], flips: list[bool], choices: list[int]
) -> None:
    renaming = Renaming(blocks, flips)
    state, image = make_state(where.config), make_state(where.config)
    image = replace(image, device=make_pool(3, order=blocks))
    prefixes, image_prefixes = Prefixes(where.config), Prefixes(where.config)
    for choice in choices:
        found = moves(where, state, prefixes)
        possible = [each for each in found if isinstance(each, Call)]
        call = possible[choice % len(possible)]
        outcome, other = perform(state, call), perform(image, renaming.call(state, call))
        assert other.value == renaming.value(outcome.value)
        assert [without_key(each) for each in other.commands] == renaming.commands(outcome.commands)
        state, image = closed(outcome.state), closed(other.state)
        prefixes.learn(state)
        image_prefixes.learn(image)
        assert canonical(image, image_prefixes) == canonical(state, prefixes)


@pytest.mark.parametrize("off", ["requests", "blocks", "tokens"])
def test_each_renaming_can_be_switched_off_and_folds_states(off: str) -> None:
    where = world(2, 2, 1, moves="engine", without=("fork", "reset_prefix_cache"))
    folded = check(where)
    less = check(where, symmetry=attrs.evolve(Symmetry(), **{off: False}))
    none = check(where, symmetry=Symmetry(requests=False, blocks=False, tokens=False))
    assert (folded.verdict, less.verdict, none.verdict) == ("complete",) * 3
    assert folded.num_states < less.num_states < none.num_states


def test_whole_names_count_as_many_states_as_fingerprints() -> None:
    where = world(2, 2, 2)
    short, full = check(where), check(where, full_keys=True)
    assert (short.num_states, short.num_edges) == (full.num_states, full.num_edges)
    assert (short.keys, full.keys) == ("fingerprints of 128 bits", "full keys")


def test_several_processes_count_as_one() -> None:
    where = world(2, 2, 3, moves="engine")
    alone, together = check(where), check(where, workers=2)
    assert together.depths == alone.depths
    assert together.num_edges == alone.num_edges
    assert together.of_kind("move") == alone.of_kind("move")
