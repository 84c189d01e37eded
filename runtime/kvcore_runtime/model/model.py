# SPDX-License-Identifier: Apache-2.0
"""A Llama-shaped forward over a flat ragged batch.

The tokens of all sequences of a step are concatenated in one dimension. Everything except attention
treats each row alone, so only the `Attention` object knows which rows belong together and where
their keys and values are: in blocks (`attention.py`) or in one tensor per request
(`contiguous.py`). The same forward runs over both.

Invariant mode pads the rows of the step to a multiple of `ROW_TILE`: matrix products of fewer rows
use other kernels, which add in a different order. With padding, a row's bits depend only on that
row.
"""

from collections.abc import Callable
from functools import partial
from typing import Protocol, TypeAlias

import attrs
import torch
from torch import Tensor
from torch.nn import functional

from kvcore_runtime.attention.delta_rule import DeltaShape, advance_delta
from kvcore_runtime.attention.recurrence import Rule, advance
from kvcore_runtime.attention.visibility import FULL, Visibility
from kvcore_runtime.cache.layout import StatePart
from kvcore_runtime.errors import ShapeMismatch, TooLong, UnsupportedModelFile
from kvcore_runtime.model.rope import rope_table, rotate

ROW_TILE = 16
"""Rows of a matrix product are a multiple of this in invariant mode."""


Reduce: TypeAlias = Callable[[Tensor], Tensor]
"""Adds a layer's output, a part of a sum, to that of the other ranks."""


class Attention(Protocol):
    """Writes and reads the keys and values, or the states, of the sequences of one step."""

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Write k and v of the step's tokens in this layer, then attend to all that q may see.

        q: [T, num_heads, head_dim]; k, v: [T, num_kv_heads, head_dim]. Returns a tensor like q.
        """
        ...

    def recur(self, layer: int, like: Tensor, rule: Rule) -> Tensor:
        """Advance the sequences' states in this layer by a rule. like: of the result's shape."""
        ...


@attrs.frozen(kw_only=True)
class LlamaConfig:
    """The shape of a model; sizes in elements, lengths in tokens.

    visibilities: of each layer, () for full attention in all; a layer of kind `state` is gated
    linear attention, or a delta net of this shape (delta_rule.py). Raises UnsupportedModelFile.
    """

    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    rope_theta: float = 10_000.0
    rms_norm_eps: float = 1e-5
    max_model_len: int = 8192
    visibilities: tuple[Visibility, ...] = ()
    delta: DeltaShape | None = None

    def __attrs_post_init__(self) -> None:
        for field in attrs.fields(LlamaConfig):
            value = getattr(self, field.name)
            if field.name not in ("visibilities", "delta") and value <= 0:
                raise UnsupportedModelFile(
                    what=field.name, value=value, expected="a positive number"
                )
        if len(self.layer_visibilities) != self.num_layers:
            num_given = len(self.visibilities)
            expected = f"one for each of {self.num_layers} layers"
            raise UnsupportedModelFile(what="visibilities", value=num_given, expected=expected)
        if self.num_heads % self.num_kv_heads:
            raise UnsupportedModelFile(
                what="num_heads",
                value=self.num_heads,
                expected=f"a multiple of {self.num_kv_heads}",
            )
        if self.head_dim % 2:
            raise UnsupportedModelFile(
                what="head_dim", value=self.head_dim, expected="an even number"
            )

    @property
    def layer_visibilities(self) -> tuple[Visibility, ...]:
        """The visibility of each layer."""
        return self.visibilities or (FULL,) * self.num_layers

    def state_parts(self, dtype: torch.dtype) -> tuple[StatePart, ...]:
        """Return the parts of the state of a layer that keeps one. dtype: of the model."""
        if self.delta is not None:
            return self.delta.parts(dtype)
        return (StatePart((self.num_kv_heads, self.head_dim, self.head_dim)),)

    def delta_of(self, layer: int) -> DeltaShape | None:
        """Return the shape of a layer that is a delta net, None for any other."""
        return self.delta if self.layer_visibilities[layer].is_state else None

    def qkv_size(self, layer: int) -> int:
        """Return the width of a layer's joint projection to queries, keys, values and, if it keeps
        a state, gates; see `DeltaShape.projections`, too.
        """
        if (delta := self.delta_of(layer)) is not None:
            return sum(delta.projections)
        num_parts = 3 if self.layer_visibilities[layer].is_state else 2
        return (self.num_heads + num_parts * self.num_kv_heads) * self.head_dim

    def output_size(self, layer: int) -> int:
        """Return how many numbers a layer's attention or state gives for a token."""
        delta = self.delta_of(layer)
        return self.num_heads * self.head_dim if delta is None else delta.output_size


