# SPDX-License-Identifier: Apache-2.0
"""Mistakes of the small engine that plans ahead. None crashes, loses a block or changes an answer.

Each stands for bugs that were reported of real engines.
"""

from __future__ import annotations

from tests.sanitizer.engines.driver import Request
from tests.sanitizer.engines.overlapped import SIZE, Key, Overlapped, Planned


class SlidesByThePlan(Overlapped):
    """Blocks leave the window by what is planned; drafts are rejected and steps lost."""

    def issue(self, rows: list[Planned]) -> None:
        super().issue(rows)
        for row in rows:
            self.slide(row.request, row.start + row.count)


class SlidesATokenEarly(Overlapped):
    """A block leaves the window while its last token is in it."""

    def slide(self, request: Request, computed: int) -> None:
        super().slide(request, computed + 1)


class KeepsTheCountOfALostStep(Overlapped):
    """A step is lost, and its tokens count as computed."""

    def take_back(self, row: Planned) -> None:
        if row.drafts or row.start + row.count >= len(row.request.tokens):
            super().take_back(row)


class PublishesWhatIsIssued(Overlapped):
    """Blocks are found from the issue of a step on, and stay so if the step is lost."""

    def issue(self, rows: list[Planned]) -> None:
        super().issue(rows)
        for row in rows:
            known = min(row.start + row.count, len(row.request.tokens))
            self.publish(row.request, known)


class PublishesRejectedDrafts(Overlapped):
    """A block counts as full with the draft in it that another token took the place of."""

    def confirm(self, row: Planned) -> None:
        super().confirm(row)
        if row.drafts and row.request in self.running:
            written = min(row.start + row.count, len(row.request.tokens))
            self.publish(row.request, written)


class StoresLate(Overlapped):
    """Blocks are free at once, and copied to the host behind the step that writes them again."""

    def store(self, request: Request) -> None:
        pairs = [*zip(request.table, self.kept[request], strict=False)]
        self.__dict__.setdefault("late", []).append(pairs)

    def issue(self, rows: list[Planned]) -> None:
        super().issue(rows)
        for pairs in self.__dict__.pop("late", ()):
            self.watch.copy(pairs, source="device", target="host")


class LoadsLate(Overlapped):
    """A request runs, and what the host has of it arrives behind its step."""

    def load(self, request: Request) -> None:
        pairs = [*zip(self.kept[request], request.table, strict=True)]
        self.__dict__.setdefault("late", []).append(pairs)

    def issue(self, rows: list[Planned]) -> None:
        super().issue(rows)
        for pairs in self.__dict__.pop("late", ()):
            self.watch.copy(pairs, source="host", target="device")


class LoadsToTheNextBlock(Overlapped):
    """What comes back from the host is copied one block too far."""

    def load(self, request: Request) -> None:
        table = [*request.table[1:], *request.table[:1]]
        self.watch.copy(zip(self.kept[request], table, strict=True), source="host", target="device")


class KeepsTheTableOfItsLastLife(Overlapped):
    """A preempted request comes back behind the table that the worker has of it."""

    def drop(self, request: Request) -> None:
        self.give([block for block in request.table if block])
        request.table = []


class KeepsTheGrowthOfALostStep(Overlapped):
    """A lost step's blocks are given back, and the worker's table keeps them."""

    def take_back(self, row: Planned) -> None:
        super().take_back(row)
        used = -(-max(row.start, row.request.computed) // SIZE)
        if row.request in self.running and self.window is None:
            row.request.table, gone = row.request.table[:used], row.request.table[used:]
            self.give(gone)


class CountsWithALateOutput(Overlapped):
    """The output of a step from before a preemption counts for the request's next life."""

    def victim(self, but: set[Request]) -> Request | None:
        idle = [each for each in self.running if each not in but]
        return max(idle, key=lambda each: (each.urgency, each.name), default=None)

    def preempt(self, request: Request) -> None:
        rows = [row for _, rows in self.flight for row in rows if row.request is request]
        super().preempt(request)
        if any(row.drafts or row.start + row.count >= len(request.tokens) for row in rows):
            self.drop_rows(request)
        elif rows and request not in self.kept:
            self.__dict__.setdefault("late", {})[request] = rows[-1].start + rows[-1].count

    def drop_rows(self, request: Request) -> None:
        for _, rows in self.flight:
            rows[:] = [row for row in rows if row.request is not request]

    def come(self, request: Request) -> bool:
        came = super().come(request)
        late = self.__dict__.get("late", {}).pop(request, 0)
        if came and late > request.computed and self.grow(request, late):
            self.ahead[request] = late
        return came


class LeavesTheAdapterOut(Overlapped):
    """Keys are made of tokens alone."""

    def key(self, request: Request, at: int) -> Key:
        return tuple(request.tokens[: SIZE * (at + 1)])


BUGS = [
    SlidesByThePlan,
    SlidesATokenEarly,
    KeepsTheCountOfALostStep,
    PublishesWhatIsIssued,
    PublishesRejectedDrafts,
    StoresLate,
    LoadsLate,
    LoadsToTheNextBlock,
    KeepsTheTableOfItsLastLife,
    KeepsTheGrowthOfALostStep,
    CountsWithALateOutput,
    LeavesTheAdapterOut,
]
