# SPDX-License-Identifier: Apache-2.0
"""The forward against Llama written out token by token, and the reference path around it."""

import math
from collections.abc import Sequence

import attrs
import pytest
import torch
from kvcore_runtime.errors import ShapeMismatch, TooLong, UnsupportedModelFile
from kvcore_runtime.model.contiguous import (
    ContiguousAttention,
    ContiguousCache,
    Generation,
    generate_reference,
)
from kvcore_runtime.model.model import Llama, LlamaConfig, tiny_config, tiny_model
from kvcore_runtime.model.sampling import FinishReason, Sampling
from torch import Tensor

PROMPT = list(b"A prompt of some length.")


def logits_of(model: Llama, tokens: list[int], rows: Tensor | None = None) -> Tensor:
    n = len(tokens)
    cache = ContiguousCache(model.config, n, dtype=model.dtype)
    attention = ContiguousAttention(
        [cache], query_lens=[n], seq_lens=[n], invariant=model.invariant
    )
    return model.forward(torch.tensor(tokens), torch.arange(n), attention, rows)


def written_out(model: Llama, tokens: list[int]) -> Tensor:
    """Compute Llama by its formulas in fp64, with complex rotations and without a cache."""
    config, weights = model.config, model.weights
    half, d = config.head_dim // 2, config.head_dim

    def norm(x: Tensor, weight: Tensor) -> Tensor:
        return x / (x.square().mean() + config.rms_norm_eps).sqrt() * weight

    def rotated(x: Tensor, position: int) -> Tensor:
        angles = [position * config.rope_theta ** (-2 * i / d) for i in range(half)]
        turns = torch.exp(1j * torch.tensor(angles, dtype=torch.float64))
        turned = torch.complex(x[:half], x[half:]) * turns
        return torch.cat((turned.real, turned.imag))

    xs = [weights.embedding[token] for token in tokens]
    for layer in weights.layers:
        heads = [(layer.qkv @ norm(x, layer.attention_norm)).view(-1, d) for x in xs]
        for position in range(len(xs)):
            seen = []
            for head in range(config.num_heads):
                group_id = head // (config.num_heads // config.num_kv_heads)
                key_row = config.num_heads + group_id
                q = rotated(heads[position][head], position)
                scores = [
                    float(q @ rotated(heads[p][key_row], p)) / math.sqrt(d)
                    for p in range(position + 1)
                ]
                weighted = torch.tensor(scores, dtype=torch.float64).softmax(0)
                values = [heads[p][key_row + config.num_kv_heads] for p in range(position + 1)]
                seen.append(weighted @ torch.stack(values))
            xs[position] = xs[position] + layer.output @ torch.cat(seen)
        for position, x in enumerate(xs):
            gate, up = (layer.gate_up @ norm(x, layer.mlp_norm)).chunk(2)
            xs[position] = x + layer.down @ (gate * gate.sigmoid() * up)
    return torch.stack([weights.head @ norm(x, weights.norm) for x in xs])


@pytest.mark.parametrize("invariant", [False, True])
@pytest.mark.parametrize("tied", [False, True])
def test_the_forward_computes_llama(invariant: bool, tied: bool) -> None:
    model = tiny_model(4, dtype=torch.float64, invariant=invariant, tied=tied)
    torch.testing.assert_close(
        logits_of(model, PROMPT), written_out(model, PROMPT), rtol=1e-10, atol=1e-10
    )


def test_only_the_rows_asked_for_get_logits() -> None:
    model = tiny_model(4, invariant=True)
    rows = torch.tensor([23, 0, 7])
    assert torch.equal(logits_of(model, PROMPT, rows), logits_of(model, PROMPT)[rows])


def test_a_seed_gives_one_model_in_every_dtype() -> None:
    first, again, other = tiny_model(1), tiny_model(1), tiny_model(2)
    assert torch.equal(first.weights.layers[1].down, again.weights.layers[1].down)
    assert not torch.equal(first.weights.layers[1].down, other.weights.layers[1].down)
    wide = tiny_model(1, dtype=torch.float64)
    assert torch.equal(wide.weights.embedding.float(), first.weights.embedding)


