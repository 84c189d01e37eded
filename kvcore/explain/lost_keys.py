# SPDX-License-Identifier: Apache-2.0
"""Notes, from the commands of the open batch, which keys a manager lost and when blocks got free.

Why: the manager tells which keys are findable; which ones were, only their losses tell.
Twin: rust/src/explain/lost_keys.rs.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from typing import Any

from kvcore import _twin
from kvcore.types.commands import Allocate, Evict, Free, Touch
from kvcore.types.keys import fold_key

NEVER, FINDABLE, REMOVED = 0, 1, 2
"""Marks of keys: never findable; findable now; from REMOVED on the number of a loss."""
OWNED = 2**32 - 1
"""The step of a block that has an owner."""
Loss = tuple[int, int | None]
"""A block that lost keys, and the steps since it had an owner; None if it has one."""


class LostKeys:
    """The last loss of each key, by a number that the caller gives."""

    def __init__(self, num_blocks: int) -> None:
        self._freed = array("I", bytes(4 * num_blocks))
        self._lost: dict[int, int] = {}

    def clear(self) -> None:
        """Forget all keys."""
        self._lost.clear()

    def mark(self, key: int) -> int:
        """Return the mark of a folded key: REMOVED plus the number of its last loss, or NEVER."""
        return self._lost.get(key, NEVER)

    def note(
        self, manager: Any, start: int, step: int, first: int, apart: bool
    ) -> tuple[int, list[Loss]]:
        """Note what the open batch did from its command `start` on; return the number of its
        commands, and the losses.

        step: when it was. first: the number of the first loss; keys that were lost one after the
        other share it if their blocks were idle equally long. apart: only those of one block do.
        """
        commands = manager.state().batch.commands[start:]
        losses: list[Loss] = []
        before: Any = None
        for each in commands:
            match each:
                case Free():
                    self._freed[each.block] = step
                case Evict():
                    loss = each.block, self.idle(each.block, step)
                    if loss[not apart :] != before:
                        before = loss[not apart :]
                        losses.append(loss)
                    self._lost[fold_key(each.key)] = REMOVED + first + len(losses) - 1
        for each in commands:
            match each:
                case Free():
                    self._freed[each.block] = step
                case Allocate() | Touch():  # what a call got counts as idle while the call runs
                    self._freed[each.block] = OWNED
        return start + len(commands), losses

    def lose(self, keys: Iterable[int], number: int) -> None:
        """Note the loss of keys that no command named."""
        self._lost.update(dict.fromkeys(keys, REMOVED + number))

    def use(self, blocks: Iterable[int], step: int) -> None:
        """Note that blocks had an owner, for which no command tells: they left its window in the
        call that hit them.
        """
        for block in blocks:
            self._freed[block] = max(self._freed[block], step)

    def idle(self, block: int, step: int) -> int | None:
        """Return the steps since a block had an owner; None if it has one."""
        freed = self._freed[block]
        return None if freed == OWNED else step - freed


def make_lost_keys(core: Any, num_blocks: int) -> LostKeys | _twin.LostKeys:
    """Return what notes the losses of a backend of this many blocks."""
    is_python = hasattr(core, "state")
    return LostKeys(num_blocks) if is_python else _twin.make_lost_keys(num_blocks)
