# SPDX-License-Identifier: Apache-2.0
"""Text to token ids and back: the BPE of a GGUF file, and plain bytes for tiny models."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

from kvcore_runtime.errors import UnsupportedModelFile
from kvcore_runtime.model.chat import CHATML, ChatTemplate, Message
from kvcore_runtime.model.weights import GgufFile

_REPLACEMENT = "\ufffd"
_TOKEN_TYPE_NORMAL = 1


class Tokenizer(ABC):
    """The interface of a tokenizer.

    vocab_size: ids are below this. end_ids: tokens that end an answer: end of turn and end of text.
    """

    def __init__(self, vocab_size: int, end_ids: Iterable[int], template: ChatTemplate) -> None:
        self.vocab_size = vocab_size
        self.end_ids = frozenset(end_ids)
        self._template = template

    @abstractmethod
    def encode(self, text: str) -> list[int]:
        """Encode plain text; the result has no special tokens."""

    @abstractmethod
    def decode(self, ids: Sequence[int]) -> str:
        """Decode ids without special tokens; U+FFFD for bytes that are not (yet) UTF-8."""

    def render_chat(self, messages: Sequence[Message]) -> str:
        """Render a conversation with the model's template, including the answer's beginning."""
        return self._template.render(messages)

    def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        """Encode a conversation. Raises InvalidMessages."""
        return self._template.encode(messages, self.encode)


class BpeTokenizer(Tokenizer):
    """Byte-level BPE with the vocabulary, merges and chat template of a GGUF file."""

    def __init__(self, file: GgufFile) -> None:
        """Build the tokenizer. Raises UnsupportedModelFile if the file has another kind of
        tokenizer.
        """
        from tokenizers import AddedToken, decoders, pre_tokenizers
        from tokenizers import Tokenizer as Bpe
        from tokenizers.models import BPE

        _expect(file, "tokenizer.ggml.model", "gpt2")
        _expect(file, "tokenizer.ggml.pre", "smollm")
        tokens: list[str] = file.value("tokenizer.ggml.tokens")
        types: list[int] = file.value("tokenizer.ggml.token_type")
        merges = [tuple(merge.split(" ")) for merge in file.value("tokenizer.ggml.merges")]
        special = {
            token: index
            for index, (token, kind) in enumerate(zip(tokens, types, strict=True))
            if kind != _TOKEN_TYPE_NORMAL
        }
        vocab = {token: index for index, token in enumerate(tokens)}
        self._bpe: Any = Bpe(BPE(vocab=vocab, merges=merges))
        self._bpe.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
            ]
        )
        self._bpe.decoder = decoders.ByteLevel()
        self._bpe.add_special_tokens([AddedToken(token, special=True) for token in special])
        self._bpe.encode_special_tokens = True
        ends = {file.value("tokenizer.ggml.eos_token_id"), special.get("<|endoftext|>")}
        super().__init__(
            vocab_size=len(tokens),
            end_ids=(int(token) for token in ends if token is not None),
            template=ChatTemplate(file.value("tokenizer.chat_template"), special),
        )

    def encode(self, text: str) -> list[int]:
        """See `Tokenizer`."""
        ids: list[int] = self._bpe.encode(text, add_special_tokens=False).ids
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """See `Tokenizer`."""
        text: str = self._bpe.decode(list(ids), skip_special_tokens=True)
        return text


class ByteTokenizer(Tokenizer):
    """UTF-8 bytes as ids 0 to 255, then a few special tokens: for models of random weights."""

    SPECIAL: ClassVar[dict[str, int]] = {
        "<|endoftext|>": 256,
        "<|im_start|>": 257,
        "<|im_end|>": 258,
        "<|pad|>": 259,
    }

    def __init__(self) -> None:
        ends = (self.SPECIAL["<|endoftext|>"], self.SPECIAL["<|im_end|>"])
        super().__init__(256 + len(self.SPECIAL), ends, ChatTemplate(CHATML, self.SPECIAL))

    def encode(self, text: str) -> list[int]:
        """See `Tokenizer`."""
        return list(text.encode())

    def decode(self, ids: Sequence[int]) -> str:
        """See `Tokenizer`."""
        return bytes(token for token in ids if token < 256).decode(errors="replace")


class StreamDecoder:
    """Turns ids that arrive one by one into text that is never retracted.

    Text is held back while it ends in the middle of a character. Only the ids since the last whole
    character are decoded again, so the cost of a token does not grow with the answer.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._pending: list[int] = []
        self._num_given = 0  # characters of the pending ids already returned

    def push(self, token_id: int) -> str:
        """Add the next id; return the text that is now certain, possibly empty."""
        self._pending.append(token_id)
        text = self._tokenizer.decode(self._pending)
        certain = text.rstrip(_REPLACEMENT)
        piece = certain[self._num_given :]
        self._num_given = max(self._num_given, len(certain))
        if certain == text:
            self._forget()
        return piece

    def flush(self) -> str:
        """Return the held text; half a character becomes U+FFFD."""
        text = self._tokenizer.decode(self._pending) if self._pending else ""
        piece = text[self._num_given :]
        self._forget()
        return piece

    def _forget(self) -> None:
        self._pending.clear()
        self._num_given = 0


def _expect(file: GgufFile, key: str, expected: str) -> None:
    value = file.value(key)
    if value != expected:
        raise UnsupportedModelFile(what=key, value=value, expected=expected)
