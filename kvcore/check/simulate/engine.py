# SPDX-License-Identifier: Apache-2.0
"""An engine with continuous batching, and the failures that it must handle.

In each step the device may advance, disturbances may happen (aborts, preemptions, cancelled
batches, failed transfers, pins, evictions), requests are admitted, prompts are scheduled in chunks
and answers in one call, and the batch is taken. A refused request preempts others, the last
admitted first. Every choice comes from the run's random generators and from the answers of the
managers. `further.py` has the moves of engines that do more. An engine that makes no progress first
releases everything that it holds; if that does not help, the run is stuck (DEADLOCK-FREE).
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

from kvcore.check.simulate.further import LETTERS, Further
from kvcore.check.simulate.play import Move, Play
from kvcore.check.simulate.prefixes import KINDS
from kvcore.check.simulate.setting import Setting, most_drafts
from kvcore.trace.calls import Misuse
from kvcore.types.errors import InvariantViolation
from kvcore.types.values import Appended, Reason, Refused, Status, Swapped

IDLE_LETS_GO, IDLE_STUCK = 8, 40
MOST_WAITING_BATCHES = 4
MOST_ENCODED = 20
"""Encoder tokens of a request."""

TROUBLE = (
    *("abort", "preempt", "pin", "evict", "store", "swap", "trim", "truncate"),
    *("cache", "fork", "extend", "guess", "hashes"),
)
"""Events that may happen to a request."""

Do = Callable[[Move], Any]


class Engine:
    """The engine of one run. more: generator of its further moves. do: makes a move."""

    def __init__(self, random: Random, more: Random, setting: Setting, play: Play, do: Do) -> None:
        self._random = random
        self._further = Further(more, setting.further, play, self._make)
        self._setting = setting
        self._play = play
        self._do = do
        self._made = 0
        self._idle = 0
        self._done = 0
        self._encodes = any(group.is_cross for group in setting.config.groups)
        self._running: list[str] = []
        self._histories: list[list[int]] = []
        self._recent: list[list[int]] = []

    def step(self) -> None:
        """Plan and issue one batch."""
        self._go_on()
        self._further.early()
        self._trouble()
        self._arrive()
        before = self._made + self._done
        self._finish_answers()
        self._further.ahead(self._running)
        self._decode()
        self._admit()
        self._further.late()
        self._late_trouble()
        busy = bool(self._play.passes) or self._made + self._done > before
        self._idle = 0 if busy or not self._play.known else self._idle + 1
        if self._idle and self._idle % IDLE_LETS_GO == 0:
            self._let_go()
        if self._idle > IDLE_STUCK:
            free = self._play.manager.num_free_blocks
            detail = f"{len(self._play.known)} requests wait, {free} blocks are free, none advances"
            raise InvariantViolation("DEADLOCK-FREE", detail)
        self._take()

    def _make(self, verb: str, *args: Any) -> Any:
        return self._do(Move(verb, args))

    def _happens(self, name: str) -> bool:
        return self._random.random() < self._setting.rates.get(name, 0.0)

    def _go_on(self) -> None:
        """Let the device advance or lag behind, and transfers end or not."""
        while self._play.waiting and self._random.random() >= self._setting.lag:
            self._make("execute")
        while len(self._play.waiting) > MOST_WAITING_BATCHES:
            self._make("execute")
        while self._play.unfinished and self._play.unfinished[0].ran:
            if self._random.random() < 0.3:
                break
            self._make("complete")
        for _ in range(len(self._play.transfers)):
            if self._random.random() < 0.5:
                fails = self._random.random() < self._setting.fails
                self._make("finish", self._random.randrange(1000), not fails)

    def _trouble(self) -> None:
        names = list(self._play.known)
        if self._happens("cancel"):
            self._make("cancel", self._random.randrange(4))
        for verb in ("drain", "reset"):
            if self._happens(verb):
                self._make(verb)
        if self._happens("unpin"):
            self._make("unpin", self._random.randrange(1000))
        for verb in TROUBLE if names else ():
            if self._happens(verb):
                self._disturb(verb, self._random.choice(names))

    def _late_trouble(self) -> None:
        """Take new requests out of the open batch, with others that may have hit their blocks."""
        loads = [each.request_id for each in self._play.passes if each.loaded > each.start]
        if loads and self._random.random() < self._setting.fails:
            self._make_slot()
            self._make("fail", self._random.choice(loads), self._random.randrange(100))
        swapped = [name for name in self._play.known if self._play.status(name) is Status.SWAPPED]
        if swapped and self._random.random() < 0.3:
            self._make("swap_in", [self._random.choice(swapped)])
        names = list(dict.fromkeys(each.request_id for each in self._play.passes))
        if names and self._happens("late"):
            name = self._random.choice(names[: 1 + len(names) // 2])
            self._disturb(self._random.choice(["abort", "preempt", "swap", "truncate"]), name)

    def _disturb(self, verb: str, name: str) -> None:
        random, known = self._random, self._play.known.get(name)
        if known is None:
            return
        group_id, position = random.randrange(8), random.randrange(1000)
        match verb:
            case "abort":
                self._end(name)
            case "preempt":
                self._free(name)
            case "pin" | "evict":
                self._make(verb, name, group_id, position)
            case "store":
                positions = range(position, position + random.randint(1, 4))
                self._make("store", name, group_id, positions)
            case "swap":
                others = random.sample(sorted(self._play.known), min(2, len(self._play.known)))
                self._make("swap_out", list(dict.fromkeys([name, *others])))
            case "trim" | "hashes":
                self._make(verb, name)
            case "truncate":
                self._make("truncate", name, random.randint(1, len(known.tokens)))
            case "cache":
                self._make("cache", name, random.randint(1, len(known.tokens)))
            case "fork":
                if len(self._play.known) < self._setting.num_requests:
                    self._make("fork", name, self._name(), known.goal + random.randint(0, 8))
            case "extend" if not known.drafts:
                self._make("extend", name, [random.randrange(LETTERS)] * random.randint(1, 3))
            case "guess" if not self._play.left(name):
                self._guess(name)

    def _guess(self, name: str) -> None:
        """Give a request drafts and schedule them; beside states also with a token before them."""
        random, tokens = self._random, 0
        if self._play.config.has_states and random.random() < 0.5:
            self._make("extend", name, [random.randrange(LETTERS)])
            tokens = 1
        count = random.randint(1, most_drafts(self._play.config))
        drafts = [random.randrange(LETTERS) for _ in range(count)]
        self._make("guess", name, drafts)
        self._schedule(name, tokens + len(drafts))

    def _name(self) -> str:
        self._made += 1
        return f"r{self._made}"

    def _arrive(self) -> None:
        arrivals = self._setting.arrival
        while arrivals > 0 and len(self._play.known) < self._setting.num_requests:
            if self._random.random() < arrivals:
                tokens = self._prompt()
                self._recent = [*self._recent[-3:], tokens]
                goal = len(tokens) + self._random.randint(1, self._setting.num_output)
                name = self._name()
                kind = self._random.choice(KINDS)
                if kind == "plain" and self._further.happens("kept"):
                    kind = "kept"
                self._make("add", name, tokens, kind, goal)
            arrivals -= 1

    def _prompt(self) -> list[int]:
        """Return a prompt that begins as a document or an earlier request, and goes on freshly."""
        random, most = self._random, self._setting.num_prompt
        length = random.randint(1, most)
        if self._recent and random.random() < 0.5:
            begin = random.choice(self._recent)
            return (begin + [random.randrange(LETTERS)] * random.choice([0, 1, 3, 8]))[:most]
        if self._histories and random.random() < 0.4:
            begin = random.choice(self._histories)[: random.randint(1, most)]
        else:
            first = 1000 * (1 + random.randrange(self._setting.num_documents))
            begin = list(range(first, first + random.randint(1, most)))
        first = 100_000 + 5000 * self._made
        return (begin + list(range(first, first + length)))[: max(length, random.randint(1, most))]

    def _decode(self) -> None:
        """Serve the running requests: verdicts on drafts, chunks of prompts, tokens of answers."""
        for name in [name for name in self._running if self._play.known[name].drafts]:
            if self._happens("accept"):
                self._make("accept", name, self._random.randint(0, 4))
        budget = self._setting.budget
        for name in list(self._running):
            if name in self._running and self._can_go_on(name) and self._play.left(name) > 0:
                self._schedule(name, self._random.randint(1, max(1, budget)))
        names = [name for name in self._running if self._can_append(name)][:budget]
        while names:
            tokens = [self._random.randrange(LETTERS) for _ in names]
            value = self._make("append", names, tokens)
            if not isinstance(value, Appended) or value.refused is None:
                return
            names = names[value.done :]
            if not self._make_room(names[0], value.refused):
                names = names[1:]
            names = [name for name in names if name in self._running and self._can_go_on(name)]

    def _can_append(self, name: str) -> bool:
        waits = not self._can_go_on(name) or self._play.left(name)
        return not waits and not self._play.known[name].drafts and self._random.random() < 0.95

    def _can_go_on(self, name: str) -> bool:
        known = self._play.known.get(name)
        if known is None or self._play.status(name) is not Status.RUNNING:
            return False
        checked = self._play.manager.num_computed_tokens(name) <= len(known.tokens)
        return checked and not self._play.loading(name)

    def _admit(self) -> None:
        """Admit waiting requests, those swapped out first, up to the first one refused."""
        for name in list(self._play.known):
            if self._play.status(name) is Status.SWAPPED and self._random.random() < 0.3:
                value = self._make("swap_in", [name])
                if isinstance(value, Swapped):
                    self._note_running(name)
        for name in list(self._play.known):
            status = self._play.status(name)
            if status is Status.RUNNING:
                self._note_running(name)
            if status is not Status.WAITING or self._play.loading(name):
                continue
            if self._happens("load") and not isinstance(
                self._make("load", name, self._random.randint(1, 8)), Refused | None
            ):
                self._note_running(name)
                continue
            value = self._schedule(name, self._random.randint(1, self._setting.budget))
            if isinstance(value, Refused):
                if value.reason is Reason.NEVER:
                    self._end(name)
                break

    def _schedule(self, name: str, most: int) -> Any:
        """Schedule the next tokens of a request; a running one that is refused preempts others."""
        options: dict[str, Any] = {}
        for option, rate in (("lookahead", "num_lookahead_tokens"), ("external", EXTERNAL)):
            if self._happens(option):
                options[rate] = self._random.randint(1, 20)
        if self._encodes:
            options["num_encoder_tokens"] = self._random.randint(0, MOST_ENCODED)
        if self._happens("cache"):
            options["delay_cache_blocks"] = True
        if self._random.random() < 0.1:
            options["full_sequence_must_fit"] = True
        if self._play.config.has_states and self._happens("mark"):
            options["checkpoint"] = True
        running = self._play.status(name) is Status.RUNNING
        hits = self._random.random() < 0.95
        advised = self._play.config.has_states and self._happens("advise")
        value = self._make("allocate", name, most, hits, options, advised)
        if isinstance(value, Refused) and running:
            self._make_room(name, value)
        elif value is not None and not isinstance(value, Refused | Misuse):
            self._note_running(name)
        return value

    def _note_running(self, name: str) -> None:
        if name not in self._running:
            self._running.append(name)

    def _make_room(self, name: str, refused: Refused) -> bool:
        """Preempt the last admitted request, in either way, or abort a request that never fits.
        Return whether the refused call can be made again.
        """
        self._running = [each for each in self._running if each in self._play.known]
        others = [each for each in self._running if each != name]
        if refused.reason is Reason.NEVER or not others:
            if refused.reason is Reason.NEVER or not self._waits_for_something():
                self._end(name)
            return False
        victim = others[-1]
        if self._happens("swap"):
            self._make("swap_out", [victim])
        if self._play.status(victim) is Status.SWAPPED:
            self._running.remove(victim)
        else:
            self._free(victim)
        return True

    def _waits_for_something(self) -> bool:
        play = self._play
        holders = (play.unfinished, play.transfers, play.pins, play.pinned, play.passes)
        return any(map(bool, holders))

    def _finish_answers(self) -> None:
        for name in [name for name in self._running if name in self._play.known]:
            known = self._play.known[name]
            over = len(known.tokens) >= known.goal and self._play.left(name) <= 0
            if over and self._random.random() < 0.8:
                self._histories = [*self._histories[-20:], list(known.tokens)]
                self._done += 1
                self._end(name)
        self._running = [
            name
            for name in self._running
            if name in self._play.known and self._play.status(name) is not Status.WAITING
        ]

    def _free(self, name: str) -> None:
        """Preempt a request; first one whose tokens in the open batch other requests count."""
        value = self._make("free", name)
        if isinstance(value, Misuse) and value.error == "HitInOpenBatch":
            self._take()
            self._make("free", name)
        if name in self._running:
            self._running.remove(name)

    def _end(self, name: str) -> None:
        self._free(name)
        self._make("remove", name)

    def _take(self) -> None:
        self._make_slot()
        self._make("take")

    def _make_slot(self) -> None:
        """Let the device catch up until another batch may be unfinished."""
        most = self._play.most_in_flight
        while most and len(self._play.unfinished) >= most:
            self._make("execute")
            self._make("complete")

    def _let_go(self) -> None:
        """End everything that may hold blocks, since no request advances."""
        while self._play.unfinished or self._play.waiting:
            self._make("execute")
            self._make("complete")
        self._take()
        self._make("execute")
        self._make("complete")
        while self._play.transfers:
            self._make("finish", 0, True)
        while self._play.pins:
            self._make("unpin", 0)
        self._further.let_go()
        for name in list(self._play.known):
            self._free(name)
        self._running = []


EXTERNAL = "num_external_computed_tokens"
