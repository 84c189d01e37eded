# SPDX-License-Identifier: Apache-2.0
"""The small worlds that are explored to their end."""

from __future__ import annotations

from typing import Any

from kvcore import Config, Group, KvcoreError, _twin
from kvcore.calls import Call, Misuse
from kvcore.check.actions import BASIC_CALLS, World
from kvcore.encode import encode
from kvcore.state import State
from kvcore.values import Outcome

SEED = b"explored"
FULL = Group(2)
WINDOW = Group(2, kind="sliding_window", window=2)
CHUNKS = Group(2, kind="chunked_local", window=2)
LOAD_DEFAULTS: dict[str, Any] = {"full_sequence_must_fit": False, "reserved_blocks": 0}
DEFAULTS: dict[str, dict[str, Any]] = {
    "load": LOAD_DEFAULTS,
    "allocate_slots": {
        "num_lookahead_tokens": 0,
        "num_external_computed_tokens": 0,
        "delay_cache_blocks": False,
        "num_encoder_tokens": 0,
        **LOAD_DEFAULTS,
    },
}
OF_WORLD = frozenset(
    {"num_letters", "num_drafts", "num_lookahead", "num_external", "num_encoder"}
    | {"delays", "kinds_of_requests", "calls_per_batch", "loads_fail"}
)


def world(
    num_blocks: int,
    num_requests: int,
    num_tokens: int,
    *more: str,
    num_prompt: int | None = None,
    without: tuple[str, ...] = (),
    **options: Any,
) -> World:
    """A world of so many usable blocks, of 2 tokens unless groups say otherwise.

    There is a null block where a group needs one, or where it is asked for. more, without: calls
    that are tried besides the basic ones, or left out of them. options: of the world or its config.
    """
    of_world = {name: options.pop(name) for name in OF_WORLD & set(options)}
    windowed = any(group.is_windowed for group in options.get("groups", ()))
    null_block = options.setdefault("null_block", windowed)
    options.setdefault("groups", (FULL,))
    return World(
        config=Config(num_blocks + null_block, hash_seed=SEED, **options),
        num_requests=num_requests,
        num_tokens=num_tokens,
        num_prompt=num_prompt or num_tokens,
        calls=BASIC_CALLS.union(more).difference(without),
        **of_world,
    )


class Parity:
    """Makes each call on the compiled twin, too: from the same bytes to the same everything.

    The bytes hold the open batch with its commands, the events and the statistics.
    """

    def __init__(self, world: World) -> None:
        self.num_calls = 0
        self._twin = _twin.make_backend(world.config)
        self._start: tuple[State, bytes] | None = None
        self._reached: State | None = None

    def __call__(self, state: State, call: Call, outcome: Outcome[State, Any]) -> None:
        self.num_calls += 1
        if self._reached is not state:
            self._twin.restore(self._bytes(state))
        value = self._make(call)
        expected = encode(outcome.state)
        assert value == outcome.value, f"{call}: Rust {value!r}, Python {outcome.value!r}"
        assert self._twin.encode() == expected, f"{call}: the states differ"
        self._reached = outcome.state

    def _bytes(self, state: State) -> bytes:
        if self._start is None or self._start[0] is not state:
            self._start = (state, encode(state))
        return self._start[1]

    def _make(self, call: Call) -> Any:
        args, options = call.args, call.options
        if call.name in DEFAULTS:
            args = (*args, None)[:3]
            options = DEFAULTS[call.name] | options
        try:
            return getattr(self._twin, call.name)(*args, **options)
        except KvcoreError as error:
            return Misuse(type(error).__name__, error.fields)
