# SPDX-License-Identifier: Apache-2.0
"""SmolLM2 answers chats under three system prompts: transformers' own cache beside kvcore's.

Run: make demo-transformers. Both have the same pool of 76 blocks of 16 tokens and get the same
chats in the same order, two at a time. The table says how many tokens each found in its cache and
computed; the picture shows what the blocks held. Then a model whose layers partly have a sliding
window gets the same chats; its weights are random, so only its counts say something.
"""

from __future__ import annotations

import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from demo_picture import Pools, draw
from kvcore_runtime.model.tokenizer import BpeTokenizer
from kvcore_runtime.model.weights import find_smollm2, load_llama, open_gguf
from kvcore_transformers import installed
from tqdm import tqdm
from transformers import (
    ContinuousBatchingConfig,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)

PICTURE = Path("target/demo-transformers.png")
NUM_BLOCKS, PAGE, AT_A_TIME, NEW_TOKENS = 76, 16, 2, 8
WINDOW = 48
DESKS = {
    "the lost-property office of a small railway in the hills": (
        "cap, violin, trunk, scarf, camera, bicycle, pair of gloves, magic lantern, prayer book"
    ),
    "the seed bank of a botanical garden on an island": (
        "runner bean, corn poppy, tree lupin, white clover, maize, blue flax, barley, wild rye, "
        "oat, sugar beet"
    ),
    "the chart room of a harbour": ("north, east, south, west, reef, sandbank, wreck, buoy, mole"),
}
QUESTIONS = (
    "What do you do first?",
    "Which one comes last?",
    "Who may ask you?",
    "What is the third rule?",
    "How long do you wait?",
    "What do you never do?",
)


def main() -> int:
    """Serve the chats over both caches, and print the tables. Returns 1 if the tokens differ."""
    warnings.filterwarnings("ignore")  # transformers warns about its own deprecations
    torch.set_num_threads(2)
    model, tokenizer = load()
    chats = [tokenizer.encode_chat(chat) for chat in draw_chats()]
    num_tokens = sum(map(len, chats))
    print(f"{len(chats)} chats, {num_tokens:,} tokens; {NUM_BLOCKS} blocks of {PAGE} tokens")
    columns = serve_both("SmolLM2", model, chats)
    measured = ("tokens found", "tokens computed", "CPU seconds", "tokens per CPU second")
    all_same = report("SmolLM2, all layers with full attention", columns, measured)
    pools = [column["pools"] for column in columns]
    draw(pools, [f"a chat with {desk}" for desk in DESKS], PICTURE)
    print(f"what the blocks held, step by step: {PICTURE}")
    columns = serve_both("sliding layers", make_sliding(tokenizer.vocab_size), chats)
    title = f"random weights, 4 of 6 layers with a window of {WINDOW} tokens"
    all_same &= report(title, columns, measured[:2])
    return int(not all_same)


def serve_both(name: str, model: Any, chats: list[list[int]]) -> list[dict[str, Any]]:
    """Answer all chats over transformers' own cache and over kvcore; returns both columns."""
    native = serve(f"{name}, transformers", model, chats)
    with installed():
        return [native, serve(f"{name}, kvcore", model, chats)]


def report(title: str, columns: list[dict[str, Any]], names: tuple[str, ...]) -> bool:
    """Print the table of a model; returns whether both caches gave the same tokens."""
    print(f"\n{title}\n{'':24}{'transformers':>14}{'kvcore':>10}")
    for name in names:
        print(f"{name:24}{columns[0][name]:>14}{columns[1][name]:>10}")
    native, ours = (column["tokens"] for column in columns)
    num_same = sum(a == b for a, b in zip(native, ours, strict=True))
    print(f"the same tokens: {num_same} of {len(native)}", flush=True)
    return bool(num_same == len(native))


def draw_chats() -> list[list[dict[str, str]]]:
    """Return the chats in their order of arrival, in which the desks take turns."""
    systems = [
        f"You work at {desk}. You answer in one short sentence."
        + "".join(
            f" Rule {number}: whatever concerns the {thing} goes to shelf {number + 3}, is noted in"
            f" book {number % 3 + 1}, and is kept for {7 * number} days before it is given away."
            for number, thing in enumerate(things.split(", "), 1)
        )
        for desk, things in DESKS.items()
    ]
    return [
        [{"role": "system", "content": system}, {"role": "user", "content": question}]
        for question in QUESTIONS
        for system in systems
    ]


