# SPDX-License-Identifier: Apache-2.0
"""An engine of your own: it plans step n+1 while step n runs, preempts, and finds stops late.

The model is a fake: two layers, whose keys and values are digests. They are written into slots and
read through block tables, so one wrong slot gives a wrong answer. In the end every answer is
compared with the one that is computed without a cache.

    $ python examples/own_engine.py
    12 answers in 84 steps, all as without a cache
    296 positions found in the cache, 15 preemptions
    19 times a request was refused, 6 stops found late
"""

from concurrent.futures import Future, ThreadPoolExecutor
from hashlib import sha256
from typing import NamedTuple

from kvcore import Batch, Config, KVCacheManager, Reason, Refused, Request, SetTable

NUM_BLOCKS, BLOCK_SIZE, CHUNK = 22, 4, 12
NUM_LAYERS, NUM_TOKEN_IDS, STOP, MAX_ANSWER = 2, 30, 0, 20


class Work(NamedTuple):
    """What a step computes for one request: these tokens from position `first` on; if there are
    none, one position with the token that the device sampled last in this row.
    """

    name: str
    row: int
    first: int
    token_ids: list[int]
    samples: bool  # whether the next token is sampled behind them


def digest(*parts: object) -> str:
    return sha256(repr(parts).encode()).hexdigest()


def to_token(hidden: str) -> int:
    return int(hidden[:8], 16) % NUM_TOKEN_IDS


