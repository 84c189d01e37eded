# SPDX-License-Identifier: Apache-2.0
"""Small managers, right and wrong, that the tests of `kvcore check --manager` name."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any

from kvcore import Config, Request


class Small:
    """Blocks in a list and no hits. A window gives back nothing."""

    def __init__(self, config: Config) -> None:
        self.size = config.block_size
        first = config.num_blocks - config.num_usable_blocks
        self.free_blocks = list(range(first, config.num_blocks))
        self.tokens: dict[str, list[int]] = {}
        self.tables: dict[str, list[int]] = {}

    @property
    def num_free_blocks(self) -> int:
        return len(self.free_blocks)

    def add_request(self, request: Request) -> None:
        self.tokens[request.request_id] = [*request.tokens]
        self.tables[request.request_id] = []

    def remove_request(self, name: str) -> None:
        del self.tokens[name], self.tables[name]

    def allocate_slots(self, name: str, count: int) -> Any:
        return self.grown(name, count)

    def append(self, names: list[str], tokens: list[int]) -> Any:
        held = self.grown(names[0], len(self.tokens[names[0]]) + 1)
        if held is not None:
            self.tokens[names[0]] += tokens
        return held

    def grown(self, name: str, length: int) -> list[int] | None:
        table = self.tables[name]
        needed = -(-length // self.size) - len(table)
        if needed > len(self.free_blocks):
            return None
        table += [self.free_blocks.pop(0) for _ in range(needed)]
        return table

    def free(self, name: str) -> None:
        self.free_blocks += self.tables[name]
        self.tables[name] = []

    def get_block_ids(self, name: str) -> tuple[list[int], ...]:
        return (self.tables[name],)

    def take_batch(self) -> tuple[()]:
        return ()

    def state_name(self, slots: Callable[[int], object]) -> bytes:
        held = [(slots(b) for b in table) for table in self.tables.values()]
        counts = [(name, len(table)) for name, table in sorted(self.tables.items())]
        return repr((counts, [[*each] for each in held], len(self.free_blocks))).encode()


class Pickled(Small):
    """`Small` without a name for its states."""

    state_name = None  # type: ignore[assignment] # its pickle names it


class Ring(Small):
    """Writes blocks of a window again, after the last one that the window names."""

    rings: tuple[int, ...] = (0,)

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.length = (config.groups[0].window or 0) // self.size

    def grown(self, name: str, length: int) -> list[int] | None:
        return super().grown(name, min(length, self.length * self.size))

    def get_block_ids(self, name: str) -> tuple[list[int], ...]:
        table = self.tables[name]
        around = len(table) if len(table) < self.length else 8
        return ([table[at % self.length] for at in range(around)],)


class WrittenBeforeRead(Ring):
    """A ring that says it is none."""

    rings = ()


class Early(Small):
    """Whole prompts are found from their allocation on, whether they were computed or not."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.found: dict[tuple[int, ...], list[int]] = {}

    def get_computed_blocks(self, name: str) -> tuple[Any, int]:
        tokens = tuple(self.tokens[name])
        for end in range(len(tokens) - 1, 0, -1):
            held = self.found.get(tokens[:end])
            if held and set(held) <= set(self.free_blocks):
                return held, end
        return None, 0

    def allocate_slots(self, name: str, count: int, hit: Any = (None, 0)) -> Any:
        held, length = hit
        for block in held or ():
            self.free_blocks.remove(block)
        self.tables[name] = [*(held or ())]
        table = self.grown(name, length + count)
        if table is None:
            self.free(name)
        return self.kept(name, table)

    def append(self, names: list[str], tokens: list[int]) -> Any:
        return self.kept(names[0], super().append(names, tokens))

    def kept(self, name: str, table: list[int] | None) -> list[int] | None:
        """Return the table, which is found from now on and whose blocks are found by nothing
        else.
        """
        if table is not None:
            found = {key: it for key, it in self.found.items() if not {*it} & {*table}}
            self.found = {**found, tuple(self.tokens[name]): [*table]}
        return table

    def state_name(self, slots: Callable[[int], object]) -> bytes:
        tables = sorted(self.tables.items())
        order = [*(block for _, table in tables for block in table), *self.free_blocks]
        places = {block: place for place, block in enumerate(order)}
        kept = sorted((key, [places[b] for b in it]) for key, it in self.found.items())
        live = {*order[: -len(self.free_blocks) or len(order)]}.union(*self.found.values())
        held = [slots(block) if block in live else None for block in order]
        return repr(([(name, len(table)) for name, table in tables], kept, held)).encode()


class Late(Early):
    """As `Early`, but found only from the end of the step that computed it."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.planned: dict[str, tuple[int, ...]] = {}

    def kept(self, name: str, table: list[int] | None) -> list[int] | None:
        if table is not None:
            self.planned[name] = tuple(self.tokens[name])
            self.found = {key: it for key, it in self.found.items() if not {*it} & {*table}}
        return table

    def free(self, name: str) -> None:
        super().free(name)
        self.planned.pop(name, None)

    def end_step(self) -> None:
        for name, tokens in self.planned.items():
            self.found[tokens] = [*self.tables[name]]
        self.planned.clear()


class Other:
    """`Small` under other names."""

    def __init__(self, config: Config) -> None:
        self.inner = Small(config)

    def __getattr__(self, name: str) -> Any:
        if name in ("allocate_slots", "num_free_blocks", "inner") or name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.inner, name)

    def reserve(self, name: str, count: int) -> Any:
        return self.inner.allocate_slots(name, count)

    @property
    def room(self) -> int:
        return self.inner.num_free_blocks


class Locked(Small):
    """A manager with a lock, which cannot be copied."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.lock = threading.Lock()


class LockedLater(Small):
    """A manager that has a lock from its first request on."""

    def add_request(self, request: Request) -> None:
        super().add_request(request)
        self.lock = threading.Lock()


class Nameless(Small):
    """A manager that can be copied, but has no name for its states."""

    state_name = None  # type: ignore[assignment] # its pickle names it

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.rule = lambda: 0

    def __deepcopy__(self, memo: Any) -> Nameless:
        other = copy.copy(self)
        other.__dict__ |= {
            name: copy.deepcopy(value, memo) for name, value in vars(self).items() if name != "rule"
        }
        return other


class Raises:
    """A manager that needs a device."""

    def __init__(self, _: Config) -> None:
        raise OSError("no device")


class Lacks(Small):
    """A manager without a way to give blocks back."""

    free = None  # type: ignore[assignment] # that is what is wrong


class OddRings(Small):
    """A manager that names a ring which is not a group."""

    rings = (1,)


NOT_CALLABLE = 7
