# SPDX-License-Identifier: Apache-2.0
"""Models that vLLM's tests name, as small as their configurations can be: no weights, no network.

`write_models` writes them, and the file by which vLLM finds them instead of the hub's.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

OPT = {
    "model_type": "opt",
    "architectures": ["OPTForCausalLM"],
    "torch_dtype": "float16",
    "hidden_size": 64,
    "word_embed_proj_dim": 64,
    "ffn_dim": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "max_position_embeddings": 2048,
    "vocab_size": 50272,
}
QWEN = {
    "torch_dtype": "bfloat16",
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "max_position_embeddings": 262144,
    "vocab_size": 151936,
}
LLAVA = {
    "model_type": "llava",
    "architectures": ["LlavaForConditionalGeneration"],
    "torch_dtype": "float16",
    "image_token_index": 32000,
    "image_seq_length": 576,
    "vision_feature_layer": -2,
    "vision_feature_select_strategy": "default",
    "text_config": {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "max_position_embeddings": 4096,
        "vocab_size": 32064,
    },
    "vision_config": {
        "model_type": "clip_vision_model",
        "hidden_size": 64,
        "intermediate_size": 64,
        "image_size": 336,
        "num_attention_heads": 1,
        "num_hidden_layers": 2,
        "patch_size": 14,
        "projection_dim": 64,
    },
}
PICTURES = {
    "image_processor_type": "CLIPImageProcessor",
    "processor_class": "LlavaProcessor",
    "crop_size": {"height": 336, "width": 336},
    "size": {"shortest_edge": 336},
}
CONFIGS: dict[str, dict[str, Any]] = {
    "facebook/opt-125m": OPT,
    "facebook/opt-350m": OPT,
    "Qwen/Qwen1.5-7B": QWEN | {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]},
    "Qwen/Qwen3-0.6B": QWEN
    | {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "head_dim": 64},
    "Qwen/Qwen3-Next-80B-A3B-Instruct": QWEN
    | {
        "model_type": "qwen3_next",
        "architectures": ["Qwen3NextForCausalLM"],
        "head_dim": 64,
        "full_attention_interval": 4,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 64,
        "linear_num_key_heads": 1,
        "linear_num_value_heads": 1,
        "linear_value_head_dim": 64,
        "num_experts": 2,
        "num_experts_per_tok": 1,
        "moe_intermediate_size": 64,
        "shared_expert_intermediate_size": 64,
    },
    "llava-hf/llava-1.5-7b-hf": LLAVA,
}
OTHERS: dict[str, dict[str, dict[str, Any]]] = {
    "llava-hf/llava-1.5-7b-hf": {
        "preprocessor_config.json": PICTURES,
        "processor_config.json": {
            "processor_class": "LlavaProcessor",
            "patch_size": 14,
            "image_token": "<image>",
            "num_additional_image_tokens": 1,
            "vision_feature_select_strategy": "default",
        },
    },
}
SPECIAL = {
    "facebook/opt-125m": {1: "<pad>", 2: "</s>"},
    "facebook/opt-350m": {1: "<pad>", 2: "</s>"},
    "Qwen/Qwen3-0.6B": {151643: "<|endoftext|>", 151645: "<|im_end|>"},
    "llava-hf/llava-1.5-7b-hf": {1: "<s>", 2: "</s>", 32000: "<image>", 32001: "<pad>"},
}
"""Model -> its special tokens by id. The text of any other token is its number."""


def tokenizer(config: dict[str, Any], special: dict[int, str]) -> dict[str, dict[str, Any]]:
    """Return a tokenizer of words, one for each id, as files by name."""
    size = config.get("vocab_size") or config["text_config"]["vocab_size"]
    words = {special.get(number, f"t{number}"): number for number in range(size)}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    added = [{"id": number, "content": word, "special": True} | flags
             for number, word in special.items()]  # fmt: skip
    model = {"type": "WordLevel", "vocab": words, "unk_token": special.get(1, "t0")}
    parts = dict.fromkeys(("truncation", "padding", "normalizer", "post_processor", "decoder"))
    text = {"version": "1.0", "added_tokens": added, "model": model}
    names = {"</s>": "eos_token", "<|im_end|>": "eos_token", "<pad>": "pad_token"}
    named = {names[word]: word for word in special.values() if word in names}
    return {
        "tokenizer.json": text | parts | {"pre_tokenizer": {"type": "Whitespace"}},
        "tokenizer_config.json": {"tokenizer_class": "PreTrainedTokenizerFast"} | named,
    }


def write_models(folder: Path) -> Path:
    """Write the models; returns the file for VLLM_MODEL_REDIRECT_PATH."""
    places = {}
    for name, config in CONFIGS.items():
        place = folder / name.replace("/", "--")
        place.mkdir(parents=True, exist_ok=True)
        places[name] = str(place)
        files = {"config.json": config} | OTHERS.get(name, {})
        if name in SPECIAL:
            files |= tokenizer(config, SPECIAL[name])
        for file, content in files.items():
            (place / file).write_text(json.dumps(content))
    listed = folder / "models.json"
    listed.write_text(json.dumps(places))
    return listed
