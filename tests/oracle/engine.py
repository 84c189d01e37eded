# SPDX-License-Identifier: Apache-2.0
"""An engine that makes every call by chance, knows what it scheduled, and checks what it gets.

Why: it counts computed tokens by the sentences of docs/engines.md; the device follows contents, the
router follows events. The moves are in the modules `moves_*`; each draws from a generator of its
own, so that a run without some of its moves is still the same run.
"""

from __future__ import annotations

from random import Random
from typing import Any

from kvcore import Config, KvcoreError, Reason, Refused, Status
from kvcore.types.errors import (
    BeyondComputed,
    HeldByOthers,
    HitInOpenBatch,
    LoadUnfinished,
    SwappedOut,
)
from tests.oracle.backends import Language, Manager
from tests.oracle.contents import Contents, digest
from tests.oracle.device import Device, Span, Step
from tests.oracle.finding import Finding, demand
from tests.oracle.owners import Owners
from tests.oracle.requests import OracleRequest, own_hashes
from tests.oracle.router import Router, first_seen

COUNTS = ("num_computed_tokens", "num_tokens", "num_draft_tokens", "num_output_placeholders")
FACTS = (*COUNTS, "status", "get_row")
"""What an engine knows of each request, too."""


class Operation:
    """A store or load that is not finished; its key and batch are known when that is taken."""

    def __init__(self, block: int, loads: bool) -> None:
        self.block, self.loads = block, loads
        self.key = b""
        self.batch: int | None = None
        self.cancelled = False


class FailedLoad:
    """External tokens of which not all will come; batch: None while it is open.

    reporters: the requests of which it is known that they counted loaded tokens, each with the most
    that it counted. holding: those of them that have not left since. perhaps: all that had the
    prefix of the first loaded token since. cut: an earlier rewind may have reported it already, to
    as few tokens or fewer.
    """

    def __init__(self, name: str, span: Span, kept: int) -> None:
        self.name, self.kept = name, kept
        self.first, self.end = span.first, span.end
        self.prefix = span.chain[span.first]
        self.reporters, self.holding, self.perhaps = {name: span.end}, {name}, {name}
        self.batch: int | None = None
        self.cut = False

    def note(self, name: str, counted: int) -> None:
        """Note that a request counts loaded tokens up to here."""
        if counted > self.first:
            counted = min(counted, self.end)
            self.reporters[name] = max(counted, self.reporters.get(name, 0))
            self.holding.add(name)


