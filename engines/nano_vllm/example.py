# SPDX-License-Identifier: Apache-2.0
"""nano-vllm's whole engine on a CPU with SmolLM2, over its own block manager and over kvcore.

Run after `make engines-nano`: python -m engines.nano_vllm.example [--prompts 9] [--new 8]. Engine,
scheduler, runner and model are nano-vllm's own. What needs a GPU is replaced by stand-ins:
attention is plain torch over the block tables, and slots that were never written hold NaN. The
weights are float32, so the norms have a stand-in too. The exit status is 1 if the answers differ.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from collections.abc import Iterator
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import torch
from kvcore_runtime.generate.prompts import read_prompts
from kvcore_runtime.model.model import Llama
from kvcore_runtime.model.sampling import Sampling
from kvcore_runtime.model.tokenizer import BpeTokenizer
from kvcore_runtime.model.weights import find_smollm2, load_llama, open_gguf
from torch import Tensor
from torch.nn import functional as F

from benches.nano_vllm import checkout
from engines.nano_vllm.kvcore_nano_vllm import installed

PROMPTS = Path(__file__).parents[2] / "examples" / "prompts.jsonl"
BLOCK_SIZE, NUM_BLOCKS = 16, 90
MAX_NUM_SEQS, MAX_NUM_BATCHED_TOKENS = 3, 512


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return the causal attention of a sequence's last positions: [positions, heads, head_dim]."""
    seen = torch.ones(len(q), len(k), dtype=torch.bool).tril(len(k) - len(q))
    q, k, v = (each.transpose(0, 1) for each in (q, k, v))
    done = F.scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=True)
    return done.transpose(0, 1)


def gather(cache: Tensor, table: Tensor, length: int) -> Tensor:
    """Return the first positions of a sequence from its blocks."""
    return cache[table[table >= 0].long()].flatten(0, 1)[:length]


def attend_prompts(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    block_table: Tensor | None,
    **_: Any,
) -> Tensor:
    """Stand in for flash_attn_varlen_func; k and v are caches if there is a block table."""
    done = []
    starts, ends = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    for index, (first, last) in enumerate(pairwise(starts)):
        begin, end = ends[index], ends[index + 1]
        if block_table is None:
            mine = [k[begin:end], v[begin:end]]
        else:
            mine = [gather(cache, block_table[index], end - begin) for cache in (k, v)]
        done.append(attend(q[first:last], *mine))
    return torch.cat(done)


def attend_decodes(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    cache_seqlens: Tensor,
    block_table: Tensor,
    **_: Any,
) -> Tensor:
    """Stand in for flash_attn_with_kvcache: attend from one position of each sequence."""
    done = []
    for index, length in enumerate(cache_seqlens.tolist()):
        mine = [gather(cache, block_table[index], length) for cache in (k_cache, v_cache)]
        done.append(attend(q[index], *mine))
    return torch.stack(done)


