# SPDX-License-Identifier: Apache-2.0
"""The models that the demonstrations run: SmolLM2, or a tiny one with random weights."""

from kvcore_runtime.model.model import Llama, tiny_model
from kvcore_runtime.model.tokenizer import BpeTokenizer, ByteTokenizer, Tokenizer
from kvcore_runtime.model.weights import find_smollm2, load_llama, open_gguf


def load_model(*, tiny: bool, invariant: bool = False) -> Llama:
    """Load SmolLM2, or make the tiny model. invariant: of the tiny one, see `tiny_model`."""
    return tiny_model(invariant=invariant) if tiny else load_llama(open_gguf(find_smollm2()))


def load_tokenizer(*, tiny: bool) -> Tokenizer:
    """Load SmolLM2's tokenizer, or one of bytes."""
    return ByteTokenizer() if tiny else BpeTokenizer(open_gguf(find_smollm2()))