@attrs.frozen(kw_only=True, eq=False)
class LayerWeights:
    """One layer; matrices are [out, in]. Projections that read the same input are joined."""

    attention_norm: Tensor  # [hidden]
    qkv: Tensor  # [qkv_size, hidden]: queries, keys, values; of a state also gates
    output: Tensor  # [hidden, output_size]
    mlp_norm: Tensor  # [hidden]
    gate_up: Tensor  # [2 * intermediate, hidden]: gate, then up
    down: Tensor  # [hidden, intermediate]


@attrs.frozen(kw_only=True, eq=False)
class DeltaWeights(LayerWeights):
    """A layer that is a delta net. qkv: its joint projection, see `DeltaShape.projections`."""

    kernel: Tensor  # [kernel_size, inputs of the convolution]
    decay_log: Tensor  # [num_value_heads]
    decay_bias: Tensor  # [num_value_heads]
    read_norm: Tensor  # [value_dim]


@attrs.frozen(kw_only=True, eq=False)
class LlamaWeights:
    """All weights of a model, of one dtype and on one device."""

    embedding: Tensor  # [vocab, hidden]
    layers: tuple[LayerWeights, ...]
    norm: Tensor  # [hidden]
    head: Tensor  # [vocab, hidden]; the embedding itself if the two are tied


