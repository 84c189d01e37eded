# SPDX-License-Identifier: Apache-2.0
"""Cache specs, groups and configurations of vLLM 0.8.5.

`read_spec` converts a spec to the corresponding spec of `kvcore.sizing`, which computes all sizes.
Any object with the attributes of a spec is one; `sliding_window` makes it a window. dtype: a name,
or an object whose text is one (`torch.float16`). These are dataclasses, since engines copy them
with `dataclasses.replace`, and change them in place. Source: S001-45 to 47, 59.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import attrs

from kvcore import sizing
from kvcore.legacy.v1_0_8.errors import of_original_kind
from kvcore.sizing import LayerSpec, Limits
from kvcore.types.errors import WrongArgument

SHAPE = ("block_size", "num_kv_heads", "head_size", "dtype")
LIMITS = (
    "model_config.max_model_len",
    "scheduler_config.max_num_batched_tokens",
    "cache_config.num_gpu_blocks_override",
)


def read_fields(name: str, value: Any, *fields: str) -> dict[str, Any]:
    """Return attributes of an engine's object, nested ones too (`a.b`). Raises WrongArgument."""
    try:
        return {field: attrgetter(field)(value) for field in fields}
    except AttributeError:
        expected = f"an object with {', '.join(fields)}"
        raise WrongArgument(name=name, expected=expected, value=value) from None


@dataclass
class KVCacheSpec:
    """The cache layout of a layer. block_size: tokens per block."""

    block_size: int

    @property
    def type_id(self) -> str:
        """A text that is equal for layers whose blocks have the same layout."""
        return read_spec(self).type_id

    @property
    def page_size_bytes(self) -> int:
        """The size of one block in bytes."""
        return read_spec(self).page_bytes

    def max_memory_usage_bytes(self, vllm_config: Any) -> int:
        """Return the bytes that one request of full length needs."""
        return read_spec(self).max_bytes(read_limits(vllm_config))


@dataclass
class AttentionSpec(KVCacheSpec):
    """An attention layer: number and size of heads, dtype, and whether it is MLA."""

    num_kv_heads: int
    head_size: int
    dtype: Any
    use_mla: bool = False


@dataclass
class FullAttentionSpec(AttentionSpec):
    """An attention layer whose queries see all earlier tokens."""


@dataclass
class SlidingWindowSpec(AttentionSpec):
    """A layer whose queries see sliding_window tokens, the query's own included.

    Raises WindowWithMla, InvalidCount.
    """

    sliding_window: int = 0

    def __post_init__(self) -> None:
        read_spec(self)


@dataclass
class KVCacheTensor:
    """The tensor of one layer. size: in bytes."""

    size: int


@dataclass
class KVCacheGroupSpec:
    """Layers that share one block table."""

    layer_names: list[str]
    kv_cache_spec: Any


@dataclass
class KVCacheConfig:
    """A worker's memory: blocks, a tensor for each layer, and the groups of layers."""

    num_blocks: int
    tensors: dict[str, KVCacheTensor]
    kv_cache_groups: list[KVCacheGroupSpec]


@attrs.frozen(kw_only=True)
class AnyFullSpec(sizing.FullAttentionSpec):
    """Full attention in this release: MLA is the same kind, with another page size."""

    kind = sizing.FullAttentionSpec.name


@of_original_kind()
def read_spec(spec: Any) -> sizing.AttentionSpec:
    """Return the spec of `kvcore.sizing` for a layer; a spec of `kvcore.sizing` is returned as is.

    Raises WrongArgument, InvalidCount, UnknownDtype, WindowWithMla.
    """
    if isinstance(spec, sizing.AttentionSpec):
        return spec
    shape = read_fields("a spec", spec, *SHAPE)
    shape["dtype"] = str(shape["dtype"]).removeprefix("torch.")
    shape["use_mla"] = bool(getattr(spec, "use_mla", False))
    window = getattr(spec, "sliding_window", None)
    if window is None:
        return AnyFullSpec(**shape)
    return sizing.SlidingWindowSpec(window=window, **shape)


def read_specs(kv_cache_spec: Mapping[str, Any]) -> dict[str, LayerSpec]:
    """Return the specs of a model's layers as specs of `kvcore.sizing`."""
    return {name: read_spec(spec) for name, spec in kv_cache_spec.items()}


def read_limits(vllm_config: Any) -> Limits:
    """Return the limits that a configuration sets for a request.

    Raises WrongArgument, InvalidCount.
    """
    longest, batched, num_blocks = read_fields("vllm_config", vllm_config, *LIMITS).values()
    return Limits(max_model_len=longest, max_num_batched_tokens=batched, num_blocks=num_blocks)
