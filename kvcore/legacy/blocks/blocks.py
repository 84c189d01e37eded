# SPDX-License-Identifier: Apache-2.0
"""The blocks behind a facade: the transitions of `kvcore.legacy.blocks.tiers`, over either backend.

This module holds the state. The methods of `blocks` are the transitions of `tiers.py` and
`by_table.py` without their first argument; callers pass all other arguments. A method that raises a
typed error leaves the state as it was; a refusal is a value. `state` is the same value for both
backends.

Why: with the twin, a Python wrapper around a transition takes as long as the transition itself, so
facades call `blocks` directly.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from inspect import signature
from typing import Any, Literal

from kvcore import _twin
from kvcore.legacy.blocks import by_table, tiers
from kvcore.legacy.blocks.check import check_tiers
from kvcore.legacy.blocks.from_twin import from_columns
from kvcore.legacy.blocks.tiers import Order, Tiers, check_options, make_tiers
from kvcore.pool.block_pool import PoolEviction
from kvcore.types.commands import Batch
from kvcore.types.errors import BackendMissing
from kvcore.types.values import Outcome

MODULES = (tiers, by_table)
"""The modules that define the transitions of the Python core."""
BackendName = Literal["python", "rust"]


class Backing:
    """Blocks of one or two tiers and an open batch, changed by each call.

    blocks: the transitions of the chosen backend, in Python or Rust.
    """

    __slots__ = ("_eviction", "_first_block", "blocks")

    def __init__(
        self,
        num_blocks: int,
        num_host_blocks: int = 0,
        *,
        null_block: bool = False,
        eviction: PoolEviction = "lru",
        order: Order = "ascending",
        backend: BackendName = "python",
    ) -> None:
        """Raises InvalidConfig, BackendMissing, PoolTooLarge."""
        options: Any = {"null_block": null_block, "eviction": eviction, "order": order}
        self.blocks: _twin.Blocks = _make(backend, (num_blocks, num_host_blocks), options)
        self._first_block = int(null_block)
        self._eviction = eviction

    def __getattr__(self, name: str) -> Any:
        """Return a transition or query by name; arguments with defaults may be omitted."""
        arguments, method = signature(_transition(name)), getattr(self.blocks, name)

        def call(*args: Any, **fields: Any) -> Any:
            bound = arguments.bind(None, *args, **fields)
            bound.apply_defaults()
            return method(*bound.args[1:])

        return call

    def take_batch(self) -> Batch:
        """Close and number the open batch; it holds the commands since the previous one."""
        return self.blocks.take_batch()

    def state(self) -> Tiers:
        """Return the state as a value, equal for both backends. Cost: O(pool) with the twin."""
        if isinstance(self.blocks, PureBlocks):
            return self.blocks.state
        columns = self.blocks.dump()
        return from_columns(*columns, first_block=self._first_block, eviction=self._eviction)

    def check(
        self, held: Iterable[int] | None = None, held_on_host: Iterable[int] | None = None
    ) -> None:
        """Raise InvariantViolation with the first property of pools that does not hold.

        held, held_on_host: each block once per owner that the caller knows; None: not compared.
        """
        check_tiers(self.state(), held, held_on_host)


class PureBlocks:
    """Calls the functions of `MODULES` on one value; the twin's `Tiers` has the same methods."""

    __slots__ = ("state",)

    def __init__(self, state: Tiers) -> None:
        self.state = state

    def __getattr__(self, name: str) -> Any:
        """Return a transition or a query as a method."""
        function = _transition(name)

        def call(*args: Any) -> Any:
            answer = function(self.state, *args)
            if not isinstance(answer, Outcome):
                return answer
            self.state = answer.state
            return answer.value

        return call


def _transition(name: str) -> Callable[..., Any]:
    """Return a function of the Python core by name. Raises AttributeError."""
    for module in MODULES:
        if name in module.__dict__:
            function: Callable[..., Any] = module.__dict__[name]
            return function
    raise AttributeError(name)


def _make(backend: Any, sizes: tuple[Any, Any], options: Any) -> Any:
    if backend == "python":
        return PureBlocks(make_tiers(*sizes, **options))
    if backend != "rust":
        reason = "there are 'python' and 'rust'"
        raise BackendMissing(backend=backend, reason=reason)
    return _twin.make_tiers(*check_options(*sizes, *options.values()), **options)
