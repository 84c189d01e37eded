# SPDX-License-Identifier: Apache-2.0
"""Passes the keys and values of a prompt from the engine that computed it to the one that answers.

A parcel is a copy, so the sender can reuse its blocks at once. The receiver's manager allocates
slots for external tokens with delayed caching; they are published when their content has arrived,
and a last token is left to compute, whose logits start the answer. Tokens lost on the way are
rewound and computed. An abort ends a load at once: nothing is written later. Source: S000-04, 24,
26, 29.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs
from torch import Tensor

from kvcore import Hit, Refused
from kvcore_runtime.cache.errors import ParcelMismatch
from kvcore_runtime.cache.layout import CacheLayout
from kvcore_runtime.engine.exchange import Exchange, is_null
from kvcore_runtime.engine.sequence import Sequence

if TYPE_CHECKING:
    from kvcore_runtime.engine.engine import Engine


@attrs.frozen(kw_only=True, eq=False)
class Parcel:
    """Keys and values of the first num_tokens tokens of a prompt.

    prompt: all its tokens, since an id may be that of an earlier request. layouts: of the blocks of
    each group. pages: for each group, by position in the table, a copied block [*page_shape];
    positions that had left a window are missing.
    """

    prompt: tuple[int, ...]
    num_tokens: int
    layouts: tuple[CacheLayout, ...]
    pages: tuple[dict[int, Tensor], ...]


class Channel:
    """Parcels on their way between engines of one process, by request id."""

    def __init__(self) -> None:
        self._parcels: dict[str, Parcel] = {}

    def __len__(self) -> int:
        return len(self._parcels)

    def send(self, request_id: str, parcel: Parcel) -> None:
        """Send a parcel, replacing an earlier one of the same request."""
        self._parcels[request_id] = parcel

    def announced(self, request_id: str) -> Parcel | None:
        """Return the pending parcel, None if there is none."""
        return self._parcels.get(request_id)

    def receive(self, request_id: str) -> Parcel | None:
        """Take an arrived parcel, None while it is pending.

        It may hold fewer tokens than announced: the rest will not arrive.
        """
        return self._parcels.pop(request_id)

    def drop(self, request_id: str) -> None:
        """Drop a parcel that no engine waits for any more."""
        self._parcels.pop(request_id, None)


class Sender(Exchange):
    """The side of the engine that computes prompts: sends each prompt's blocks when it is computed.

    An engine has one exchange, and this one loads nothing, so no block rests on a load here.
    """

    needs_idle_cache = True
    takes_prompts = True

    def __init__(self, engine: Engine, channel: Channel) -> None:
        self._engine = engine
        self._channel = channel

    def prompt_computed(self, sequence: Sequence) -> None:
        """See `Exchange`."""
        runtime, prompt = self._engine.runtime, sequence.request.prompt
        num_tokens = len(prompt)
        pages = []
        for index, group in enumerate(runtime.cache.groups):
            blocks = runtime.tables.row_blocks(sequence.row, index)
            held = blocks[: -(-num_tokens // group.layout.block_size)]
            pages.append(
                {
                    position: group.data[block].clone()
                    for position, block in enumerate(held)
                    if not is_null(self._engine.manager.config, block)
                }
            )
        layouts = tuple(group.layout for group in runtime.cache.groups)
        parcel = Parcel(prompt=prompt, num_tokens=num_tokens, layouts=layouts, pages=tuple(pages))
        self._channel.send(sequence.request.request_id, parcel)


@attrs.frozen
class _Awaited:
    """A pending load: its sequence, the announced tokens [start, end), and its batch."""

    sequence: Sequence
    start: int
    end: int
    batch: int


class Receiver(Exchange):
    """The side of the engine that answers: loads the announced tokens of a prompt."""

    needs_idle_cache = True

    def __init__(self, engine: Engine, channel: Channel) -> None:
        self._engine = engine
        self._channel = channel
        self._awaited: dict[str, _Awaited] = {}

    @property
    def is_busy(self) -> bool:
        """See `Exchange`."""
        return bool(self._awaited)

    def begin(self, sequence: Sequence, hit: Hit) -> int | Refused:
        """See `Exchange`. Raises ParcelMismatch."""
        parcel = self._channel.announced(sequence.request.request_id)
        if parcel is None:
            return 0
        self._check_layouts(parcel)
        end = min(parcel.num_tokens, sequence.num_tokens - 1)
        if end <= hit.num_tokens or sequence.tokens(0, end) != list(parcel.prompt[:end]):
            return 0
        got = self._engine.manager.allocate_slots(
            sequence.sequence_id,
            0,
            hit,
            num_external_computed_tokens=end - hit.num_tokens,
            delay_cache_blocks=True,
            full_sequence_must_fit=True,
        )
        if isinstance(got, Refused):
            return got
        batch = self._engine.open_number
        self._awaited[sequence.sequence_id] = _Awaited(sequence, hit.num_tokens, end, batch)
        return end - hit.num_tokens

    def poll(self) -> list[Sequence]:
        """See `Exchange`."""
        manager, done = self._engine.manager, []
        for name, awaited in list(self._awaited.items()):
            parcel = self._channel.receive(awaited.sequence.request.request_id)
            if parcel is None:
                continue
            del self._awaited[name]
            end = self._unpack(parcel, awaited)
            if end < awaited.end:
                manager.rewind([name], end)
            manager.cache_blocks(name, manager.num_computed_tokens(name))
            done.append(awaited.sequence)
        return done

    def cancelled(self, number: int) -> list[Sequence]:
        """See `Exchange`. The announcement remains, so it is requested again."""
        lost = [name for name, awaited in self._awaited.items() if awaited.batch >= number]
        return [self._awaited.pop(name).sequence for name in lost]

    def forget(self, sequence: Sequence) -> None:
        """See `Exchange`."""
        if self._awaited.pop(sequence.sequence_id, None) is not None:
            self._channel.drop(sequence.request.request_id)

    def _unpack(self, parcel: Parcel, awaited: _Awaited) -> int:
        """Copy arrived pages into the sequence's blocks; return the number of available tokens."""
        runtime, config = self._engine.runtime, self._engine.manager.config
        row, group_ids = awaited.sequence.row, range(runtime.tables.num_groups)
        tables = [runtime.tables.row_blocks(row, group_id) for group_id in group_ids]
        # Fewer tokens may have arrived than were hit here.
        end = max(awaited.start, min(awaited.end, parcel.num_tokens))
        for layout, pages, table in zip(parcel.layouts, parcel.pages, tables, strict=True):
            for position in _spanned(awaited.start, end, layout.block_size):
                if position not in pages and not is_null(config, table[position]):
                    end = max(awaited.start, min(end, position * layout.block_size))
        for group, pages, table in zip(runtime.cache.groups, parcel.pages, tables, strict=True):
            for position in _spanned(awaited.start, end, group.layout.block_size):
                if not is_null(config, table[position]):
                    group.data[table[position]].copy_(pages[position])
        return end

    def _check_layouts(self, parcel: Parcel) -> None:
        """Raise ParcelMismatch if the sender's blocks differ from this engine's."""
        mine = tuple(group.layout for group in self._engine.runtime.cache.groups)
        if parcel.layouts != mine:
            raise ParcelMismatch(sent=parcel.layouts, expected=mine)


def _spanned(start: int, end: int, block_size: int) -> range:
    """Return the table positions of tokens [start, end)."""
    return range(start // block_size, -(-end // block_size))
