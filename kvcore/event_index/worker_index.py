# SPDX-License-Identifier: Apache-2.0
"""The blocks that one worker's events announced, and new events that announce them again.

A block is known by its hash, its group and its medium; it does not matter whether its parent is
known. Announcing a known block changes nothing, and neither does removing an unknown one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import attrs

from kvcore.codec.event_msgpack import EventMap
from kvcore.event_index.wire import Name

PER_BLOCK = frozenset(
    {"type", "block_hashes", "parent_block_hash", "token_ids", "extra_keys", "cache_salt"}
)
"""The fields of a stored event that its blocks do not share."""

Changed = list[tuple[int, Name]]
"""Groups and hashes that became findable, or stopped being so, in any medium."""


@attrs.frozen(eq=False)
class Content:
    """What a stored event says of one block. shared: the fields that all blocks of the
    event share.
    """

    parent: Name | None
    tokens: tuple[int, ...]
    extra_keys: Any
    salt: str | None
    shared: Mapping[str, Any]


class WorkerIndex:
    """The blocks that one worker announced. with_contents: keep what `announcements` needs."""

    def __init__(self, *, with_contents: bool = False) -> None:
        self._with_contents = with_contents
        self._places: dict[tuple[str, int], dict[Name, Content | None]] = {}
        self.windows: dict[int, int | None] = {}
        """For each group seen, the number of blocks that a hit needs at its end; None: all blocks.
        """
        self._block_sizes: dict[int, int] = {}

    def __len__(self) -> int:
        return sum(map(len, self._places.values()))

    def keys(self) -> set[tuple[int, Name]]:
        """Return group and hash of each block, in any medium."""
        return {
            (group_id, name) for (_, group_id), blocks in self._places.items() for name in blocks
        }

    def apply(self, event: EventMap) -> tuple[Changed, Changed]:
        """Apply one event. Returns what became findable, and what no longer is."""
        match event["type"]:
            case "BlockStored":
                return self._store(event), []
            case "BlockRemoved":
                return [], self._remove(event)
            case "AllBlocksCleared":
                gone = list(self.keys())
                # The events behind it may be of an engine that restarted with other groups.
                for known in (self._places, self.windows, self._block_sizes):
                    known.clear()
                return [], gone
        return [], []

    def _store(self, event: EventMap) -> Changed:
        medium, group_id = event["medium"], event["group_idx"]
        appeared = [
            (group_id, name) for name in event["block_hashes"] if not self._is_known(group_id, name)
        ]
        blocks = self._places.setdefault((medium, group_id), {})
        window, size = event.get("kv_cache_spec_sliding_window"), event["block_size"]
        if size:  # otherwise a placeholder, which names blocks alone
            self._block_sizes[group_id] = size
            self.windows[group_id] = None if window is None else -(-(window - 1) // size)
        if self._with_contents:
            for name, content in _contents(event):
                blocks.setdefault(name, content)
        else:
            blocks.update(dict.fromkeys(event["block_hashes"]))
        return appeared

    def _remove(self, event: EventMap) -> Changed:
        group_id = event["group_idx"]
        blocks = self._places.get((event["medium"], group_id), {})
        known = [name for name in event["block_hashes"] if blocks.pop(name, self) is not self]
        return [(group_id, name) for name in known if not self._is_known(group_id, name)]

    def _is_known(self, group_id: int, name: Name) -> bool:
        return any(
            name in blocks for (_, number), blocks in self._places.items() if number == group_id
        )

    def comparable_groups(self) -> dict[int, int | None]:
        """Return the windows of the groups that have the first group's block size."""
        size = self._block_sizes.get(0)
        return {
            group_id: window
            for group_id, window in self.windows.items()
            if group_id == 0 or self._block_sizes[group_id] == size
        }

    def announcements(self, blocks_max: int) -> list[EventMap]:
        """Return stored events for all blocks, each block after its parent, `blocks_max` per event.

        A parent that is not in the index is named too, as in the events received.
        """
        events: list[EventMap] = []
        for (medium, group_id), blocks in self._places.items():
            run: list[tuple[Name, Content]] = []
            for name, content in _parents_first(blocks):
                if run and (len(run) == blocks_max or not _continues(run[-1], content)):
                    events.append(_stored(medium, group_id, run))
                    run = []
                run.append((name, content))
            if run:
                events.append(_stored(medium, group_id, run))
        return events


def _contents(event: EventMap) -> Iterator[tuple[Name, Content]]:
    """Yield the blocks of a stored event, each with its content."""
    names, size = event["block_hashes"], event["block_size"]
    shared = {key: value for key, value in event.items() if key not in PER_BLOCK}
    keys = event.get("extra_keys") or [None] * len(names)
    parent, salt = event.get("parent_block_hash"), event.get("cache_salt")
    for number, name in enumerate(names):
        tokens = tuple(event["token_ids"][number * size : (number + 1) * size])
        yield name, Content(parent, tokens, keys[number], salt, shared)
        parent, salt = name, None


def _parents_first(blocks: Mapping[Name, Content | None]) -> Iterator[tuple[Name, Content]]:
    """Yield each block with its content, after its parent if the parent is in the index."""
    done: set[Name] = set()
    for first in blocks:
        chain: list[Name] = []
        name: Name | None = first
        while name is not None and name in blocks and name not in done:
            done.add(name)
            chain.append(name)
            name = _of(blocks, name).parent
        for each in reversed(chain):
            yield each, _of(blocks, each)


def _of(blocks: Mapping[Name, Content | None], name: Name) -> Content:
    content = blocks[name]
    assert content is not None
    return content


def _continues(before: tuple[Name, Content], content: Content) -> bool:
    """Return whether one event can hold a block and the block before it."""
    name, last = before
    return content.parent == name and content.salt is None and content.shared == last.shared


def _stored(medium: str, group_id: int, run: list[tuple[Name, Content]]) -> EventMap:
    """Return one stored event for consecutive blocks."""
    first = run[0][1]
    event: EventMap = {
        "type": "BlockStored",
        **first.shared,
        "block_hashes": [name for name, _ in run],
        "parent_block_hash": first.parent,
        "token_ids": [token for _, content in run for token in content.tokens],
        "medium": medium,
        "group_idx": group_id,
    }
    if any(content.extra_keys for _, content in run):
        event["extra_keys"] = [content.extra_keys for _, content in run]
    if first.salt is not None:
        event["cache_salt"] = first.salt
    return event
