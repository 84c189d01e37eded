# SPDX-License-Identifier: Apache-2.0
"""The two ends of a channel without a model: blocks of four tokens, whose slots hold positions."""

from types import SimpleNamespace
from typing import Any, cast

import attrs
import pytest
from kvcore_runtime.cache.apply import Runtime
from kvcore_runtime.cache.cache import Cache
from kvcore_runtime.cache.layout import CacheLayout
from kvcore_runtime.cache.tables import BlockTables
from kvcore_runtime.engine.connector import Channel, Parcel, Receiver, Sender
from kvcore_runtime.engine.engine import Engine
from kvcore_runtime.engine.exchange import Exchange, is_null
from kvcore_runtime.engine.sequence import GenerationRequest, Sequence
from kvcore_runtime.far.exchange import FarExchange

from kvcore import Config, Group, KVCacheManager, Refused, Request, Status
from tests.conftest import Backend

WINDOWED = (Group(4), Group(4, kind="sliding_window", window=4))


class End:
    """A manager and a small real cache: what an exchange asks of an engine."""

    def __init__(
        self, backend: Backend, *, num_blocks: int = 20, groups: tuple[Group, ...] = (Group(4),)
    ) -> None:
        self.manager = KVCacheManager(Config(num_blocks, groups=groups), backend)
        layout = CacheLayout(num_layers=1, num_kv_heads=1, head_dim=1, block_size=4)
        cache = Cache(layout, num_blocks, groups=[(1, 4)] * len(groups))
        self.runtime = Runtime(cache, BlockTables(8, 8, 64, 4, num_groups=len(groups)))
        self.open_number = 0

    @property
    def engine(self) -> Engine:
        return cast(Engine, self)

    def sequence(self, name: str, num_tokens: int) -> Sequence:
        """Return a sequence of tokens 0, 1, 2 and so on."""
        request = GenerationRequest(request_id=name, prompt=tuple(range(num_tokens)))
        row = self.manager.add_request(Request(name, request.prompt))
        return Sequence(request, arrival=0, row=row)

    def take(self) -> int:
        batch = self.manager.take_batch()
        self.runtime.apply(batch)
        self.open_number = batch.number + 1
        return batch.number

    def compute(self, sequence: Sequence, *counts: int) -> None:
        """Compute tokens by batches, after the cached ones; each slot holds its position + 1."""
        name = sequence.sequence_id
        for count in counts:
            start = self.manager.num_computed_tokens(name)
            assert self.manager.allocate_slots(name, count)
            self.take()
            for group, table in zip(self.runtime.cache.groups, self.tables(name), strict=True):
                for position in range(start, start + count):
                    group.data[table[position // 4], :, :, position % 4] = position + 1

    def tables(self, name: str) -> tuple[list[int], ...]:
        return self.manager.get_block_ids(name)

    def held(self, name: str, group_id: int = 0) -> list[float]:
        """Return the key slots of a request, in the order of its positions."""
        data = self.runtime.cache.groups[group_id].data
        blocks = [data[block, 0, 0].flatten().tolist() for block in self.tables(name)[group_id]]
        return [value for block in blocks for value in block]


def sent(backend: Backend, num_tokens: int, *, groups: tuple[Group, ...] = (Group(4),)) -> Channel:
    """Return a channel with a prompt's parcel, computed in two batches; the blocks are reused."""
    channel, end = Channel(), End(backend, groups=groups)
    sequence = end.sequence("a", num_tokens)
    end.compute(sequence, num_tokens - 1, 1)
    Sender(end.engine, channel).prompt_computed(sequence)
    end.runtime.cache.blocks.data.fill_(-9.0)
    return channel


def make_receiver(
    backend: Backend, channel: Channel, num_tokens: int = 9, **options: Any
) -> tuple[End, Receiver, Sequence]:
    end = End(backend, **options)
    return end, Receiver(end.engine, channel), end.sequence("a", num_tokens)


def begin(end: End, receiver: Receiver, sequence: Sequence) -> int | Refused:
    hit = end.manager.get_computed_blocks(sequence.sequence_id)
    return receiver.begin(sequence, hit)


def test_a_parcel_is_a_copy_of_what_the_prompt_can_still_see(backend: Backend) -> None:
    channel = sent(backend, 13, groups=WINDOWED)
    parcel = channel.announced("a")
    assert parcel is not None
    assert parcel.num_tokens == 13
    full, windowed = parcel.pages
    assert sorted(full) == [0, 1, 2, 3]
    # The query at token 12 sees tokens 9 and later: the first two blocks were given back.
    assert sorted(windowed) == [2, 3]
    assert full[2].flatten().tolist() == [9.0, 10.0, 11.0, 12.0] * 2
    assert windowed[3].flatten().tolist()[0] == 13.0


def test_all_but_the_last_token_is_received_and_then_findable(backend: Backend) -> None:
    channel = sent(backend, 9)
    end, receiver, sequence = make_receiver(backend, channel)
    end.sequence("probe", 9)
    assert begin(end, receiver, sequence) == 8
    assert receiver.is_busy
    end.take()
    assert end.manager.get_computed_blocks("probe").num_tokens == 0
    assert receiver.poll() == [sequence]
    assert not receiver.is_busy
    assert len(channel) == 0
    assert end.held("a") == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0]
    assert end.manager.num_computed_tokens("a") == 8
    assert end.manager.get_computed_blocks("probe").num_tokens == 8


@pytest.mark.parametrize(("num_tokens", "expected"), [(7, 7), (5, 5), (4, 4), (2, 2), (0, 0)])
def test_what_did_not_come_is_not_counted(backend: Backend, num_tokens: int, expected: int) -> None:
    channel = sent(backend, 9)
    end, receiver, sequence = make_receiver(backend, channel)
    assert begin(end, receiver, sequence) == 8
    end.take()
    parcel = channel.announced("a")
    assert parcel is not None
    channel.send("a", attrs.evolve(parcel, num_tokens=num_tokens))
    assert receiver.poll() == [sequence]
    assert end.manager.num_computed_tokens("a") == expected
    assert end.held("a")[:expected] == [position + 1.0 for position in range(expected)]


@pytest.mark.parametrize(("missing", "expected"), [((2,), 8), ((1,), 4), ((1, 2), 4), ((0,), 12)])
def test_a_hole_ends_what_came_but_reaches_not_into_what_was_hit(
    backend: Backend, missing: tuple[int, ...], expected: int
) -> None:
    """The first block is a hit, so that its page is not needed."""
    channel = sent(backend, 13)
    end, receiver, _ = make_receiver(backend, channel)
    first = end.sequence("first", 4)
    end.compute(first, 4)
    sequence = end.sequence("b", 13)
    parcel = channel.announced("a")
    assert parcel is not None
    channel.send("b", parcel)
    assert begin(end, receiver, sequence) == 8
    end.take()
    for position in missing:
        del parcel.pages[0][position]
    assert receiver.poll() == [sequence]
    assert end.manager.num_computed_tokens("b") == expected
    assert end.held("b")[:expected] == [position + 1.0 for position in range(expected)]


def test_less_than_was_hit_takes_nothing_away(backend: Backend) -> None:
    channel = sent(backend, 13)
    end, receiver, _ = make_receiver(backend, channel)
    end.compute(end.sequence("first", 8), 8)
    sequence = end.sequence("b", 13)
    parcel = channel.announced("a")
    assert parcel is not None
    channel.send("b", parcel)
    assert begin(end, receiver, sequence) == 4
    end.take()
    channel.send("b", attrs.evolve(parcel, num_tokens=4))
    assert receiver.poll() == [sequence]
    assert end.manager.num_computed_tokens("b") == 8
    assert end.held("b")[:8] == [position + 1.0 for position in range(8)]


def test_a_page_is_copied_from_the_first_token_that_was_not_hit(backend: Backend) -> None:
    """What is hit is not written: another request reads it."""
    channel = sent(backend, 13)
    end, receiver, _ = make_receiver(backend, channel)
    end.compute(end.sequence("first", 8), 8)
    hit_block = end.tables("first")[0][0]
    end.runtime.cache.blocks.data[hit_block] = 77.0
    sequence = end.sequence("b", 13)
    parcel = channel.announced("a")
    assert parcel is not None
    channel.send("b", parcel)
    assert begin(end, receiver, sequence) == 4
    end.take()
    assert receiver.poll() == [sequence]
    assert end.held("b")[:4] == [77.0] * 4
    assert end.held("b")[8:12] == [9.0, 10.0, 11.0, 12.0]


def test_behind_a_window_nothing_is_received(backend: Backend) -> None:
    channel = sent(backend, 13, groups=WINDOWED)
    end, receiver, sequence = make_receiver(backend, channel, 13, groups=WINDOWED)
    assert begin(end, receiver, sequence) == 12
    end.take()
    null_before = end.runtime.cache.groups[1].data[0].clone()
    assert receiver.poll() == [sequence]
    assert end.manager.num_computed_tokens("a") == 12
    assert end.held("a")[:12] == [position + 1.0 for position in range(12)]
    assert end.held("a", 1)[9:12] == [10.0, 11.0, 12.0]
    assert end.runtime.cache.groups[1].data[0].equal(null_before)


@pytest.mark.parametrize("num_hit", [8, 12])
def test_what_is_hit_already_is_not_asked_for(backend: Backend, num_hit: int) -> None:
    channel = sent(backend, 8)
    end, receiver, _ = make_receiver(backend, channel)
    end.compute(end.sequence("first", num_hit), num_hit)
    sequence = end.sequence("b", 13)
    parcel = channel.announced("a")
    assert parcel is not None
    channel.send("b", parcel)
    before = end.manager.encode()
    assert begin(end, receiver, sequence) == 0
    assert end.manager.encode() == before
    assert not receiver.is_busy


def test_what_nobody_sent_is_not_waited_for(backend: Backend) -> None:
    end, receiver, sequence = make_receiver(backend, Channel())
    assert begin(end, receiver, sequence) == 0
    assert not receiver.is_busy
    assert receiver.poll() == []


def test_a_load_begins_only_if_the_whole_sequence_fits(backend: Backend) -> None:
    """Four blocks are free: the parcel fills two of them, the sequence needs five."""
    channel = sent(backend, 8)
    end, receiver, sequence = make_receiver(backend, channel, 20, num_blocks=5)
    assert isinstance(begin(end, receiver, sequence), Refused)
    assert not receiver.is_busy
    assert end.manager.status("a") is Status.WAITING
    assert len(channel) == 1


class Slow(Channel):
    """A channel whose parcel is announced, and arrives on demand."""

    has_come = False

    def receive(self, request_id: str) -> Parcel | None:
        return super().receive(request_id) if self.has_come else None


def test_who_is_forgotten_receives_nothing_later(backend: Backend) -> None:
    channel = Slow()
    channel.send("a", cast(Parcel, sent(backend, 9).announced("a")))
    end, receiver, sequence = make_receiver(backend, channel)
    bystander = end.sequence("b", 9)
    channel.send("b", cast(Parcel, channel.announced("a")))
    assert begin(end, receiver, sequence) == 8
    end.take()
    assert receiver.poll() == []
    receiver.forget(bystander)
    assert len(channel) == 2, "it did not wait for its parcel"
    receiver.forget(sequence)
    assert len(channel) == 1
    assert not receiver.is_busy
    channel.has_come = True
    before = end.runtime.cache.blocks.data.clone()
    assert receiver.poll() == []
    assert end.runtime.cache.blocks.data.equal(before)


def test_a_cancelled_load_is_asked_for_again(backend: Backend) -> None:
    channel = sent(backend, 9)
    end, receiver, sequence = make_receiver(backend, channel)
    assert begin(end, receiver, sequence) == 8
    number = end.take()
    assert receiver.cancelled(number + 1) == []
    assert receiver.is_busy
    assert receiver.cancelled(number) == [sequence]
    assert not receiver.is_busy
    assert len(channel) == 1
    end.manager.free("a")
    assert begin(end, receiver, sequence) == 8
    end.take()
    assert receiver.poll() == [sequence]


def test_who_touches_the_cache_by_itself_says_so() -> None:
    """The engine lets nothing run meanwhile; for other exchanges it need not wait."""
    requested = (Exchange, FarExchange, Sender, Receiver)
    assert [each.needs_idle_cache for each in requested] == [False, False, True, True]


def test_block_0_is_the_null_block_only_if_there_is_one() -> None:
    assert is_null(Config(9, 4), 0)
    assert not is_null(Config(9, 4), 1)
    assert not is_null(Config(9, 4, null_block=False), 0)


def test_parcels_go_by_request() -> None:
    channel = Channel()
    parcel = cast(Parcel, SimpleNamespace())
    channel.send("a", parcel)
    assert channel.announced("b") is None
    assert channel.receive("a") is parcel
    assert len(channel) == 0
    channel.drop("a")
