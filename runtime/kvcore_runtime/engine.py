# SPDX-License-Identifier: Apache-2.0
"""The reference engine: how one drives kvcore to serve a model, readable top to bottom.

A step (`Engine.step`) is: let the scheduler fill the manager's open batch; take the batch; apply
it to the cache; run the forward pass over the block tables; sample. One batch, one forward pass,
in this order: a taken batch counts as executed.

Samples of one prompt are forked between two steps: the batch that computed the prompt is taken by
then, so the children share all of it, the partial last block too, and the manager copies that
block when one of them writes into it.
"""

import collections
import time
from collections.abc import Callable
from typing import Literal

import attrs
import torch
from torch import Tensor

from kvcore import Config, KVCacheManager, Request
from kvcore.commands import Batch
from kvcore_runtime.apply import Runtime
from kvcore_runtime.attention import PagedAttention
from kvcore_runtime.cache import Cache
from kvcore_runtime.contiguous import Decode
from kvcore_runtime.engine_errors import EngineStuck, InvalidOption, NeverFits, RepeatedRequest
from kvcore_runtime.layout import CacheLayout
from kvcore_runtime.metrics import Metrics, timed
from kvcore_runtime.model import Llama
from kvcore_runtime.sampling import finish_reason, sample
from kvcore_runtime.scheduler import Chunk, Preemption, Scheduler
from kvcore_runtime.sequence import Completion, GenerationRequest, Sequence, name_sequence
from kvcore_runtime.tables import BlockTables

Observer = Callable[["Engine", Batch], None]
"""Called in every step, after the batch was applied: to record, to draw, to test."""


@attrs.frozen(kw_only=True)
class EngineOptions:
    """What an engine does besides its model and its pool.

    backend: of the manager; None for the twin where it is built. token_budget: positions a step
    computes at most. max_sequences: sequences known to the manager at a time, each with a row of
    the block tables; more wait outside. guard: check every read of a block (guard.py).
    keep_logits: hand out the logits behind every token.
    """

    backend: Literal["rust", "python"] | None = None
    token_budget: int = 256
    max_sequences: int = 64
    preemption: Preemption = "swap"
    guard: bool = False
    keep_logits: bool = False

    def __attrs_post_init__(self) -> None:
        for name in ("token_budget", "max_sequences"):
            value = getattr(self, name)
            if value < 1:
                raise InvalidOption(name=name, value=value, least=1)


