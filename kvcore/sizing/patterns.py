# SPDX-License-Identifier: Apache-2.0
"""Decides which layers of a model see everything, which a sliding window, and which a chunk.

A list (`layer_types`) gives the kind of each layer and overrides every rule. Without one, the
model's family decides: Llama 4 by `no_rope_layers` or every fourth layer, Gemma 3 by
`sliding_window_pattern`, Gemma 2 and gpt-oss alternate, Qwen from layer `max_window_layers` on, and
only if `use_sliding_window` is set; all others (Mistral) have the window in every layer.
"""

from __future__ import annotations

from kvcore.sizing.errors import MissingField
from kvcore.sizing.fields import Fields
from kvcore.types.groups import Kind

_LAYER_TYPES: dict[str, Kind] = {
    "full_attention": "full_attention",
    "sliding_attention": "sliding_window",
    "chunked_attention": "chunked_local",
}
_WINDOW_FIELD: dict[Kind, str] = {
    "sliding_window": "sliding_window",
    "chunked_local": "attention_chunk_size",
}
_FULL: Kind = "full_attention"
_SLIDING: Kind = "sliding_window"
_PATTERNS = ("sliding_window_pattern", "_sliding_window_pattern")
_PATTERN_OF = {"gemma2": 2, "gpt_oss": 2, "gemma3": 6, "gemma3_text": 6}
"""Family -> its distance between layers of full attention, if the file does not give it."""
_CHUNKED = ("llama4", "llama4_text")
_NO_ROPE_INTERVAL = 4


def read_kinds(fields: Fields, num_layers: int) -> tuple[Kind, ...]:
    """Return the kind of each layer. Raises MissingField, InvalidField, ContradictoryFields,
    UnsupportedModel.
    """
    listed = _read_layer_types(fields, num_layers)
    kinds = listed if listed is not None else _kinds_by_rule(fields, num_layers)
    for kind in set(kinds):
        if kind in _WINDOW_FIELD:
            read_window(fields, kind)
    return kinds


def read_window(fields: Fields, kind: Kind) -> int | None:
    """Return the tokens of this kind's window or chunk; None for kinds without one. Raises
    MissingField.
    """
    name = _WINDOW_FIELD.get(kind)
    return None if name is None else fields.count(name, f"the model has {kind} layers")


def _kinds_by_rule(fields: Fields, num_layers: int) -> tuple[Kind, ...]:
    family = fields.find_text("model_type") or ""
    chunked = _by_rope(fields, num_layers, family)
    if chunked is not None:
        return chunked
    if not _uses_window(fields, family):
        return (_FULL,) * num_layers
    pattern = _read_pattern(fields) or _PATTERN_OF.get(family)
    if pattern is not None:
        return _every(pattern, num_layers, _SLIDING)
    if family.startswith("qwen"):
        first = fields.count("max_window_layers", "use_sliding_window is true", least=0)
        first = min(first, num_layers)
        return (_FULL,) * first + (_SLIDING,) * (num_layers - first)
    return (_SLIDING,) * num_layers


def _read_layer_types(fields: Fields, num_layers: int) -> tuple[Kind, ...] | None:
    types = fields.find_list("layer_types")
    if types is None:
        return None
    if len(types) != num_layers:
        reason = f"{len(types)} items for {num_layers} layers"
        raise fields.contradiction("layer_types", "num_hidden_layers", reason)
    for index, name in enumerate(types):
        if not isinstance(name, str) or name not in _LAYER_TYPES:
            reason = f"known are {', '.join(_LAYER_TYPES)}"
            raise fields.unsupported(f"layer_types[{index}]", name, reason)
    kinds = tuple(_LAYER_TYPES[name] for name in types)
    if _SLIDING in kinds and fields.find_flag("use_sliding_window") is False:
        reason = "sliding_attention layers, but no window in use"
        raise fields.contradiction("layer_types", "use_sliding_window", reason)
    pattern = _read_pattern(fields)
    if pattern is not None and kinds != _every(pattern, num_layers, _SLIDING):
        reason = f"exactly the layers whose number {pattern} divides would be full_attention"
        raise fields.contradiction("layer_types", "sliding_window_pattern", reason)
    return kinds


def _read_pattern(fields: Fields) -> int | None:
    for name in _PATTERNS:
        if isinstance(fields.values.get(name), int):  # text ("LLLG") comes with layer_types
            return fields.find_count(name)
    return None


def _by_rope(fields: Fields, num_layers: int, family: str) -> tuple[Kind, ...] | None:
    """Return the kinds of Llama 4: layers with rotary positions see their chunk, others
    everything.
    """
    if family in _CHUNKED and "attention_chunk_size" not in fields.values:
        raise _missing(fields, "attention_chunk_size", family)
    if not fields.has("attention_chunk_size"):
        return None
    rotary = fields.find_list("no_rope_layers")
    if rotary is None:
        interval = fields.find_count("no_rope_layer_interval") or _NO_ROPE_INTERVAL
        return _every(interval, num_layers, "chunked_local")
    if len(rotary) != num_layers:
        reason = f"{len(rotary)} items for {num_layers} layers"
        raise fields.contradiction("no_rope_layers", "num_hidden_layers", reason)
    if any(item not in (0, 1) for item in rotary):
        raise fields.invalid("no_rope_layers", "a list of 0 and 1")
    return tuple("chunked_local" if has_rope else "full_attention" for has_rope in rotary)


def _uses_window(fields: Fields, family: str) -> bool:
    used = fields.find_flag("use_sliding_window")
    if used is None:
        if family in _PATTERN_OF and "sliding_window" not in fields.values:
            raise _missing(fields, "sliding_window", family)
        used = fields.has("sliding_window") and not family.startswith("qwen")
    return used


def _every(distance: int, num_layers: int, between: Kind) -> tuple[Kind, ...]:
    """Return full attention for every layer whose number, from 1, is a multiple of `distance`."""
    return tuple(
        between if number % distance else "full_attention" for number in range(1, num_layers + 1)
    )


def _missing(fields: Fields, name: str, family: str) -> MissingField:
    reason = f"models of type {family} have it; it is null if unused"
    return MissingField(file=fields.file, field=name, reason=reason)
