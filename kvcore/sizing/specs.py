# SPDX-License-Identifier: Apache-2.0
"""Specs of layers: frozen values that know the sizes of their cache in bytes.

A page is the memory of one block in one layer. The kind alone determines what a request can hold at
once: full attention and MLA keep everything, a window and a chunk keep what the next query can
still see and what one step adds, cross-attention keeps the encoder's tokens. Sizes are exact
integers; a spec that cannot work is refused when it is made.
"""

from __future__ import annotations

from typing import ClassVar

import attrs

from kvcore.sizing.errors import UnevenBlocks, WindowOnLatent
from kvcore.sizing.units import DTYPE_BYTES, read_dtype
from kvcore.types.errors import InvalidCount, WrongArgument
from kvcore.types.groups import Kind


@attrs.frozen(kw_only=True)
class Limits:
    """The limits of one request, and the settings of the pool.

    max_model_len: longest request in tokens. max_num_batched_tokens: most tokens that one step
    adds; None: max_model_len. num_blocks: blocks of the pool, regardless of the memory. null_block:
    include the block that a `kvcore.Config` reserves for positions outside every window. Raises
    InvalidCount, WrongArgument.
    """

    max_model_len: int
    max_num_batched_tokens: int | None = None
    num_blocks: int | None = None
    null_block: bool = False

    def __attrs_post_init__(self) -> None:
        check_count("max_model_len", self.max_model_len)
        if self.max_num_batched_tokens is not None:
            check_count("max_num_batched_tokens", self.max_num_batched_tokens)
        if self.num_blocks is not None:
            check_count("num_blocks", self.num_blocks)

    def max_tokens_with(self, num_kept: int) -> int:
        """Return the most tokens that a request holds if it keeps this many and computes one more
        step.
        """
        batched = self.max_num_batched_tokens
        step = self.max_model_len if batched is None else batched
        return min(num_kept + step, self.max_model_len)


@attrs.frozen(kw_only=True)
class LayerSpec:
    """One layer's cache.

    block_size: tokens per block. dtype: a key of `DTYPE_BYTES`. Raises InvalidCount, WrongArgument,
    UnknownDtype.
    """

    block_size: int
    dtype: str

    name: ClassVar[Kind]
    keeps_all: ClassVar[bool] = False
    """Whether a request's blocks grow with its length without limit."""

    def __attrs_post_init__(self) -> None:
        check_count("block_size", self.block_size)
        object.__setattr__(self, "dtype", read_dtype(self.dtype))

    @property
    def kind(self) -> Kind:
        """The kind of the `kvcore.Group` of these layers."""
        return self.name

    @property
    def window(self) -> int | None:
        """Tokens that a query sees, or tokens per chunk; None without such a bound."""
        return None

    @property
    def token_bytes(self) -> int:
        """Bytes of one token; 0 if what is kept does not grow with the tokens."""
        return 0

    @property
    def page_bytes(self) -> int:
        """Bytes of one block."""
        return self.block_size * self.token_bytes

    @property
    def type_id(self) -> str:
        """A text that is equal if the blocks of two layers are alike."""
        return f"{self.kind}_{self.block_size}_{self.page_bytes}"

    def max_blocks(self, limits: Limits) -> int:
        """Return the blocks to reserve for one request of maximum length."""
        return blocks_of(limits.max_model_len, self.block_size)

    def max_bytes(self, limits: Limits) -> int:
        """Return the bytes to reserve for one request of maximum length."""
        return self.max_blocks(limits) * self.page_bytes


@attrs.frozen(kw_only=True)
class AttentionSpec(LayerSpec):
    """A layer that keeps keys and values of its tokens.

    num_kv_heads, head_size: of the part that one device keeps. use_mla: one latent vector per token
    instead of a key and a value per head.
    """

    num_kv_heads: int
    head_size: int
    use_mla: bool = False

    name: ClassVar[Kind]

    @property
    def kind(self) -> Kind:
        """The kind of the `kvcore.Group` of these layers."""
        return self.name

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        for name in ("num_kv_heads", "head_size"):
            check_count(name, getattr(self, name))

    @property
    def token_bytes(self) -> int:
        """Bytes of one token."""
        vectors = 1 if self.use_mla else 2
        return vectors * self.num_kv_heads * self.head_size * DTYPE_BYTES[self.dtype]


