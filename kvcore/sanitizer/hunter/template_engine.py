# SPDX-License-Identifier: Apache-2.0
"""The engine of the template: it stands for yours, and knows nothing of kvcore."""


class Request:
    """A request: its tokens, its computed count, and its blocks."""

    def __init__(self, name: str, prompt: list[int], new: int) -> None:
        self.name, self.tokens, self.ends = name, list(prompt), len(prompt) + new
        self.computed = self.scheduled = 0
        self.blocks: list[int] = []


class Scheduler:
    """Blocks, a prefix cache by content, chunks of prefill, and preemption by recomputation."""

    def __init__(self, num_blocks: int, block_size: int, budget: int, rows: int) -> None:
        self.block_size, self.budget, self.rows = block_size, budget, rows
        self.free = list(range(num_blocks))
        self.owners = [0] * num_blocks
        self.cached: dict[tuple[int, ...], int] = {}
        self.waiting: list[Request] = []
        self.running: list[Request] = []

    def schedule(self) -> list[Request]:
        """Return the requests of the next batch, each with its number of scheduled tokens."""
        batch: list[Request] = []
        budget = self.budget
        for request in [*self.running, *self.waiting]:
            if not budget or len(batch) == self.rows:
                break
            if request in self.running or request in self.waiting:  # it may have been preempted
                if not request.blocks:
                    self.hit(request)
                count = min(budget, len(request.tokens) - request.computed)
                if self.grow(request, request.computed + count, batch):
                    request.scheduled, budget = count, budget - count
                    batch.append(request)
        self.waiting = [each for each in self.waiting if each not in batch]
        self.running += [each for each in batch if each not in self.running]
        return batch

    def update(self, batch: list[Request], answers: list[int]) -> None:
        """Process a batch that ran: its full blocks become hits, and requests with all their tokens
        leave.
        """
        for request, answer in zip(batch, answers, strict=True):
            request.computed += request.scheduled
            for end in range(self.block_size, request.computed + 1, self.block_size):
                block = request.blocks[end // self.block_size - 1]
                self.cached.setdefault(tuple(request.tokens[:end]), block)
            if request.computed == len(request.tokens):
                request.tokens.append(answer)
                if len(request.tokens) == request.ends:
                    self.leave(request)

    def hit(self, request: Request) -> None:
        """Take the blocks of the longest cached prefix, but not of the last token."""
        for end in range(self.block_size, len(request.tokens), self.block_size):
            block = self.cached.get(tuple(request.tokens[:end]))
            if block is None:
                return
            if not self.owners[block]:
                self.free.remove(block)
            self.owners[block] += 1
            request.blocks.append(block)
            request.computed = end

    def grow(self, request: Request, length: int, batch: list[Request]) -> bool:
        """Allocate blocks for this many tokens, from the newest unscheduled request if none is
        free.
        """
        while len(request.blocks) * self.block_size < length:
            if not self.free:
                others = [each for each in self.running if each not in batch and each != request]
                self.release(request if not others else others[-1])
                if not others:
                    return False
                continue
            block = self.free.pop(0)
            self.cached = {key: held for key, held in self.cached.items() if held != block}
            self.owners[block] = 1
            request.blocks.append(block)
        return True

    def release(self, request: Request) -> None:
        """Preempt a request: free its blocks, the last first."""
        for block in reversed(request.blocks):
            self.owners[block] -= 1
            if not self.owners[block]:
                self.free.append(block)
        request.blocks, request.computed = [], 0
        if request in self.running:
            self.running.remove(request)
            self.waiting.insert(0, request)

    def leave(self, request: Request) -> None:
        """Remove a finished or aborted request."""
        self.release(request)
        self.waiting.remove(request)