def serve(name: str, model: Any, chats: list[list[int]]) -> dict[str, Any]:
    """Answer all chats; returns a column of the table, and the tokens."""
    generation = GenerationConfig(
        max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=-1, pad_token_id=0
    )
    batching = ContinuousBatchingConfig(
        page_size=PAGE,
        num_blocks=NUM_BLOCKS,
        max_batch_tokens=256,
        max_requests_per_batch=AT_A_TIME,
    )
    counts = {"found": 0, "computed": 0}
    pools = Pools(f"{name}: what its blocks hold", lambda request_id: int(request_id) % len(DESKS))
    answers: dict[str, list[int]] = {}
    started = time.process_time()
    with (
        model.continuous_batching_context_manager(
            generation_config=generation, continuous_batching_config=batching
        ) as manager,
        tqdm(total=len(chats), desc=name, file=sys.stderr) as bar,
    ):
        watch(manager.batch_processor, counts, pools)
        for number, chat in enumerate(chats):
            manager.add_request(chat, request_id=f"{number:03}", eos_token_id=-1)
        while len(answers) < len(chats):
            result = manager.get_result(timeout=1)
            if result is None and not manager.is_running():
                raise SystemExit(f"the generation loop over {name} ended")
            if result is not None and result.is_finished():
                answers[result.request_id] = result.generated_tokens
                bar.update()
    seconds = time.process_time() - started
    num_tokens = sum(map(len, answers.values()))
    return {
        "pools": pools,
        "tokens": [answers[request_id] for request_id in sorted(answers)],
        "tokens found": f"{counts['found']:,}",
        "tokens computed": f"{counts['computed']:,}",
        "CPU seconds": f"{seconds:.1f}",
        "tokens per CPU second": f"{num_tokens / seconds:.1f}",
    }


def watch(processor: Any, counts: dict[str, int], pools: Pools) -> None:
    """Count what a cache finds and the tokens of the forward passes, and note its blocks."""
    cache, prepare = processor.cache, processor.prepare_next_batch
    search, indices = cache.search_prefix_match, cache.extend_read_and_write_indices

    def counted_search(request_id: str, prompt: list[int]) -> int:
        found = int(search(request_id, prompt))
        counts["found"] += found
        return found

    def counted_indices(request_id: str, past: int, query: int, *rest: Any) -> None:
        counts["computed"] += query
        indices(request_id, past, query, *rest)

    def noted_step() -> bool:
        prepared = bool(prepare())
        if prepared:
            pools.add(cache, counts["computed"])
        return prepared

    cache.search_prefix_match, cache.extend_read_and_write_indices = counted_search, counted_indices
    processor.prepare_next_batch = noted_step


def make_sliding(vocab_size: int) -> Any:
    """Make a small model with random weights, in which some layers have a sliding window."""
    torch.manual_seed(0)
    layers = ["sliding_attention", "sliding_attention", "full_attention"]
    config = Qwen2Config(
        vocab_size=vocab_size,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2 * len(layers),
        num_attention_heads=4,
        num_key_value_heads=2,
        use_sliding_window=True,
        sliding_window=WINDOW,
        layer_types=2 * layers,
    )
    return Qwen2ForCausalLM(config).eval()


def load() -> tuple[Any, BpeTokenizer]:
    """Make SmolLM2 as a model of transformers from the weights that kvcore's runtime reads."""
    file = open_gguf(find_smollm2())
    read = load_llama(file)
    shape, weights = read.config, read.weights
    config = LlamaConfig(
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        rms_norm_eps=shape.rms_norm_eps,
        max_position_embeddings=shape.max_model_len,
        rope_parameters={"rope_type": "default", "rope_theta": shape.rope_theta},
        tie_word_embeddings=True,
    )
    model = LlamaForCausalLM(config).eval()
    heads, width = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    named = {
        "model.embed_tokens.weight": weights.embedding,
        "model.norm.weight": weights.norm,
        "lm_head.weight": weights.head,
    }
    for number, layer in enumerate(weights.layers):
        query, key, value = layer.qkv.split([heads, width, width])
        gate, up = layer.gate_up.chunk(2)
        parts = {
            "self_attn.q_proj": query,
            "self_attn.k_proj": key,
            "self_attn.v_proj": value,
            "self_attn.o_proj": layer.output,
            "mlp.gate_proj": gate,
            "mlp.up_proj": up,
            "mlp.down_proj": layer.down,
            "input_layernorm": layer.attention_norm,
            "post_attention_layernorm": layer.mlp_norm,
        }
        named |= {f"model.layers.{number}.{name}.weight": part for name, part in parts.items()}
    model.load_state_dict(named)
    return model, BpeTokenizer(file)


if __name__ == "__main__":
    sys.exit(main())