class Engine:
    """Answers requests with one model out of one pool of blocks.

    config: of the manager; one group, whose blocks hold all layers of the model. decode: ids to
    text, needed for stop strings only. observe: see `Observer`.
    """

    def __init__(
        self,
        model: Llama,
        config: Config,
        options: EngineOptions | None = None,
        *,
        decode: Decode | None = None,
        observe: Observer | None = None,
    ) -> None:
        self.model = model
        self.options = options or EngineOptions()
        self.metrics = Metrics()
        self.manager = timed(KVCacheManager(config, self.options.backend), self.metrics)
        self.scheduler = Scheduler(
            self.manager,
            token_budget=self.options.token_budget,
            preemption=self.options.preemption,
        )
        self.runtime = _make_runtime(model, config, self.options)
        self._decode = decode
        self._observe = observe
        self._backlog: collections.deque[GenerationRequest] = collections.deque()
        self._open: dict[str, int] = {}  # request id to its samples on their way
        self._num_arrived = 0

    @property
    def is_idle(self) -> bool:
        """Whether nothing is on its way."""
        return not self._open

    def add_request(self, request: GenerationRequest) -> None:
        """Take a request in. Raises RepeatedRequest, NeverFits; then nothing has changed."""
        if request.request_id in self._open:
            raise RepeatedRequest(request=request.request_id)
        self._check_fits(request)
        self._open[request.request_id] = request.num_samples
        self._backlog.append(request)
        self.metrics.num_prompt_tokens += len(request.prompt)

    def abort(self, request_id: str) -> None:
        """Drop a request and all its samples, whatever they are doing; unknown ids are ignored."""
        if self._open.pop(request_id, None) is None:
            return
        kept = [each for each in self._backlog if each.request_id != request_id]
        self._backlog = collections.deque(kept)
        for sequence in self.scheduler.unfinished():
            if sequence.request.request_id == request_id:
                self._release(sequence)

    def step(self) -> list[Completion]:
        """Compute one step; returns what finished in it. With nothing on its way does nothing."""
        if self.is_idle:
            return []
        started = time.perf_counter()
        self._take_in()
        chunks = self.scheduler.schedule()
        batch = self.manager.take_batch()
        self.runtime.apply(batch)
        if self._observe is not None:
            self._observe(self, batch)
        if not chunks:
            raise EngineStuck(
                num_unfinished=len(self.scheduler.unfinished()),
                num_free_blocks=self.manager.num_free_blocks,
            )
        logits = self._forward(chunks)
        self.metrics.count_step(batch, chunks, self.manager.usage)
        completions = self._sample([each.sequence for each in chunks if each.is_last], logits)
        self.metrics.seconds += time.perf_counter() - started
        return completions

    def run(self) -> list[Completion]:
        """Step until nothing is on its way; returns all that finished, in that order."""
        completions = []
        while not self.is_idle:
            completions += self.step()
        return completions

    def _check_fits(self, request: GenerationRequest) -> None:
        """Raise NeverFits for what could not be served even alone."""
        name, config = request.request_id, self.manager.config
        num_tokens = len(request.prompt) + request.sampling.max_tokens
        limits = {
            "tokens": (num_tokens, self.model.config.max_model_len),
            # The last token is sampled, never computed, so it takes no slot.
            "blocks": (config.blocks_for(num_tokens - 1), config.num_usable_blocks),
            "sequences": (request.num_samples, self.options.max_sequences),
        }
        for what, (needed, available) in limits.items():
            if needed > available:
                raise NeverFits(request=name, what=what, needed=needed, available=available)

    def _take_in(self) -> None:
        """Make requests known to the manager, in order, while there is a row for each sample."""
        num_known = sum(self._open.values()) - sum(each.num_samples for each in self._backlog)
        while self._backlog:
            request = self._backlog[0]
            num_known += request.num_samples
            if num_known > self.options.max_sequences:
                return
            self._backlog.popleft()
            row = self.manager.add_request(Request(name_sequence(request), request.prompt))
            self.scheduler.add(Sequence(request, arrival=self._num_arrived, row=row))
            self._num_arrived += 1

    def _forward(self, chunks: list[Chunk]) -> Tensor:
        """Compute the chunks; returns the logits behind those that end at their last token."""
        runtime, device = self.runtime, self.model.device
        names = [each.sequence.sequence_id for each in chunks]
        rows = [each.sequence.row for each in chunks]
        starts = [each.start for each in chunks]
        ends = [each.end for each in chunks]
        query_lens = [each.end - each.start for each in chunks]
        runtime.check_reads(rows, ends, names)
        attention = PagedAttention(
            runtime.cache,
            block_tables=runtime.tables.blocks[0][torch.tensor(rows, device=device)],
            slot_mapping=runtime.tables.slot_mapping(
                torch.tensor(rows), torch.tensor(starts), torch.tensor(query_lens)
            ),
            query_lens=query_lens,
            seq_lens=ends,
            invariant=self.model.invariant,
        )
        token_ids = [t for each in chunks for t in each.sequence.tokens(each.start, each.end)]
        wanted = torch.tensor([each.is_last for each in chunks], device=device)
        logits = self.model.forward(
            torch.tensor(token_ids, device=device),
            attention.step.positions(),
            attention,
            attention.step.last_rows()[wanted],
        )
        runtime.check_content(rows, ends, names)
        return logits

    def _sample(self, sequences: list[Sequence], logits: Tensor) -> list[Completion]:
        """Give each sequence its next token; at a prompt's end fork its other samples first."""
        samplers: list[Sequence] = []
        rows: list[int] = []
        for row, sequence in enumerate(sequences):
            samplers.append(sequence)
            if not sequence.generated and sequence.sample == 0:
                samplers += self._fork(sequence)
            rows += [row] * (len(samplers) - len(rows))
        if not samplers:
            return []
        logits = logits[torch.tensor(rows, device=logits.device)]
        places = [len(each.generated) for each in samplers]
        tokens = sample(logits, [each.sampling for each in samplers], places)
        completions = []
        for row, (sequence, token) in enumerate(zip(samplers, tokens, strict=True)):
            sequence.generated.append(token)
            sequence.pending = True
            if self.options.keep_logits:
                sequence.logits.append(logits[row].clone())
            completion = self._finished(sequence)
            if completion is not None:
                self._release(sequence)
                self._close(sequence)
                completions.append(completion)
        self.metrics.num_generated_tokens += len(tokens)
        return completions

    def _fork(self, first: Sequence) -> list[Sequence]:
        """The other samples of a prompt that was just computed, sharing its blocks."""
        children = []
        for sample_index in range(1, first.request.num_samples):
            name = name_sequence(first.request, sample_index)
            row = self.manager.fork(first.sequence_id, name)
            arrival = first.age[0]
            child = Sequence(first.request, arrival=arrival, row=row, sample=sample_index)
            self.scheduler.add_running(child)
            children.append(child)
        return children

    def _finished(self, sequence: Sequence) -> Completion | None:
        decode, generated = self._decode, sequence.generated
        text = decode(generated) if decode is not None and sequence.sampling.stop else ""
        reason = finish_reason(sequence.sampling, generated, text)
        if reason is None:
            return None
        return Completion(
            request_id=sequence.request.request_id,
            sample=sequence.sample,
            tokens=tuple(generated),
            reason=reason,
            logits=torch.stack(sequence.logits) if sequence.logits else None,
        )

    def _release(self, sequence: Sequence) -> None:
        """Give back all that a sequence holds and forget it."""
        self.scheduler.remove(sequence)
        self.manager.free(sequence.sequence_id)
        self.manager.remove_request(sequence.sequence_id)

    def _close(self, sequence: Sequence) -> None:
        """Count a finished sample; the request is closed with its last one."""
        name = sequence.request.request_id
        self._open[name] -= 1
        if self._open[name] == 0:
            del self._open[name]


def _make_runtime(model: Llama, config: Config, options: EngineOptions) -> Runtime:
    """Cache and tables of the sizes that the engine's requests can reach."""
    shape = model.config
    layout = CacheLayout(
        num_layers=shape.num_layers,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        block_size=config.block_size,
        dtype=model.dtype,
    )
    cache = Cache(
        layout, config.num_blocks, config.num_host_blocks, device=model.device, guard=options.guard
    )
    tables = BlockTables(
        max_rows=options.max_sequences,
        max_blocks=min(config.num_usable_blocks, config.blocks_for(shape.max_model_len)),
        max_tokens=options.token_budget,
        block_size=config.block_size,
        device=model.device,
    )
    return Runtime(cache, tables)