def store(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> None:
    """Stand in for store_kvcache, which is a Triton kernel."""
    k_cache.flatten(0, 1)[slots.long()] = k
    v_cache.flatten(0, 1)[slots.long()] = v


def make_tensor(*arguments: Any, pin_memory: bool = False, **options: Any) -> Tensor:
    """Make a tensor as torch.tensor does, without pinned memory."""
    del pin_memory
    return TENSOR(*arguments, **options)


TENSOR = torch.tensor


def normalise(norm: Any, x: Tensor, residual: Tensor | None = None) -> Any:
    """Stand in for RMSNorm.forward, which overwrites its input if that is float32."""
    total = x if residual is None else x + residual
    done = F.rms_norm(total, total.shape[-1:], norm.weight, norm.eps)
    return done if residual is None else (done, total)


@contextlib.contextmanager
def on_the_cpu() -> Iterator[None]:
    """Replace what needs a GPU by stand-ins within a `with` block."""
    flash: Any = ModuleType("flash_attn")
    vars(flash).update(
        flash_attn_varlen_func=attend_prompts, flash_attn_with_kvcache=attend_decodes
    )
    triton: Any = ModuleType("triton")
    language: Any = ModuleType("triton.language")
    vars(language)["constexpr"] = int
    vars(triton).update(jit=lambda kernel: kernel, language=language)
    safetensors: Any = ModuleType("safetensors")
    vars(safetensors)["safe_open"] = None
    modules = {"flash_attn": flash, "safetensors": safetensors}
    modules |= {"triton": triton, "triton.language": language}
    with (
        mock.patch.dict(sys.modules, modules),
        mock.patch.object(torch.Tensor, "cuda", lambda self, **_: self),
        mock.patch.object(torch, "tensor", make_tensor),
        mock.patch.object(torch, "compile", lambda function: function),
    ):
        yield


def make_model(llama: Llama) -> Any:
    """Make nano-vllm's model with the weights of the runtime's model."""
    shape, weights = llama.config, llama.weights
    config = SimpleNamespace(
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=4096,
        rms_norm_eps=shape.rms_norm_eps,
        rope_theta=shape.rope_theta,
        hidden_act="silu",
        attention_bias=True,  # so that queries and keys have no norms; the biases are 0
        tie_word_embeddings=True,
    )
    attention: Any = import_module("nanovllm.layers.attention")
    vars(attention)["store_kvcache"] = store
    import_module("nanovllm.layers.layernorm").RMSNorm.forward = normalise
    model: Any = import_module("nanovllm.models.qwen3").Qwen3ForCausalLM(config)
    given = {"model.embed_tokens": weights.embedding, "model.norm": weights.norm}
    given["lm_head"] = weights.head
    for index, layer in enumerate(weights.layers):
        given |= {
            f"model.layers.{index}.{name}": weight
            for name, weight in (
                ("input_layernorm", layer.attention_norm),
                ("self_attn.qkv_proj", layer.qkv),
                ("self_attn.o_proj", layer.output),
                ("post_attention_layernorm", layer.mlp_norm),
                ("mlp.gate_up_proj", layer.gate_up),
                ("mlp.down_proj", layer.down),
            )
        }
    for name, parameter in model.named_parameters():
        stem, _, kind = name.rpartition(".")
        if kind == "bias":
            parameter.data = torch.zeros_like(parameter)
        else:
            parameter.data = given[stem]
    return model


def make_engine(scheduler: Any, model: Any, llama: Llama, tokenizer: BpeTokenizer) -> Any:
    """Make nano-vllm's engine with empty caches, without the GPU work of its constructors."""
    shape = (NUM_BLOCKS, BLOCK_SIZE, llama.config.num_kv_heads, llama.config.head_dim)
    for module in model.modules():
        if hasattr(module, "k_cache"):
            for name in ("k_cache", "v_cache"):
                setattr(module, name, torch.full(shape, float("nan")))
    runner_class: Any = import_module("nanovllm.engine.model_runner").ModelRunner
    engine_class: Any = import_module("nanovllm.engine.llm_engine").LLMEngine
    runner, engine = object.__new__(runner_class), object.__new__(engine_class)
    vars(runner).update(
        block_size=BLOCK_SIZE,
        enforce_eager=True,
        world_size=1,
        rank=0,
        model=model,
        sampler=lambda logits, _: logits.argmax(-1),  # greedy, so that runs can be compared
    )
    scheduler.Sequence.block_size = BLOCK_SIZE
    config = SimpleNamespace(
        max_num_seqs=MAX_NUM_SEQS,
        max_num_batched_tokens=MAX_NUM_BATCHED_TOKENS,
        eos=-1,
        kvcache_block_size=BLOCK_SIZE,
        num_kvcache_blocks=NUM_BLOCKS,
    )
    made = {"scheduler": scheduler.Scheduler(config), "model_runner": runner}
    vars(engine).update(made, tokenizer=tokenizer)
    return engine


def main() -> int:
    """Answer the prompts over both block managers, and compare the answers."""
    parser = argparse.ArgumentParser(prog="python -m engines.nano_vllm.example")
    parser.add_argument("--prompts", type=int, default=9, help="how many (%(default)s)")
    parser.add_argument("--new", type=int, default=8, help="tokens of each answer (%(default)s)")
    options = parser.parse_args()
    if reason := checkout.missing():
        sys.exit(reason)
    torch.set_num_threads(1)
    file = open_gguf(find_smollm2())
    llama, tokenizer = load_llama(file), BpeTokenizer(file)
    chosen = read_prompts(PROMPTS, Sampling())[: options.prompts]
    prompts = [tokenizer.encode_chat(prompt.messages([])) for prompt in chosen]
    answers = []
    with on_the_cpu(), checkout.imported() as scheduler:
        group: Any = torch.distributed
        group.init_process_group("gloo", store=group.HashStore(), rank=0, world_size=1)
        model = make_model(llama)
        params: Any = import_module("nanovllm.sampling_params").SamplingParams
        for name, place in (("nano-vllm", contextlib.nullcontext()), ("kvcore", installed())):
            with place:
                engine = make_engine(scheduler, model, llama, tokenizer)
            start = time.process_time()
            answers.append(
                engine.generate(prompts, params(max_tokens=options.new, ignore_eos=True))
            )
            seconds = time.process_time() - start
            number = options.new * len(prompts)
            print(f"{name}: {number} tokens, {number / seconds:.1f} per CPU second", flush=True)
        group.destroy_process_group()
    print(f"the first answer: {answers[1][0]['text']!r}")
    print("the same answers" if answers[0] == answers[1] else "OTHER ANSWERS")
    return int(answers[0] != answers[1])


if __name__ == "__main__":
    sys.exit(main())