@attrs.frozen(kw_only=True)
class StateSpec(LayerSpec):
    """A layer that keeps one state of fixed size, which every token overwrites.

    block_size: tokens between two states that are kept for others (checkpoints). state_bytes: of
    one state on one device. padded_bytes: of the block that it lies in, at least as many.
    """

    state_bytes: int
    padded_bytes: int

    name: ClassVar[Kind] = "state"

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        check_count("state_bytes", self.state_bytes)
        check_count("padded_bytes", self.padded_bytes, least=self.state_bytes)

    @property
    def page_bytes(self) -> int:
        """Bytes of one block."""
        return self.padded_bytes

    def max_blocks(self, limits: Limits) -> int:
        """Return at most 2: the state that is read, and the one that the step writes."""
        return min(blocks_of(limits.max_model_len, self.block_size), 2)


@attrs.frozen(kw_only=True)
class FullAttentionSpec(AttentionSpec):
    """A layer whose queries see all tokens before them; with `use_mla`, as latent vectors.

    context_parallel: ranks that share the tokens of a block. block_size counts the tokens on all of
    them, a page holds those of one. Raises UnevenBlocks too.
    """

    context_parallel: int = 1

    name: ClassVar[Kind] = "full_attention"
    keeps_all: ClassVar[bool] = True

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        check_count("context_parallel", self.context_parallel)
        if self.block_size % self.context_parallel:
            raise UnevenBlocks(block_size=self.block_size, context_parallel=self.context_parallel)

    @property
    def page_bytes(self) -> int:
        """Bytes of one block on one rank."""
        return self.block_size // self.context_parallel * self.token_bytes

    @property
    def kind(self) -> Kind:
        """The kind of the `kvcore.Group` of these layers."""
        return "mla" if self.use_mla else self.name


@attrs.frozen(kw_only=True)
class WindowedSpec(AttentionSpec):
    """The common part of a sliding window and a chunk. Raises WindowOnLatent too."""

    window: int

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        check_count("window", self.window)
        if self.use_mla:
            raise WindowOnLatent(kind=self.kind, window=self.window)

    @property
    def type_id(self) -> str:
        """A text that is equal if the blocks of two layers are alike."""
        return f"{self.kind}_{self.window}_{self.block_size}_{self.page_bytes}"


@attrs.frozen(kw_only=True)
class SlidingWindowSpec(WindowedSpec):
    """A layer whose queries see `window` tokens, the query's own included."""

    name: ClassVar[Kind] = "sliding_window"

    def max_blocks(self, limits: Limits) -> int:
        """Count the blocks of the window and the step, plus one: a window may start within a
        block.
        """
        return blocks_of(limits.max_tokens_with(self.window - 1), self.block_size) + 1


@attrs.frozen(kw_only=True)
class ChunkedLocalSpec(WindowedSpec):
    """A layer whose queries see the tokens before them in their chunk of `window` tokens."""

    name: ClassVar[Kind] = "chunked_local"

    def max_blocks(self, limits: Limits) -> int:
        """Count the blocks of the chunk and the step, plus one if a chunk may start within a
        block.
        """
        blocks = blocks_of(limits.max_tokens_with(self.window), self.block_size)
        return blocks + int(self.window % self.block_size > 0)


@attrs.frozen(kw_only=True)
class CrossAttentionSpec(AttentionSpec):
    """A layer whose queries see the encoder's tokens, at most `max_encoder_tokens` per request."""

    max_encoder_tokens: int

    name: ClassVar[Kind] = "cross_attention"

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        check_count("max_encoder_tokens", self.max_encoder_tokens)

    def max_blocks(self, limits: Limits) -> int:  # noqa: ARG002 - the length bounds the decoder
        """Count the blocks of the encoder's tokens, whatever the request's length."""
        return blocks_of(self.max_encoder_tokens, self.block_size)


def blocks_of(num_tokens: int, block_size: int) -> int:
    """Return how many blocks this many tokens take."""
    return -(-num_tokens // block_size)


def check_count(name: str, value: int, least: int = 1) -> None:
    """Raise WrongArgument unless it is an integer, InvalidCount if it is below `least`."""
    check_integer(name, value)
    if value < least:
        raise InvalidCount(name=name, value=value, least=least)


def check_integer(name: str, value: int) -> None:
    """Raise WrongArgument unless it is an integer; True and False are not."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise WrongArgument(name=name, expected="an integer", value=value)