@attrs.frozen(kw_only=True, eq=False)
class Llama:
    """A model: shape, weights and mode.

    invariant: a token's logits have the same bits whatever else is in the step; the attention
    object given to `forward` must be in the same mode. reduce: if this is a rank's share of a model
    (`kvcore_runtime.ranks`), called on the output of each attention and each MLP.
    """

    config: LlamaConfig
    weights: LlamaWeights
    invariant: bool = False
    reduce: Reduce | None = attrs.field(default=None, repr=False)
    rope: Tensor = attrs.field(init=False, repr=False)  # [2, max_model_len, head_dim]: cos, sin

    def __attrs_post_init__(self) -> None:
        _check_shapes(self.config, self.weights)
        config, like = self.config, self.weights.embedding
        table = rope_table(config.head_dim, config.max_model_len, config.rope_theta, like)
        object.__setattr__(self, "rope", table)

    @property
    def dtype(self) -> torch.dtype:
        """The element type of weights, activations and cache."""
        return self.weights.embedding.dtype

    @property
    def device(self) -> torch.device:
        """The device of weights, tokens and cache."""
        return self.weights.embedding.device

    @torch.no_grad()
    def forward(
        self, token_ids: Tensor, positions: Tensor, attention: Attention, rows: Tensor | None = None
    ) -> Tensor:
        """Run one step and return the logits of some of its rows.

        token_ids, positions: [T] int64 on the model's device, T >= 1, sequences one after another;
        positions count from 0 in each sequence. rows: [R] int64 indices into T, all if None.
        Returns [R, vocab]. Raises ShapeMismatch.
        """
        hidden = self.hidden(token_ids, positions, attention)
        if rows is not None:
            hidden = hidden.index_select(0, rows)
        num_rows = hidden.shape[0]
        return functional.linear(self._pad_rows(hidden), self.weights.head)[:num_rows]

    def hidden(self, token_ids: Tensor, positions: Tensor, attention: Attention) -> Tensor:
        """Run one step up to the final norm: [T] -> [T, hidden]. Arguments as for `forward`."""
        if token_ids.shape != positions.shape:
            raise ShapeMismatch(name="positions", expected=token_ids.shape, actual=positions.shape)
        num_tokens = token_ids.shape[0]
        x = self._pad_rows(functional.embedding(token_ids, self.weights.embedding))
        cos, sin = self.rope.index_select(1, positions).unsqueeze(2)
        for index, layer in enumerate(self.weights.layers):
            if isinstance(layer, DeltaWeights):
                x = x + self._sum(self._delta(index, layer, x, len(cos), attention))
            else:
                x = x + self._sum(self._attention(index, layer, x, cos, sin, attention))
            x = x + self._sum(self._mlp(layer, x))
        return self._norm(x, self.weights.norm)[:num_tokens]

    def check_length(self, what: str, num_tokens: int) -> None:
        """Raise TooLong if a sequence of this many tokens does not fit the model."""
        if num_tokens > self.config.max_model_len:
            raise TooLong(
                what=what, num_tokens=num_tokens, num_tokens_max=self.config.max_model_len
            )

    def _attention(
        self, index: int, layer: LayerWeights, x: Tensor, cos: Tensor, sin: Tensor, to: Attention
    ) -> Tensor:
        config = self.config
        num_tokens = cos.shape[0]
        qkv = functional.linear(self._norm(x, layer.attention_norm), layer.qkv)[:num_tokens]
        num_rotated = config.num_heads + config.num_kv_heads
        heads = qkv.view(num_tokens, -1, config.head_dim)
        rotated = rotate(heads[:, :num_rotated], cos, sin)
        q, k = rotated.split_with_sizes((config.num_heads, config.num_kv_heads), dim=1)
        v, *gates = heads[:, num_rotated:].split(config.num_kv_heads, dim=1)
        if gates:
            seen = to.recur(index, q, partial(advance, q=q, k=k, v=v, gates=gates[0]))
        else:
            seen = to.attend(index, q, k, v)
        return functional.linear(self._pad_rows(seen.reshape(num_tokens, -1)), layer.output)

    def _delta(
        self, index: int, layer: DeltaWeights, x: Tensor, num_tokens: int, to: Attention
    ) -> Tensor:
        shape = self.config.delta
        assert shape is not None
        joint = functional.linear(self._norm(x, layer.attention_norm), layer.qkv)[:num_tokens]
        inputs, gates, rates, decays = joint.split_with_sizes(shape.projections, dim=1)
        rule = partial(
            advance_delta,
            shape=shape,
            inputs=inputs,
            rates=rates,
            decays=decays,
            kernel=layer.kernel,
            decay_log=layer.decay_log,
            decay_bias=layer.decay_bias,
        )
        gates = gates.unflatten(1, (-1, shape.value_dim)).float()
        read = self._norm(to.recur(index, gates, rule), layer.read_norm.float())
        seen = (read * functional.silu(gates)).to(x.dtype)
        return functional.linear(self._pad_rows(seen.flatten(1)), layer.output)

    def _mlp(self, layer: LayerWeights, x: Tensor) -> Tensor:
        gate, up = functional.linear(self._norm(x, layer.mlp_norm), layer.gate_up).chunk(2, dim=-1)
        return functional.linear(functional.silu(gate) * up, layer.down)

    def _sum(self, part: Tensor) -> Tensor:
        return part if self.reduce is None else self.reduce(part)

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return functional.rms_norm(x, weight.shape, weight, self.config.rms_norm_eps)

    def _pad_rows(self, x: Tensor) -> Tensor:
        missing = -x.shape[0] % ROW_TILE if self.invariant else 0
        return functional.pad(x, (0, 0, 0, missing)) if missing else x


def tiny_config(
    vocab_size: int = 260,
    max_model_len: int = 2048,
    *,
    visibilities: tuple[Visibility, ...] = (),
) -> LlamaConfig:
    """Describe the tiny test model: hidden 64, 4 query and 2 key-value heads.

    visibilities: one per layer; () for two layers of full attention.
    """
    return LlamaConfig(
        num_layers=len(visibilities) or 2,
        visibilities=visibilities,
        hidden_size=64,
        intermediate_size=128,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        vocab_size=vocab_size,
        max_model_len=max_model_len,
    )


