# SPDX-License-Identifier: Apache-2.0
"""The reference path: one contiguous key-value tensor per request.

It does not use blocks, tables or kvcore: each request keeps all its keys, and positions outside a
layer's window are masked. The engine's answers are checked against it, and it is the baseline for
the engine's speed. All requests advance in lock step, in one batch.
"""

from collections.abc import Callable, Sequence

import attrs
import torch
from torch import Tensor

from kvcore_runtime.attention.ragged import RaggedStep, heads_first
from kvcore_runtime.attention.recurrence import Rule
from kvcore_runtime.attention.visibility import FULL
from kvcore_runtime.errors import ShapeMismatch, TooLong
from kvcore_runtime.model.model import Llama, LlamaConfig
from kvcore_runtime.model.sampling import FinishReason, Sampling, finish_reason, sample

Decode = Callable[[Sequence[int]], str]


class ContiguousCache:
    """Keys and values of one request, [num_layers, 2, num_tokens_max, num_kv_heads, head_dim], and
    the states of layers that keep one, by layer.
    """

    def __init__(
        self,
        config: LlamaConfig,
        num_tokens_max: int,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | None = None,
    ) -> None:
        self.visibilities = config.layer_visibilities
        shape = (config.num_layers, 2, num_tokens_max, config.num_kv_heads, config.head_dim)
        self.tensor = torch.zeros(shape, dtype=dtype, device=device)
        self.states = {
            layer: tuple(
                torch.zeros(part.shape, dtype=part.dtype, device=device)
                for part in config.state_parts(dtype)
            )
            for layer, visibility in enumerate(self.visibilities)
            if visibility.is_state
        }

    @property
    def num_tokens_max(self) -> int:
        """Number of positions that fit."""
        return self.tensor.shape[2]


class ContiguousAttention:
    """Attention of one step over one cache per sequence; created for each step."""

    def __init__(
        self,
        caches: Sequence[ContiguousCache],
        *,
        query_lens: Sequence[int],
        seq_lens: Sequence[int],
        invariant: bool = False,
    ) -> None:
        """Prepare a step. seq_lens include its tokens. Raises ShapeMismatch, TooLong."""
        if len(caches) != len(query_lens):
            raise ShapeMismatch(name="caches", expected=(len(query_lens),), actual=(len(caches),))
        for index, (cache, seq_len) in enumerate(zip(caches, seq_lens, strict=False)):
            if seq_len > cache.num_tokens_max:
                raise TooLong(
                    what=f"sequence {index}",
                    num_tokens=seq_len,
                    num_tokens_max=cache.num_tokens_max,
                )
        self._caches = tuple(caches)
        self._visibilities = caches[0].visibilities if caches else (FULL,)
        self._steps = {
            visibility: RaggedStep(
                query_lens=tuple(query_lens),
                seq_lens=tuple(seq_lens),
                invariant=invariant,
                device=caches[0].tensor.device if caches else torch.device("cpu"),
                visibility=visibility,
            )
            for visibility in set(self._visibilities)
        }
        self.step = self._steps[self._visibilities[0]]

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Write k and v of the step to their requests' tensors, then attend. See `Attention`."""
        keys_values = []
        start = 0
        for cache, (query_len, seq_len) in zip(self._caches, self.step.pairs(), strict=True):
            keys, values = cache.tensor[layer]
            keys[seq_len - query_len : seq_len] = k[start : start + query_len]
            values[seq_len - query_len : seq_len] = v[start : start + query_len]
            keys_values.append((heads_first(keys[:seq_len]), heads_first(values[:seq_len])))
            start += query_len
        return self._steps[self._visibilities[layer]].attend(q, keys_values)

    def recur(self, layer: int, like: Tensor, rule: Rule) -> Tensor:
        """Advance the states of the step's requests. See `Attention`."""
        del like
        held = zip(*(cache.states[layer] for cache in self._caches), strict=True)
        states = tuple(torch.stack(parts) for parts in held)
        seen = rule(states, self.step.query_lens, [0] * len(self._caches))
        for index, cache in enumerate(self._caches):
            cache.states[layer] = tuple(each[index] for each in states)
        return seen


@attrs.frozen(kw_only=True, eq=False)
class Generation:
    """The output of one request. logits: [len(tokens), vocab], if they were requested."""

    tokens: tuple[int, ...]
    reason: FinishReason
    logits: Tensor | None = None


def generate_reference(
    model: Llama,
    prompts: Sequence[Sequence[int]],
    samplings: Sequence[Sampling],
    *,
    decode: Decode | None = None,
    keep_logits: bool = False,
) -> list[Generation]:
    """Answer prompts in one lock-step batch, each from a contiguous cache of its own.

    Uses the model's mode: invariant or plain. decode: ids to text, needed only for stop strings.
    Raises TooLong if a prompt with its max_tokens does not fit the model, ShapeMismatch.
    """
    if len(prompts) != len(samplings):
        raise ShapeMismatch(name="samplings", expected=(len(prompts),), actual=(len(samplings),))
    for index, (prompt, sampling) in enumerate(zip(prompts, samplings, strict=True)):
        if not prompt:
            raise ShapeMismatch(name=f"prompt {index}", expected=(1,), actual=(0,))
        model.check_length(f"prompt {index}", len(prompt) + sampling.max_tokens)
    running = [
        _Run(model, prompt, sampling) for prompt, sampling in zip(prompts, samplings, strict=True)
    ]
    for _ in range(max((sampling.max_tokens for sampling in samplings), default=0)):
        active = [run for run in running if run.reason is None]
        if not active:
            break
        _step(model, active, decode, keep_logits)
    return [run.result() for run in running]


class _Run:
    """An unfinished request: its tokens, its cache, and its logits."""

    def __init__(self, model: Llama, prompt: Sequence[int], sampling: Sampling) -> None:
        self.sampling = sampling
        self.pending = list(prompt)
        self.num_computed = 0
        self.generated: list[int] = []
        self.logits: list[Tensor] = []
        self.reason: FinishReason | None = None
        self.cache = ContiguousCache(
            model.config,
            len(prompt) + sampling.max_tokens,
            dtype=model.dtype,
            device=model.device,
        )

    def result(self) -> Generation:
        assert self.reason is not None
        logits = torch.stack(self.logits) if self.logits else None
        return Generation(tokens=tuple(self.generated), reason=self.reason, logits=logits)


def _step(model: Llama, runs: Sequence[_Run], decode: Decode | None, keep_logits: bool) -> None:
    """Compute the pending tokens of all runs and sample each one's next token."""
    attention = ContiguousAttention(
        [run.cache for run in runs],
        query_lens=[len(run.pending) for run in runs],
        seq_lens=[run.num_computed + len(run.pending) for run in runs],
        invariant=model.invariant,
    )
    step = attention.step
    token_ids = torch.tensor([token for run in runs for token in run.pending], device=model.device)
    logits = model.forward(token_ids, step.positions(), attention, step.last_rows())
    indices = [len(run.generated) for run in runs]
    tokens = sample(logits, [run.sampling for run in runs], indices)
    for row, (run, token) in enumerate(zip(runs, tokens, strict=True)):
        run.num_computed += len(run.pending)
        run.pending = [token]
        run.generated.append(token)
        if keep_logits:
            run.logits.append(logits[row].clone())
        text = decode(run.generated) if decode is not None and run.sampling.stop else ""
        run.reason = finish_reason(run.sampling, run.generated, text)
