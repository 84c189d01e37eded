# SPDX-License-Identifier: Apache-2.0
"""Numbers for prefixes, made as tokens come: equal numbers mean equal content.

Rules: nothing here is called by a transition. A request's numbers are a list that only grows; a cut
makes a new list, so that whoever holds a list and a length holds that content. A hash stands for
one number, learnt from a chain that is made here from tokens and extra keys, not read from the
core. As `kvcore/check/prefixes.py`, at a cost of O(new tokens). Twin: none.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import attrs

from kvcore.config import Config
from kvcore.errors import InvariantViolation
from kvcore.extra_keys import LoRA, read_extra_keys
from kvcore.hashing import HASH_SIZE, hash_blocks, root_hash
from kvcore.values import Request

Nodes = list[int]
"""The number of the prefix that ends with each token."""


@attrs.define
class Known:
    """A request as the engine knows it.

    nodes: of its tokens. drafts: behind them. num_hashed: hashes that were learnt, last_hash:
    the last of them. goal: tokens at which it is done.
    """

    name: str
    row: int
    request: Request
    goal: int
    tokens: list[int] = attrs.field(factory=list)
    nodes: Nodes = attrs.field(factory=list)
    drafts: list[int] = attrs.field(factory=list)
    num_hashed: int = 0
    last_hash: bytes = b""


class Prefixes:
    """The tree of all prefixes of a run, and what each hash stands for."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._size = config.hash_block_size
        self._root = root_hash(config.hash_seed, config.hashing)
        self._numbers: dict[tuple[int, Hashable], int] = {}
        self._hashes: dict[bytes, tuple[Nodes, int]] = {}

    def grow(self, known: Known, tokens: Sequence[int]) -> None:
        """Put tokens behind a request's and learn the hashes of the blocks that they fill."""
        known.nodes.extend(self.numbers(known, tokens))
        known.tokens.extend(tokens)
        if self._config.enable_caching:
            self._learn(known)

    def cut(self, known: Known, num_tokens: int) -> None:
        """Keep so many of a request's tokens; its drafts are dropped."""
        known.tokens = known.tokens[:num_tokens]
        known.nodes = known.nodes[:num_tokens]
        known.drafts = []
        known.num_hashed, known.last_hash = 0, b""
        if self._config.enable_caching:
            self._learn(known)

    def numbers(self, known: Known, tokens: Sequence[int]) -> Nodes:
        """The numbers of tokens that stand behind a request's."""
        node = known.nodes[-1] if known.nodes else self._start(known.request)
        found = []
        for token in tokens:
            node = self._numbers.setdefault((node, token), len(self._numbers) + 1)
            found.append(node)
        return found

    def block(self, key: bytes) -> Nodes:
        """What a block under a key holds. Raises InvariantViolation (HASH-INJ, KEY-GRAN)."""
        group = int.from_bytes(key[HASH_SIZE:], "big")
        size = self._config.groups[group].block_size
        known = self._hashes.get(key[:HASH_SIZE])
        if known is None:
            raise InvariantViolation("HASH-INJ", f"no prefix has the hash {key.hex()}")
        nodes, end = known
        if end % size:
            detail = f"a key of group {group} ends at token {end}, blocks hold {size}"
            raise InvariantViolation("KEY-GRAN", detail)
        return nodes[end - size : end]

    def _start(self, request: Request) -> int:
        extra = (request.lora, request.cache_salt)
        if extra == (None, None):
            return 0
        return self._numbers.setdefault((0, extra), len(self._numbers) + 1)

    def _learn(self, known: Known) -> None:
        start = known.num_hashed * self._size
        if len(known.tokens) - start < self._size:
            return
        extra = read_extra_keys(known.request, len(known.tokens), self._size)
        hashes = hash_blocks(
            known.last_hash or self._root,
            known.tokens[start:],
            self._size,
            start=start,
            extra_keys=extra,
            hashing=self._config.hashing,
        )
        for block_hash in hashes:
            known.num_hashed += 1
            known.last_hash = block_hash
            end = known.num_hashed * self._size
            nodes, at = self._hashes.setdefault(block_hash, (known.nodes, end))
            if at != end or nodes[end - 1] != known.nodes[end - 1]:
                raise InvariantViolation("HASH-INJ", f"{block_hash.hex()} stands twice")


def make_request(name: str, tokens: list[int], kind: str) -> Request:
    """A request of one of KINDS."""
    match kind:
        case "lora":
            return Request(name, tokens, lora=LoRA("one"))
        case "salt":
            return Request(name, tokens, cache_salt="one")
        case "skip":
            return Request(name, tokens, skip_reading_prefix_cache=True)
    return Request(name, tokens)


KINDS = ("plain",) * 12 + ("lora", "salt", "skip")
"""Kinds of requests, the plain one the most likely."""