def tiny_model(
    seed: int = 0,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    invariant: bool = False,
    config: LlamaConfig | None = None,
    tied: bool = True,
) -> Llama:
    """Return a model of random weights: the same seed gives the same weights, in every dtype.

    Logits are spread widely enough that two tokens almost never tie. config: `tiny_config()`.
    """
    shape = tiny_config() if config is None else config
    random = torch.Generator().manual_seed(seed)
    ones = torch.ones(shape.hidden_size, dtype=dtype, device=device)

    def draw(rows: int, columns: int, scale: float) -> Tensor:
        values = torch.randn(rows, columns, generator=random, dtype=torch.float64)
        return (values * scale).to(device, dtype)

    def layer(index: int) -> LayerWeights:
        hidden, inner = shape.hidden_size, shape.intermediate_size
        size, delta = shape.output_size(index), shape.delta_of(index)
        drawn = LayerWeights(
            attention_norm=ones,
            qkv=draw(shape.qkv_size(index), hidden, 1.5 * hidden**-0.5),
            output=draw(hidden, size, size**-0.5),
            mlp_norm=ones,
            gate_up=draw(2 * inner, hidden, hidden**-0.5),
            down=draw(hidden, inner, inner**-0.5),
        )
        return drawn if delta is None else _with_delta(drawn, delta, draw)

    embedding = draw(shape.vocab_size, shape.hidden_size, 0.5)
    layers = tuple(map(layer, range(shape.num_layers)))
    head = embedding if tied else draw(shape.vocab_size, shape.hidden_size, 0.5)
    weights = LlamaWeights(embedding=embedding, layers=layers, norm=ones, head=head)
    return Llama(config=shape, weights=weights, invariant=invariant)


def _with_delta(
    drawn: LayerWeights, shape: DeltaShape, draw: Callable[[int, int, float], Tensor]
) -> DeltaWeights:
    """Add the weights of a delta net to a layer; most decays are near 1, so that it remembers."""
    heads = shape.num_value_heads
    return DeltaWeights(
        **attrs.asdict(drawn, recurse=False),
        kernel=draw(shape.kernel_size, sum(shape.head_sizes), 1.0),
        decay_log=draw(1, heads, 0.5)[0] - 3,
        decay_bias=draw(1, heads, 0.5)[0],
        read_norm=torch.ones_like(drawn.mlp_norm[:1]).repeat(shape.value_dim),
    )


def _check_shapes(config: LlamaConfig, weights: LlamaWeights) -> None:
    """Raise ShapeMismatch unless every weight has the configured shape."""
    hidden, inner = config.hidden_size, config.intermediate_size
    layer_shapes = {
        "attention_norm": (hidden,),
        "mlp_norm": (hidden,),
        "gate_up": (2 * inner, hidden),
        "down": (hidden, inner),
    }
    expected: list[tuple[str, tuple[int, ...], Tensor]] = [
        ("embedding", (config.vocab_size, hidden), weights.embedding),
        ("norm", (hidden,), weights.norm),
        ("head", (config.vocab_size, hidden), weights.head),
    ]
    if len(weights.layers) != config.num_layers:
        raise ShapeMismatch(
            name="layers", expected=(config.num_layers,), actual=(len(weights.layers),)
        )
    absent = torch.empty(0)  # has no weight's shape
    for index, layer in enumerate(weights.layers):
        own = {
            "qkv": (config.qkv_size(index), hidden),
            "output": (hidden, config.output_size(index)),
        }
        shapes: dict[str, tuple[int, ...]] = layer_shapes | own
        if (delta := config.delta_of(index)) is not None:
            shapes |= {
                "kernel": (delta.kernel_size, sum(delta.head_sizes)),
                "decay_log": (delta.num_value_heads,),
                "decay_bias": (delta.num_value_heads,),
                "read_norm": (delta.value_dim,),
            }
        for name, shape in shapes.items():
            weight = getattr(layer, name, absent)
            expected.append((f"layer {index} {name}", shape, weight))
    for name, shape, tensor in expected:
        if tuple(tensor.shape) != shape:
            raise ShapeMismatch(name=name, expected=shape, actual=tensor.shape)