def test_tied_models_share_one_tensor() -> None:
    model, untied = tiny_model(0), tiny_model(0, tied=False)
    assert model.weights.head is model.weights.embedding
    assert not torch.equal(untied.weights.head, untied.weights.embedding)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_batch_generates_the_bits_of_each_prompt_alone(dtype: torch.dtype) -> None:
    model = tiny_model(5, dtype=dtype, invariant=True)
    prompts = [PROMPT, PROMPT[:17], list(b"xyz"), PROMPT * 3]
    samplings = [
        Sampling(max_tokens=12),
        Sampling(max_tokens=20, temperature=1.0, seed=3),
        Sampling(max_tokens=5),
        Sampling(max_tokens=9, temperature=0.8, top_p=0.9, seed=4),
    ]
    together = generate_reference(model, prompts, samplings, keep_logits=True)
    for prompt, sampling, found in zip(prompts, samplings, together, strict=True):
        alone = generate_reference(model, [prompt], [sampling], keep_logits=True)[0]
        assert found.tokens == alone.tokens
        assert found.logits is not None
        assert alone.logits is not None
        assert torch.equal(found.logits, alone.logits)
        assert found.logits.shape == (len(found.tokens), model.config.vocab_size)


def test_generated_logits_are_those_of_the_whole_text_in_one_forward() -> None:
    model = tiny_model(6, invariant=True)
    found = generate_reference(model, [PROMPT], [Sampling(max_tokens=20)], keep_logits=True)[0]
    whole = logits_of(model, [*PROMPT, *found.tokens[:-1]])
    assert found.logits is not None
    assert torch.equal(found.logits, whole[len(PROMPT) - 1 :])
    assert found.tokens == tuple(found.logits.argmax(-1).tolist())


def as_text(ids: Sequence[int]) -> str:
    return "".join(chr(token) for token in ids)


def test_generation_ends_for_each_reason() -> None:
    model = tiny_model(6)

    def generate(sampling: Sampling) -> Generation:
        return generate_reference(model, [PROMPT], [sampling], decode=as_text)[0]

    free = generate(Sampling(max_tokens=8))
    assert free.reason is FinishReason.LENGTH
    assert len(free.tokens) == 8
    third = free.tokens[2]
    cut = free.tokens[: free.tokens.index(third) + 1]
    ended = generate(Sampling(max_tokens=8, end_ids=frozenset({third})))
    assert (ended.tokens, ended.reason) == (cut, FinishReason.END)
    stopped = generate(Sampling(max_tokens=8, stop=(chr(third),)))
    assert (stopped.tokens, stopped.reason) == (cut, FinishReason.STOP)


def test_what_does_not_fit_is_refused() -> None:
    model = tiny_model(0, config=attrs.evolve(tiny_config(), max_model_len=32))
    with pytest.raises(TooLong, match="prompt 0 needs 33 positions, there are 32"):
        generate_reference(model, [PROMPT], [Sampling(max_tokens=33 - len(PROMPT))])
    with pytest.raises(ShapeMismatch, match="prompt 0"):
        generate_reference(model, [[]], [Sampling()])
    with pytest.raises(ShapeMismatch, match="samplings"):
        generate_reference(model, [PROMPT], [])
    cache = ContiguousCache(model.config, 4)
    with pytest.raises(TooLong, match="sequence 0 needs 5 positions, there are 4"):
        ContiguousAttention([cache], query_lens=[1], seq_lens=[5])


@pytest.mark.parametrize(
    ("field", "value"), [("num_layers", 0), ("num_kv_heads", 3), ("head_dim", 15)]
)
def test_impossible_shapes_are_refused(field: str, value: int) -> None:
    with pytest.raises(UnsupportedModelFile):
        attrs.evolve(tiny_config(), **{field: value})  # type: ignore[arg-type]  # any field


def test_weights_of_another_shape_are_refused() -> None:
    model = tiny_model(0)
    wider: LlamaConfig = attrs.evolve(model.config, intermediate_size=130)
    with pytest.raises(ShapeMismatch, match="layer 0 gate_up has shape"):
        Llama(config=wider, weights=model.weights)
    deeper = attrs.evolve(model.config, num_layers=3)
    with pytest.raises(ShapeMismatch, match=r"layers has shape \(2,\), expected \(3,\)"):
        Llama(config=deeper, weights=model.weights)
