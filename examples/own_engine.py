# SPDX-License-Identifier: Apache-2.0
"""An engine of your own: it plans step n+1 while step n runs, preempts, and finds stops late.

The model is a fake: it writes a digest of each position into a slot and reads it through block
tables, so one wrong slot gives a wrong answer. At the end every answer is compared with the one
computed without a cache.

    $ python examples/own_engine.py
    12 answers in 76 steps, 272 positions found in the cache
    14 preemptions, 7 stops found late
"""

from concurrent.futures import Future, ThreadPoolExecutor
from hashlib import sha256

import attrs

from kvcore import Batch, Config, KVCacheManager, Reason, Refused, Request, SetTable

NUM_BLOCKS, BLOCK_SIZE, CHUNK = 22, 4, 12
NUM_TOKEN_IDS, STOP, MAX_ANSWER = 60, 0, 20


@attrs.frozen
class Work:
    """A step's part for one request: it computes these tokens from position `first` on; without
    tokens, one position with the token that the device last sampled in its row.
    """

    name: str
    row: int
    first: int
    token_ids: list[int]
    samples: bool  # whether the next token is sampled after them


def digest(*parts: object) -> int:
    return int(sha256(repr(parts).encode()).hexdigest()[:8], 16)


class Device:
    """Slots, block tables and the model. All of it is used by one thread, batch after batch."""

    def __init__(self) -> None:
        self.slots = [0] * NUM_BLOCKS * BLOCK_SIZE
        self.tables: dict[tuple[int, int], int] = {}  # (row, position in the table): block
        self.sampled: dict[int, int] = {}  # by row

    def run(self, batch: Batch, step: list[Work]) -> dict[str, int]:
        """Apply a batch, run the forward pass, and return the sampled tokens by name."""
        for command in batch:  # others report owners, or copy for forks and swaps
            if isinstance(command, SetTable):
                self.tables[command.row, command.position] = command.block
        for work in step:  # all writes of the step come before the first read
            token_ids = work.token_ids or [self.sampled[work.row]]
            for position, token in enumerate(token_ids, work.first):
                self.slots[self.slot(work.row, position)] = digest(position, token)
        sampling = [work for work in step if work.samples]
        for work in sampling:
            end = work.first + max(1, len(work.token_ids))
            seen = [self.slots[self.slot(work.row, position)] for position in range(end)]
            self.sampled[work.row] = digest(seen) % NUM_TOKEN_IDS
        return {work.name: self.sampled[work.row] for work in sampling}

    def slot(self, row: int, position: int) -> int:
        return self.tables[row, position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE


class Engine:
    """Requests that wait and requests that run, both oldest first, and one batch in flight."""

    def __init__(self, prompts: dict[str, list[int]]) -> None:
        self.manager = KVCacheManager(Config(NUM_BLOCKS, BLOCK_SIZE, max_in_flight=1))
        self.token_ids = {name: list(prompt) for name, prompt in prompts.items()}  # as known
        self.lengths = {name: len(prompt) + MAX_ANSWER for name, prompt in prompts.items()}
        self.waiting, self.running = list(prompts), list[str]()
        self.num_steps = self.num_hits = self.num_preempted = self.num_late = 0
        for name, prompt in prompts.items():
            self.manager.add_request(Request(name, prompt))

    def serve(self) -> None:
        """Run until every request has its answer."""
        device, number = Device(), 0
        result: Future[dict[str, int]] | None = None  # of batch `number`
        with ThreadPoolExecutor(max_workers=1) as worker:
            while self.waiting or self.running:
                step = self.plan()  # while that batch runs
                sampled = result.result() if result else {}  # waits; if it raises: cancel(number)
                if result:
                    self.manager.complete(number)  # frees what it kept in quarantine
                done, batch = number, self.manager.take_batch()
                number, result = batch.number, worker.submit(device.run, batch, step)
                for name, token in sampled.items():  # while the next batch runs
                    self.hand_in(name, token, done)
                self.num_steps += 1

    def plan(self) -> list[Work]:
        """Schedule a step, running requests first; if blocks run out, preempt the youngest, which
        is not scheduled yet or was refused, so it is not in the open batch.
        """
        step, is_short, index = list[Work](), False, 0
        while index < len(self.running):  # by index, since preemption shortens the list
            name, index = self.running[index], index + 1
            if self.manager.num_computed_tokens(name) + 1 == self.lengths[name]:
                continue  # its last token is being sampled
            value = self.schedule(name)
            is_short |= isinstance(value, Refused)
            while isinstance(value, Refused) and value.needed > value.available + value.pending:
                if self.preempt() == name:
                    break
                value = self.schedule(name)
            if isinstance(value, Work):  # else it was preempted, or waits for the batch in flight
                step.append(value)
        while self.waiting and not is_short:  # a victim returns once its output is in
            value = self.schedule(self.waiting[0])
            if isinstance(value, Refused):
                assert value.reason is Reason.LATER, "a request is larger than the pool"
                break
            step.append(value)
            self.running.append(self.waiting.pop(0))
        return step

    def schedule(self, name: str) -> Work | Refused:
        """Schedule a chunk of the tokens to compute, or one position whose token the batch in
        flight samples: the device keeps it, and it is handed in later.
        """
        manager, hit = self.manager, None
        first = manager.num_computed_tokens(name)
        if name in self.waiting:
            hit = manager.get_computed_blocks(name)  # of others, or its own before preemption
            first = hit.num_tokens
        chunk = self.token_ids[name][first : first + CHUNK]
        end, to_come = first + max(1, len(chunk)), int(not chunk)
        got = manager.allocate_slots(name, end - first, hit, num_output_placeholders=to_come)
        if isinstance(got, Refused):
            return got
        self.num_hits += first if hit else 0
        samples = end >= len(self.token_ids[name])
        return Work(name, manager.get_row(name), first, chunk, samples)

    def preempt(self) -> str:
        """Free the youngest's blocks; those in use return when the batch in flight is done."""
        self.waiting.insert(0, self.running.pop())
        self.manager.free(self.waiting[0])
        self.num_preempted += 1
        return self.waiting[0]

    def hand_in(self, name: str, token: int, batch: int) -> None:
        """Hand in a token that a batch sampled; it fills the position scheduled for it."""
        if name not in self.running and name not in self.waiting:
            return  # it stopped one batch earlier: this one was in vain
        self.manager.add_tokens(name, [token], batch=batch)
        self.token_ids[name].append(token)
        is_full = len(self.token_ids[name]) == self.lengths[name]
        if token == STOP or is_full:
            self.num_late += not is_full
            self.manager.free(name)
            self.manager.remove_request(name)
            (self.running if name in self.running else self.waiting).remove(name)


def without_cache(prompt: list[int]) -> list[int]:
    """Return the prompt and its answer, computed from all tokens for each new one."""
    token_ids = list(prompt)
    while len(token_ids) < len(prompt) + MAX_ANSWER and STOP not in token_ids[len(prompt) :]:
        token_ids.append(digest([digest(*each) for each in enumerate(token_ids)]) % NUM_TOKEN_IDS)
    return token_ids


system = list(range(100, 110))
prompts = {f"r{n}": system + [200 + n * k for k in range(1, 3 + 5 * n % 17)] for n in range(12)}
engine = Engine(prompts)
engine.serve()
wrong = [name for name in prompts if engine.token_ids[name] != without_cache(prompts[name])]
if wrong:
    raise SystemExit(f"wrong answers: {', '.join(wrong)}")
found = f"{engine.num_hits} positions found in the cache"
print(f"{len(prompts)} answers in {engine.num_steps} steps, {found}")
print(f"{engine.num_preempted} preemptions, {engine.num_late} stops found late")
