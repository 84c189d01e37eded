# SPDX-License-Identifier: Apache-2.0
"""A scheduler over a real manager, for stories with a handful of blocks of four tokens."""

from kvcore_runtime.engine.drafts import Drafter
from kvcore_runtime.engine.exchange import Exchange
from kvcore_runtime.engine.scheduler import EngineScheduler, Preemption
from kvcore_runtime.engine.sequence import GenerationRequest, Sequence
from kvcore_runtime.model.sampling import Sampling

from kvcore import Config, KVCacheManager, Request
from tests.conftest import Backend


class World:
    """A manager, a scheduler over it, and sequences that begin with distinct tokens."""

    def __init__(
        self,
        backend: Backend,
        *,
        num_blocks: int,
        num_host_blocks: int = 0,
        token_budget: int = 100,
        preemption: Preemption = "swap",
        max_in_flight: int = 0,
        drafter: Drafter | None = None,
        exchange: Exchange | None = None,
    ) -> None:
        config = Config(
            num_blocks,
            4,
            num_host_blocks=num_host_blocks,
            null_block=False,
            max_in_flight=max_in_flight,
        )
        self.manager = KVCacheManager(config, backend)
        self.scheduler = EngineScheduler(
            self.manager,
            token_budget=token_budget,
            preemption=preemption,
            drafter=drafter,
            exchange=exchange,
        )
        self.num_arrived = 0

    def sequence(self, name: str, num_tokens: int, max_tokens: int = 16) -> Sequence:
        """Return a sequence that the manager knows and that is in no queue."""
        self.num_arrived += 1
        first = 1000 * self.num_arrived
        prompt = tuple(range(first, first + num_tokens))
        request = GenerationRequest(
            request_id=name, prompt=prompt, sampling=Sampling(max_tokens=max_tokens)
        )
        row = self.manager.add_request(Request(name, prompt))
        return Sequence(request, arrival=self.num_arrived, row=row)

    def running(self, name: str, num_tokens: int, *, computed: int) -> Sequence:
        """Return a sequence with blocks for this many tokens, decoding if its prompt has no
        more.
        """
        sequence = self.sequence(name, num_tokens)
        assert self.manager.allocate_slots(name, computed)
        self.take_batch()
        if computed == num_tokens:
            sequence.generated.append(7)
            sequence.has_new_token = True
        self.scheduler.add_fork(sequence)
        return sequence

    def take_batch(self) -> int:
        """Take the batch, and complete it if it is in flight. Returns its number."""
        number = self.manager.take_batch().number
        if number in self.manager.in_flight:
            self.manager.complete(number)
        return number

    def leave(self, sequence: Sequence) -> None:
        """Let a sequence finish."""
        self.scheduler.remove(sequence)
        self.manager.free(sequence.sequence_id)
        self.manager.remove_request(sequence.sequence_id)

    def step(self) -> list[tuple[str, int, int]]:
        """Schedule a step and take its batch. Returns (name, start, end) of each chunk."""
        chunks = self.scheduler.schedule()
        self.manager.take_batch()
        self.manager.check()
        return [(each.sequence.sequence_id, each.start, each.end) for each in chunks]