class Engine:
    """A manager, what its engine knows, and a late device."""

    def __init__(self, config: Config, languages: tuple[Language, ...], restores: bool) -> None:
        self.config = config
        self.restores = restores
        self.languages = languages
        self.manager = Manager(config, languages)
        self.contents = Contents()
        self.device = Device(config, self.contents)
        self.router = Router(config)
        self.owners = Owners()
        self.rng = Random(0)
        self.known: dict[str, OracleRequest] = {}
        self.families: list[list[int]] = []
        self.num_named = 0
        self.spans: list[Span] = []
        self.unexecuted: list[Step] = []
        self.unfinished: list[int] = []
        self.uses: dict[int, set[tuple[str, int]]] = {}
        self.bases: dict[int, dict[str, int]] = {}
        self.operations: dict[int, Operation] = {}
        self.pins: list[int] = []
        self.zeroed: list[int] = []
        self.failing: dict[int, FailedLoad] = {}
        self.reported: frozenset[int] = frozenset()
        self.num_loads = 0
        self.windowed = [g for g in config.groups if g.window is not None]
        self.hash_size = config.hash_block_size
        self.limit = config.length_limit
        self.most = config.max_num_batched_tokens or 12
        self.probing = False

    def call(
        self, name: str, *args: Any, allowed: tuple[type[KvcoreError], ...] = (), **options: Any
    ) -> Any:
        """Make a call that is no misuse; None if it raised one of the allowed errors."""
        before = self.manager.encode() if self.probing else b""
        try:
            return self.manager.call(name, *args, **options)
        except allowed as error:
            demand(not self.probing or self.manager.encode() == before, f"{error!r}: state changed")
            return error
        except KvcoreError as error:
            raise Finding(f"{name}{args!r} {options!r}: {error!r}") from error

    def refused(self, refused: Refused, before: bytes, name: str | None) -> None:
        """Judge a refusal: it changed nothing but the window trim of a request."""
        demand(refused.needed > refused.available, f"{refused!r} with enough blocks")
        most = max(self.config.num_usable_blocks, self.config.num_host_blocks)
        late = refused.reason is Reason.NEVER or refused.needed <= most
        late |= name is not None and self.known[name].count > 0  # copies are not needed if alone
        demand(late, f"{refused!r} needs more than the {most} blocks that there are")
        if not before or self.manager.encode() == before:
            return
        demand(bool(self.windowed) and name is not None, f"{refused!r} has changed the state")
        if not self.restores:
            return
        clone = self.manager.clone(before)
        request = self.known[str(name)]
        clone.remove_skipped_blocks(request.name, min(request.count, len(request.stuff)))
        same = clone.encode() == self.manager.encode()
        demand(same, f"{refused!r} has changed more than the window trim")

    def before(self) -> bytes:
        """Return the encoded state, in some moves; empty in the others."""
        return self.manager.encode() if self.probing else b""

    def idle(self, running: bool | None = None, settled: bool = True) -> list[OracleRequest]:
        """Return the requests that can be scheduled. running: whether they count tokens."""
        return [
            each
            for each in self.known.values()
            if each.is_idle
            and (each.is_settled or not settled)
            and (running is None or (each.count > 0) == running)
        ]

    def hear(self) -> None:
        """Drain the events."""
        self.router.hear(self.call("take_events"))

    def learn_keys(self, request: OracleRequest) -> tuple[tuple[bytes, ...], ...]:
        """Learn the keys of a request; each stands for one content."""
        keys: tuple[tuple[bytes, ...], ...] = self.manager.ask("get_block_keys", request.name)
        chain = request.chain(self.contents)
        if request.own is None:
            num_hashed = len(request.stuff) // self.hash_size * self.hash_size
        else:
            num_hashed = request.own * self.hash_size
        for at, group in enumerate(self.config.groups):
            size = group.block_size
            most = num_hashed // size if self.config.enable_caching else 0
            demand(len(keys[at]) == most, f"{request.name} has {len(keys[at])} keys, not {most}")
            for position in range(request.num_learned // size, len(keys[at])):
                content = digest(chain[(position + 1) * size - 1], at)
                own = request.own is not None
                self.contents.learn(keys[at][position], content, own, not request.marked)
        request.num_learned = num_hashed
        return keys

    def add_hashes(self, request: OracleRequest) -> None:
        """Hand in the hashes of some more full blocks of a request that has its own."""
        most = len(request.stuff) // self.hash_size
        if request.own is not None and request.own < most:
            end = self.rng.randint(request.own + 1, most)
            chain = request.chain(self.contents)
            hashes = own_hashes(chain, self.hash_size, request.own, end)
            self.call("add_block_hashes", request.name, hashes)
            request.own = end

    def is_gone(self, count: int, tables: tuple[list[int], ...]) -> bool:
        """Tell whether a group gave back what the query at this count sees."""
        for group, table in zip(self.config.groups, tables, strict=True):
            index = first_seen(group, count) // group.block_size
            held = index * group.block_size < count and index < len(table)
            if group.window is not None and held and table[index] == 0:
                return True
        return False

    def leave(self, name: str, leaving: list[OracleRequest], *args: Any, count: int | None) -> bool:
        """Make a call by which requests leave the open batch; count: to what they fall, at most.

        False if it was refused, or others count what would be left unwritten.
        """
        tables = {each.name: self.manager.ask("get_block_ids", each.name) for each in leaving}
        before = self.before()
        outcome = self.call(name, *args, allowed=(HitInOpenBatch, HeldByOthers))
        if isinstance(outcome, Refused):
            self.refused(outcome, before, None)
            return False
        if isinstance(outcome, KvcoreError):
            others = outcome.fields["requests"]
            assert isinstance(others, list)
            right = not {each.name for each in leaving} & set(others)
            if isinstance(outcome, HitInOpenBatch):
                right &= all(self.known[each].base is not None for each in others)
            demand(right, f"{outcome!r} names the wrong requests")
            return False
        for each in leaving:
            if name == "free" and not each.count:
                continue
            settled = each.saved_count() if name == "swap_out" else each.settled_count()
            for bound in (settled, settled if count is None else min(settled, count)):
                each.count = 0 if self.is_gone(bound, tables[each.name]) else min(bound, each.count)
            self.left(each)
        return True

    def free(self, request: OracleRequest) -> bool:
        """Free a request, whatever it waits for; False if others hit what it would compute."""
        done = self.leave("free", [request], request.name, count=0)
        if done:
            request.swapped, request.transfer = False, None
            request.loading.clear()
        return done

    def take_back(self, request: OracleRequest, count: int, load: FailedLoad | None = None) -> bool:
        """Rewind a request to this many tokens; False if other requests must be freed first.

        load: the failed load that this reports. A first report never asks for others to be freed
        because of the tokens that they count. If it may have been made before, it is an ordinary
        cut, which is refused if the request counts fewer tokens, is swapped out or has unfinished
        loads.
        """
        tables = self.manager.ask("get_block_ids", request.name)
        want = min(request.settled_count(), count, *request.loading.values())
        want = min(want, request.load_end) if request.loading else want
        want = 0 if request.swapped or self.is_gone(request.settled_count(), tables) else want
        want = 0 if self.is_gone(want, tables) else want
        first = load is not None and not load.cut
        repeated = load is not None and load.cut
        held = (HitInOpenBatch,) if first else (HeldByOthers, HitInOpenBatch)
        cuts = {BeyondComputed: True, SwappedOut: request.swapped, LoadUnfinished: request.loading}
        refusals = tuple(error for error, met in cuts.items() if repeated and met)
        fell = self.call("rewind", [request.name], count, allowed=(*held, *refusals))
        if isinstance(fell, KvcoreError):
            return not isinstance(fell, held)
        for load in self.failing.values():
            load.cut |= count <= load.kept
        for each in self.known.values():
            now = self.manager.ask("num_computed_tokens", each.name)
            wrong = f"rewind gives {fell}, {each.name} falls from {each.count} to {now}"
            demand(now <= each.count and (each.name in fell) == (now < each.count), wrong)
            demand(each is not request or now == want, f"{wrong}, must be {want}")
            if each.name in fell or each is request:
                each.count, each.swapped, each.transfer = now, each.swapped and now > 0, None
                each.loading.clear()
                self.left(each)
        return True

    def left(self, request: OracleRequest) -> None:
        """Note that a request has left the open batch, without drafts or tokens to come."""
        request.base, request.drafts, request.sampler = None, [], None
        request.future, request.guesses = [], []
        for load in self.failing.values():
            load.holding.discard(request.name)
        self.spans = [span for span in self.spans if span.name != request.name]
        self.failing = {
            number: load
            for number, load in self.failing.items()
            if load.name != request.name or load.batch is not None
        }

    def shift(self, request: OracleRequest, num_tokens: int) -> None:
        """Note that batches begin earlier at a request, whose rejected drafts are dropped."""
        request.count -= num_tokens
        if request.base is not None:
            request.base -= num_tokens
            request.kept -= num_tokens
        for number in self.unfinished:
            base = self.bases[number].get(request.name, 0)
            if base > len(request.stuff):
                self.bases[number][request.name] = base - num_tokens

    def note_hit(self, request: OracleRequest) -> None:
        """Note on which failing loads a request rests now, by the blocks that both hold."""
        mine = self.manager.ask("get_block_ids", request.name)
        for load in self.failing.values():
            if load.name not in load.holding or self.config.duplicates == "merge":
                continue
            tables = self.manager.ask("get_block_ids", load.name)
            for group, table, ids in zip(self.config.groups, tables, mine, strict=True):
                for at, (one, other) in enumerate(zip(table, ids, strict=False)):
                    held = one == other and not (self.config.null_block and one == 0)
                    if held and at * group.block_size < load.end:
                        load.note(request.name, (at + 1) * group.block_size)

    def note_reporters(self) -> None:
        """Note which requests may have counted the tokens of failing loads."""
        for load in self.failing.values():
            for each in self.known.values():
                chain = each.chain(self.contents)
                if len(chain) > load.first and chain[load.first] == load.prefix:
                    load.perhaps.add(each.name)

    def can_report(self, load: FailedLoad, but: str = "") -> list[str]:
        """Return the requests that can report a failed load."""
        able = (name for name, most in load.reporters.items() if most > load.kept)
        return [name for name in able if name in self.known and name != but]

    def check_counts(self) -> None:
        """Compare what the engine knows of each request with what the manager says."""
        for each in self.known.values():
            said = self.manager.facts(FACTS, each.name)
            status = Status.SWAPPED if each.swapped else Status.WAITING
            if each.count and not each.swapped:
                status = Status.RUNNING
            numbers = (each.count, len(each.stuff), len(each.drafts), each.num_to_come)
            mine = (*numbers, status, each.row)
            if said != mine:
                raise Finding(f"{each.name}: {FACTS} are {said}, must be {mine}")
