# SPDX-License-Identifier: Apache-2.0
"""The families of models that sizing knows, and those that it refuses.

Models that cache something other than keys and values (an indexer, states of a family that
hybrids.py does not know) are refused by their type or by a field. So is a family with latent
vectors whose file does not give their size, since the result would be wrong. A type that is in
neither list is sized only by the fields of its file, and the report says so.
"""

from __future__ import annotations

from kvcore.sizing.fields import Fields
from kvcore.sizing.hybrids import HYBRID_FAMILIES

UNKNOWN = "unknown"
"""The type of a model whose file does not name one."""

_STATE = f"state layers are sized for {', '.join(sorted(HYBRID_FAMILIES))} alone"
_SHAPES = "layers with special shapes are not sized"
_UNSUPPORTED = {
    "attn_layer_period": _STATE,
    "attn_type_list": _STATE,
    "block_types": _STATE,
    "conv_L_cache": _STATE,
    "hybrid_override_pattern": _STATE,
    "layers_block_type": _STATE,
    "linear_attn_config": _STATE,
    "linear_num_value_heads": _STATE,
    "lru_width": _STATE,
    "mamba_d_ssm": _STATE,
    "mamba_d_state": _STATE,
    "mamba_num_heads": _STATE,
    "ssm_cfg": _STATE,
    "ssm_state_size": _STATE,
    "state_size": _STATE,
    "global_head_dim": _SHAPES,
    "hybrid_layer_pattern": _SHAPES,
    "swa_head_dim": _SHAPES,
    "index_head_dim": "the indexer's own cache is not sized",
}
_STATE_FAMILIES = frozenset(
    {
        "bamba",
        "falcon_mamba",
        "kimi_linear",
        "lfm2_moe",
        "mamba",
        "mamba2",
        "recurrent_gemma",
        "rwkv",
        "xlstm",
        "zamba",
        "zamba2",
    }
)
_LATENT_FAMILIES = frozenset({"deepseek_v2", "deepseek_v3", "deepseek_v32", "kimi_k2"})
_FAMILIES = (
    _LATENT_FAMILIES
    | HYBRID_FAMILIES
    | {
        "gemma",
        "gemma2",
        "gemma3",
        "gemma3_text",
        "gpt_oss",
        "llama",
        "llama4",
        "llama4_text",
        "mistral",
        "mixtral",
        "phi3",
        "qwen2",
        "qwen2_moe",
        "qwen3",
        "qwen3_moe",
    }
)


def check_supported(fields: Fields, family: str) -> None:
    """Raise UnsupportedModel, or MissingField for latent vectors without size."""
    for name, reason in _UNSUPPORTED.items():
        if fields.has(name) and not (reason == _STATE and family in HYBRID_FAMILIES):
            raise fields.unsupported(name, fields.values[name], reason)
    if family in _STATE_FAMILIES:
        raise fields.unsupported("model_type", family, _STATE)
    if fields.find_flag("is_encoder_decoder"):
        reason = "models with an encoder are sized from specs, not from a file"
        raise fields.unsupported("is_encoder_decoder", True, reason)
    if family in _LATENT_FAMILIES:
        fields.count("kv_lora_rank", f"models of type {family} keep latent vectors of this size")
    elif fields.has("qk_rope_head_dim"):
        fields.count("kv_lora_rank", "qk_rope_head_dim is set, which only MLA has")


def family_note(family: str) -> str | None:
    """Return a note if there is no rule for a model's family, else None."""
    if family in _FAMILIES:
        return None
    named = (
        "the file names no model_type" if family == UNKNOWN else f"{family} is an unknown family"
    )
    return f"{named}: sized as a transformer, by the file's fields alone"
