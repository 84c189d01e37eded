# SPDX-License-Identifier: Apache-2.0
"""The peers and the lists of operations of the side-by-side bench, by name."""

from __future__ import annotations

from pathlib import Path

import attrs

from benches import record

OPERATIONS = Path("build/ops")
MADE_UP = "turns"  # the kind of a generated trace


@attrs.frozen
class Peer:
    """family: the environment it runs in. null: the empty driver of its language."""

    title: str
    family: str
    null: str


def _python(title: str, family: str) -> Peer:
    return Peer(title, family, "null")


def _rust(title: str) -> Peer:
    return Peer(title, "rust", "null-rust")


PEERS = {
    "null": _python("the empty driver, Python", "kvcore"),
    "null-rust": _rust("the empty driver, Rust"),
    "vllm033": _python("vLLM 0.33.0, its default hash", "vllm033"),
    "vllm033-cbor": _python("vLLM 0.33.0, sha256_cbor", "vllm033"),
    "vllm085": _python("vLLM 0.8.5, its default hash", "vllm085"),
    "vllm085-facade": _python("kvcore's facade of it, twin", "vllm085"),
    "vllm085-facade-python": _python("kvcore's facade of it, Python core", "vllm085"),
    "vllm085-sha": _python("vLLM 0.8.5, sha256", "vllm085"),
    "vllm085-facade-sha": _python("kvcore's facade of that, twin", "vllm085"),
    "sglang": _python("SGLang 0.5.23, Rust tree core", "sglang"),
    "kvbm": _rust("kvbm-logical 1.6.1, by lineage"),
    "kvbm-lru": _rust("kvbm-logical 1.6.1, LRU"),
    "hashes-cbor": _rust("hashing every block, nothing else, sha256_cbor"),
    "hashes-sha": _rust("hashing every block, nothing else, sha256"),
    "hashes-siphash": _rust("hashing every block, nothing else, siphash"),
    "hashes-xxh3": _rust("hashing every block, nothing else, xxh3"),
    "kvcore-rust": _rust("kvcore twin from Rust, sha256_cbor"),
    "kvcore-rust-lru": _rust("the same, evicting as 0.8.5"),
    "kvcore-rust-sha": _rust("kvcore twin from Rust, sha256"),
    "kvcore-rust-siphash": _rust("kvcore twin from Rust, siphash"),
    "kvcore-rust-xxh3": _rust("kvcore twin from Rust, xxh3"),
    "kvcore-calls": _python("kvcore from Python, one call per request, lists", "kvcore"),
    "kvcore-calls-lru": _python("the same, evicting as 0.8.5", "kvcore"),
    "kvcore-batched": _python("kvcore from Python, batched, buffers", "kvcore"),
    "kvcore-batched-siphash": _python("the same, siphash", "kvcore"),
    "kvcore-batched-xxh3": _python("the same, xxh3", "kvcore"),
    "kvcore-python": _python("kvcore's Python core, sha256", "kvcore"),
    "kvcore-python-batched": _python("the same, batched, buffers", "kvcore"),
}
# Peers whose hit tokens must be equal, since they follow the rules of the first one.
SAME_HITS = (
    ("vllm033", "vllm033-cbor", "kvcore-rust", "kvcore-rust-sha", "kvcore-rust-siphash",
     "kvcore-rust-xxh3", "kvcore-calls", "kvcore-batched", "kvcore-batched-siphash",
     "kvcore-batched-xxh3", "kvcore-python", "kvcore-python-batched"),
    ("vllm085", "vllm085-facade", "vllm085-facade-python", "vllm085-sha", "vllm085-facade-sha",
     "kvcore-rust-lru", "kvcore-calls-lru"),
)  # fmt: skip


@attrs.frozen
class Case:
    """A list of operations. decode: requests that decode at once, 0 for a replayed trace."""

    title: str
    num_blocks: int
    block_size: int = 16
    decode: int = 0


CASES = {
    "2k": Case("pool of 2,048 blocks of 16", 2_048),
    "16k": Case("pool of 16,384 blocks of 16", 16_384),
    "128k": Case("pool of 131,072 blocks of 16", 131_072),
    "1m": Case("pool of 1,048,576 blocks of 16", 1_048_576),
    "64": Case("pool of 4,096 blocks of 64", 4_096, 64),
    "d256": Case("256 requests decoding", 64 * 256, 16, 256),
    "d1024": Case("1024 requests decoding", 64 * 1024, 16, 1024),
}


def recorded(name: str, trace: Path | None, num_requests: int) -> Path:
    """Return the file of a case's list; record it if it is missing or older than its sources.

    trace: None for a generated one.
    """
    case = CASES[name]
    sources = [Path(record.__file__)]
    if case.decode:
        stem, words = f"d{case.decode}", ["--decode", case.decode]
    elif trace is None:
        stem, words = (
            f"{MADE_UP}-{num_requests}",
            ["--kind", MADE_UP, "--requests", num_requests],
        )
    else:
        stem, words = f"{trace.stem}-{num_requests}", [trace, "--requests", num_requests]
        sources.append(trace)
    file = OPERATIONS / f"{stem}-{case.block_size}-{case.num_blocks}.ops"
    newest = max(source.stat().st_mtime for source in sources)
    if not file.exists() or file.stat().st_mtime < newest:
        sizes = ["--blocks", case.num_blocks, "--block-size", case.block_size, "--out", file]
        record.main([str(word) for word in (*words, *sizes)])
    return file
