# SPDX-License-Identifier: Apache-2.0
"""Models with layers that keep a state: which layers those are, and how large a state is.

Mamba, linear attention and short convolutions keep, instead of keys and values, the last inputs of
a convolution and mostly a recurrent state; both have a fixed size. The fields are those of
transformers 5.23's configurations and of the published files; which layer keeps what is listed, or
follows from the family's rule.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import attrs

from kvcore.sizing.errors import MissingField
from kvcore.sizing.fields import Fields
from kvcore.sizing.heads import heads_per_device
from kvcore.sizing.units import DTYPE_BYTES

FULL, STATE = "full_attention", "state"
Kept = tuple[str, ...]
"""What one layer keeps: full attention, a state, both, or nothing."""

_NAMES: dict[str, Kept] = {
    "full_attention": (FULL,),
    "attention": (FULL,),
    "linear_attention": (STATE,),
    "mamba": (STATE,),
    "conv": (STATE,),
    "mlp": (),
    "moe": (),
}
_LETTERS: dict[str, Kept] = {"M": (STATE,), "*": (FULL,), "-": (), "E": ()}
_MAMBA2 = ("nemotron_h", "falcon_h1", "granitemoehybrid")
HYBRID_FAMILIES = frozenset({"qwen3_next", "jamba", "lfm2", *_MAMBA2})


@attrs.frozen(kw_only=True)
class StateLayer:
    """A layer's state in the whole model, in elements.

    positions: tokens whose inputs the convolution keeps. channels: inputs per token that are split
    over devices with the heads; groups: inputs that come in groups of group_channels, of which a
    device keeps one at least. heads: of the recurrent state, each of head_elements. state_dtype: of
    the recurrent state, None for the model's own.
    """

    positions: int
    channels: int
    groups: int = 0
    group_channels: int = 0
    heads: int
    head_elements: int = 0
    state_dtype: str | None = None

    def num_bytes(self, dtype: str, tensor_parallel: int = 1) -> int:
        """Return the bytes of a state on one device. dtype: of the model. Raises
        HeadsDoNotSplit.
        """
        heads = heads_per_device(self.heads, tensor_parallel)
        groups = heads_per_device(self.groups, tensor_parallel) if self.groups else 0
        channels = self.channels // self.heads * heads + groups * self.group_channels
        conv = self.positions * channels * DTYPE_BYTES[dtype]
        return conv + heads * self.head_elements * DTYPE_BYTES[self.state_dtype or dtype]


def count_layers(fields: Fields, family: str, most: int) -> int:
    """Read the number of layers, or count the list that names them."""
    listed = fields.find_list("layers_block_type") if family == "nemotron_h" else None
    if listed is not None and not fields.has("num_hidden_layers"):
        return len(listed)
    return fields.count("num_hidden_layers", "it counts the layers", most=most)


def read_kept(fields: Fields, family: str, num_layers: int) -> tuple[Kept, ...]:
    """Read what each layer keeps. Raises MissingField, InvalidField, ContradictoryFields,
    UnsupportedModel.
    """
    kept = _RULES[family](fields, num_layers)
    if len(kept) != num_layers:
        name = next(each for each in _LISTS if fields.has(each))
        reason = f"{len(kept)} items for {num_layers} layers"
        raise fields.contradiction(name, "num_hidden_layers", reason)
    return kept


def read_state(fields: Fields, family: str) -> StateLayer:
    """Read the state that the layers of a family keep. Raises MissingField, InvalidField."""
    if family == "lfm2":
        hidden = fields.count("hidden_size", "a short convolution keeps that many inputs per token")
        length = fields.count("conv_L_cache", "it is the length of the convolution", least=2)
        return StateLayer(positions=length - 1, channels=hidden, heads=hidden)
    if family == "qwen3_next":
        return _gated_delta_net(fields)
    return _mamba1(fields) if family == "jamba" else _mamba2(fields, family)


def _gated_delta_net(fields: Fields) -> StateLayer:
    def size(name: str) -> int:
        return fields.count(name, "the state of linear attention follows from it")

    value_heads, key_heads = size("linear_num_value_heads"), size("linear_num_key_heads")
    key_size, value_size = size("linear_key_head_dim"), size("linear_value_head_dim")
    return StateLayer(
        positions=size("linear_conv_kernel_dim") - 1,
        channels=value_heads * value_size,
        groups=key_heads,
        group_channels=2 * key_size,
        heads=value_heads,
        head_elements=key_size * value_size,
        state_dtype=_state_dtype(fields),
    )


def _mamba1(fields: Fields) -> StateLayer:
    inner = _inner_size(fields, "mamba_expand")
    return StateLayer(
        positions=fields.count("mamba_d_conv", "it is the length of the convolution") - 1,
        channels=inner,
        heads=inner,
        head_elements=fields.count("mamba_d_state", "each channel keeps that many numbers"),
        state_dtype=_state_dtype(fields),
    )


def _mamba2(fields: Fields, family: str) -> StateLayer:
    nemotron = family == "nemotron_h"
    names = {
        "heads": "mamba_num_heads" if nemotron else "mamba_n_heads",
        "size": "mamba_head_dim" if nemotron else "mamba_d_head",
        "state": "ssm_state_size" if nemotron else "mamba_d_state",
        "groups": "n_groups" if nemotron else "mamba_n_groups",
        "length": "conv_kernel" if nemotron else "mamba_d_conv",
    }

    def size(part: str) -> int:
        return fields.count(names[part], "the state of Mamba-2 follows from it")

    heads, state = size("heads"), size("state")
    if fields.values.get(names["size"]) == "auto":
        head_size = _inner_size(fields, "mamba_expand") // heads
    else:
        head_size = size("size")
    said = fields.find_count("mamba_d_ssm")
    if said is not None and said != heads * head_size:
        reason = f"{heads} heads of {head_size} are {heads * head_size}"
        raise fields.contradiction("mamba_d_ssm", names["heads"], reason)
    return StateLayer(
        positions=size("length") - 1,
        channels=heads * head_size,
        groups=size("groups"),
        group_channels=2 * state,
        heads=heads,
        head_elements=head_size * state,
        state_dtype=_state_dtype(fields),
    )


def _inner_size(fields: Fields, expand: str) -> int:
    hidden = fields.count("hidden_size", f"{expand} of it is the inner size")
    return hidden * fields.count(expand, "of hidden_size it is the inner size")


def _state_dtype(fields: Fields) -> str | None:
    for name in ("mamba_ssm_cache_dtype", "mamba_ssm_dtype"):
        said = fields.find_text(name)
        if said is not None and said != "auto":
            if said not in DTYPE_BYTES:
                raise fields.invalid(name, f"one of {', '.join(DTYPE_BYTES)}")
            return said
    return None


def _listed(name: str) -> Callable[[Fields], tuple[Kept, ...] | None]:
    def read(fields: Fields) -> tuple[Kept, ...] | None:
        given = fields.find_list(name)
        return None if given is None else _kept(fields, name, given, _NAMES)

    return read


def _kept(
    fields: Fields, field: str, items: Sequence[Any], known: dict[str, Kept]
) -> tuple[Kept, ...]:
    for index, item in enumerate(items):
        if not isinstance(item, str) or item not in known:
            reason = f"known are {', '.join(known)}"
            raise fields.unsupported(f"{field}[{index}]", item, reason)
    return tuple(known[item] for item in items)


def _qwen3_next(fields: Fields, num_layers: int) -> tuple[Kept, ...]:
    listed = _listed("layer_types")(fields)
    if listed is not None:
        return listed
    interval = fields.find_count("full_attention_interval") or 4
    return tuple((STATE,) if number % interval else (FULL,) for number in range(1, num_layers + 1))


def _nemotron_h(fields: Fields, num_layers: int) -> tuple[Kept, ...]:
    del num_layers
    pattern = fields.find_text("hybrid_override_pattern")
    if pattern is not None:
        return _kept(fields, "hybrid_override_pattern", pattern, _LETTERS)
    listed = _listed("layers_block_type")(fields)
    if listed is None:
        _missing(fields, "layers_block_type")
    return listed


def _jamba(fields: Fields, num_layers: int) -> tuple[Kept, ...]:
    reason = "it says which layers are attention"
    period = fields.count("attn_layer_period", reason)
    offset = fields.count("attn_layer_offset", reason, least=0)
    return tuple((FULL,) if i % period == offset else (STATE,) for i in range(num_layers))


def _falcon_h1(fields: Fields, num_layers: int) -> tuple[Kept, ...]:
    del fields
    return ((FULL, STATE),) * num_layers


def _granite(fields: Fields, num_layers: int) -> tuple[Kept, ...]:
    del num_layers
    listed = _listed("layer_types")(fields)
    if listed is None:
        _missing(fields, "layer_types")
    return listed


def _lfm2(fields: Fields, num_layers: int) -> tuple[Kept, ...]:
    listed = _listed("layer_types")(fields)
    if listed is not None:
        return listed
    full = fields.find_list("full_attn_idxs")
    if full is None:
        _missing(fields, "layer_types")
    return tuple((FULL,) if index in full else (STATE,) for index in range(num_layers))


def _missing(fields: Fields, name: str) -> NoReturn:
    raise MissingField(file=fields.file, field=name, reason="it says what each layer keeps")


_LISTS = ("layer_types", "hybrid_override_pattern", "layers_block_type")
_RULES: dict[str, Callable[[Fields, int], tuple[Kept, ...]]] = {
    "qwen3_next": _qwen3_next,
    "nemotron_h": _nemotron_h,
    "jamba": _jamba,
    "falcon_h1": _falcon_h1,
    "granitemoehybrid": _granite,
    "lfm2": _lfm2,
}