class Device:
    """Slots, block tables and the model. All of it is used by one thread, batch after batch."""

    def __init__(self) -> None:
        self.layers = [["never written"] * NUM_BLOCKS * BLOCK_SIZE for _ in range(NUM_LAYERS)]
        self.tables: dict[tuple[int, int], int] = {}  # (row, position in the table): block
        self.sampled: dict[int, int] = {}  # by row

    def run(self, batch: Batch, step: list[Work]) -> dict[str, int]:
        """Apply a batch, run the forward pass, and return the sampled tokens by name."""
        for command in batch:
            # Tables are made of commands: they have hits, too, and rows that are used again. Other
            # commands say who owns a block, or copy, for forks and swaps that are not used here.
            if isinstance(command, SetTable):
                self.tables[command.row, command.position] = command.block
        hidden = {}
        for work in step:
            for position, token in enumerate(
                work.token_ids or [self.sampled[work.row]], work.first
            ):
                hidden[work.row, position] = digest(token)
        for slots in self.layers:
            for (row, position), state in hidden.items():  # all writes of the step ...
                slots[self.slot(row, position)] = digest(position, state)
            for row, position in hidden:  # ... come before the first read
                seen = [slots[self.slot(row, each)] for each in range(position + 1)]
                hidden[row, position] = digest(seen)
        for work in (each for each in step if each.samples):
            end = work.first + max(1, len(work.token_ids))
            self.sampled[work.row] = to_token(hidden[work.row, end - 1])
        return {work.name: self.sampled[work.row] for work in step if work.samples}

    def slot(self, row: int, position: int) -> int:
        block = self.tables[row, position // BLOCK_SIZE]
        return block * BLOCK_SIZE + position % BLOCK_SIZE


class Engine:
    """Requests that wait and requests that run, both oldest first, and one batch in flight."""

    def __init__(self) -> None:
        self.manager = KVCacheManager(Config(NUM_BLOCKS, BLOCK_SIZE, max_in_flight=1))
        self.token_ids: dict[str, list[int]] = {}  # as far as they are known
        self.lengths: dict[str, int] = {}  # at most
        self.waiting: list[str] = []
        self.running: list[str] = []
        self.num_steps = self.num_hits = self.num_preempted = self.num_refused = self.num_late = 0

    def add(self, name: str, prompt: list[int]) -> None:
        self.manager.add_request(Request(name, prompt))
        self.token_ids[name], self.lengths[name] = list(prompt), len(prompt) + MAX_ANSWER
        self.waiting.append(name)

    def serve(self) -> None:
        """Run until every request has its answer."""
        device, number = Device(), 0
        result: Future[dict[str, int]] | None = None
        with ThreadPoolExecutor(max_workers=1) as worker:
            while self.waiting or self.running:
                step = self.plan()  # while batch `number` runs
                sampled = result.result() if result else {}  # waits; if it raises: cancel(number)
                if result:
                    self.manager.complete(number)  # frees what it kept in quarantine
                done, batch = number, self.manager.take_batch()
                number, result = batch.number, worker.submit(device.run, batch, step)
                for name, token in sampled.items():  # while the next batch runs
                    self.hand_in(name, token, done)
                self.num_steps += 1

    def plan(self) -> list[Work]:
        """Schedule a step. Running requests ask first, and the youngest gives way if blocks lack.

        By index, since preemption shortens the list. The victim has not asked yet in this step, or
        is the one that was refused, so the open batch has nothing of it.
        """
        step: list[Work] = []
        index, num_refused = 0, 0
        while index < len(self.running):
            name, index = self.running[index], index + 1
            if self.manager.num_computed_tokens(name) + 1 == self.lengths[name]:
                continue  # its last token is being sampled
            asked = self.ask(name)
            num_refused += isinstance(asked, Refused)
            while isinstance(asked, Refused) and asked.needed > asked.available + asked.pending:
                victim = self.running[-1]
                self.preempt(victim)
                if victim == name:
                    break
                asked = self.ask(name)
            if isinstance(asked, Work):  # else it gave way, or waits for the batch in flight
                step.append(asked)
        while self.waiting and not num_refused:  # a victim's output is handed in before it is back
            asked = self.ask(self.waiting[0])
            if isinstance(asked, Refused):
                assert asked.reason is Reason.LATER, "a request is larger than the pool"
                break
            step.append(asked)
            self.running.append(self.waiting.pop(0))
        self.num_refused += num_refused
        return step

    def ask(self, name: str) -> Work | Refused:
        """Schedule a chunk of the tokens that are not computed, or else one position to come: the
        batch in flight samples its token, the device keeps it, and it is handed in later.

        (`append(names)` schedules positions to come for many requests in one call.)
        """
        manager, hit = self.manager, None
        first = manager.num_computed_tokens(name)
        if name in self.waiting:
            hit = manager.get_computed_blocks(name)  # of others, or of its own before preemption
            first = hit.num_tokens
        known = self.token_ids[name]
        chunk = known[first : first + CHUNK]
        num_new, to_come = max(1, len(chunk)), int(not chunk)
        got = manager.allocate_slots(name, num_new, hit, num_output_placeholders=to_come)
        if isinstance(got, Refused):
            return got
        self.num_hits += first if hit else 0
        return Work(name, manager.get_row(name), first, chunk, first + num_new >= len(known))

    def preempt(self, name: str) -> None:
        """Give its blocks back; those that the batch in flight uses come back when that is done."""
        self.manager.free(name)
        self.running.remove(name)
        self.waiting.insert(0, name)
        self.num_preempted += 1

    def hand_in(self, name: str, token: int, batch: int) -> None:
        """Take a token that a batch sampled; it fills the position that was scheduled for it."""
        if name not in self.running and name not in self.waiting:
            return  # it stopped one batch before: this one computed for nothing
        self.manager.add_tokens(name, [token], batch=batch)
        self.token_ids[name].append(token)
        is_full = len(self.token_ids[name]) == self.lengths[name]
        if token == STOP or is_full:
            self.num_late += not is_full
            self.manager.free(name)
            self.manager.remove_request(name)
            (self.running if name in self.running else self.waiting).remove(name)


def without_cache(prompt: list[int]) -> list[int]:
    """The prompt and its answer, from all tokens again for each new one."""
    token_ids = list(prompt)
    while len(token_ids) < len(prompt) + MAX_ANSWER and STOP not in token_ids[len(prompt) :]:
        hidden = [digest(token) for token in token_ids]
        for _ in range(NUM_LAYERS):
            slots = [digest(position, state) for position, state in enumerate(hidden)]
            hidden = [digest(slots[: position + 1]) for position in range(len(slots))]
        token_ids.append(to_token(hidden[-1]))
    return token_ids


system = list(range(100, 110))
prompts = {f"r{n}": system + [200 + n * k for k in range(1, 3 + 5 * n % 17)] for n in range(12)}
engine = Engine()
for name, prompt in prompts.items():
    engine.add(name, prompt)
engine.serve()
wrong = [name for name in prompts if engine.token_ids[name] != without_cache(prompts[name])]
if wrong:
    raise SystemExit(f"wrong answers: {', '.join(wrong)}")
print(f"{len(prompts)} answers in {engine.num_steps} steps, all as without a cache")
print(f"{engine.num_hits} positions found in the cache, {engine.num_preempted} preemptions")
print(f"{engine.num_refused} times a request was refused, {engine.num_late} stops found late")
