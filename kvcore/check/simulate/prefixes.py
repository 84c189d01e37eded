# SPDX-License-Identifier: Apache-2.0
"""Numbers for prefixes, assigned as tokens come: equal numbers mean equal content.

No transition calls anything here. A request's numbers are a list that only grows; a cut makes a new
list, so that a list and a length together identify content. A hash stands for one number, learnt
from a chain that is computed here from tokens and extra keys, not read from the core.
`kvcore/oracle/prefixes.py` does the same; here the cost is O(new tokens).
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import attrs

from kvcore.check.world.keyed import OWN
from kvcore.hashing.block_hash import hash_blocks, root_hash
from kvcore.hashing.extra_keys import read_extra_keys
from kvcore.oracle.contents import group_of
from kvcore.types.config import Config
from kvcore.types.errors import InvariantViolation
from kvcore.types.extra_inputs import LoRA, MediaItem
from kvcore.types.keys import HASH_SIZE
from kvcore.types.retention import KvCacheRetentionConfig, TokenRangeRetentionConfig
from kvcore.types.values import Request

FIRST_ENCODER = -9
"""Encoders have numbers below this one, prefixes above 0."""
Nodes = list[int]
"""The number of the prefix that ends with each token."""


Output = tuple[int, int | None]
"""A token that the device sampled, and the batch that did, if that is certain."""


@attrs.define
class Guess:
    """Drafts that were scheduled before any token there was known.

    offset: position of the first. accepted, rejected: how many are. batch: which one computes them,
    None if it is open. wrong: the only draft, which stands beside states, will be rejected; until
    then it counts as accepted, since everything behind it is computed from the state after it.
    """

    offset: int
    accepted: int
    rejected: int
    batch: int | None = None
    wrong: bool = False


@attrs.define
class SimulatedRequest:
    """A request as the engine knows it.

    nodes: numbers of its tokens' prefixes. drafts: after its tokens. num_hashed: how many hashes
    were learnt, or handed in if it brings its own; last_hash: the last that was learnt. goal:
    tokens at which it is done. encoder: the contents of its cross-attention tables. epoch: the
    weights' epoch in which its count began; contents: the numbers of its prefixes in that epoch.
    future: tokens of scheduled positions that the manager does not know yet. guesses: scheduled
    drafts among these. sampler: the batch that samples the token after them, None if that is not
    certain. dropped: a token that a cut made stale, and the batch that sampled it.
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
    own: bool = False
    encoder: Nodes = attrs.field(factory=list)
    epoch: int = 0
    contents: Nodes = attrs.Factory(lambda self: self.nodes, takes_self=True)
    future: list[Output] = attrs.field(factory=list)
    guesses: list[Guess] = attrs.field(factory=list)
    sampler: int | None = None
    dropped: Output | None = None

    @property
    def num_rejected(self) -> int:
        """Number of scheduled drafts that the device rejected and the manager still counts."""
        return sum(each.rejected for each in self.guesses)

    def drop_output(self) -> None:
        """Forget all positions to come, and which batch samples the next token."""
        self.future, self.guesses, self.sampler = [], [], None


class Prefixes:
    """The tree of all prefixes of a run, and the prefix of each hash."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._size = config.hash_block_size
        self._root = root_hash(config.hash_seed, config.hashing)
        self._numbers: dict[tuple[int, Hashable], int] = {}
        self._hashes: dict[bytes, tuple[Nodes, int]] = {}
        self._own: dict[int, int] = {}
        self._num_encoders = 0

    def grow(self, known: SimulatedRequest, tokens: Sequence[int]) -> None:
        """Append tokens to a request and learn the hashes of the blocks that they fill."""
        more = self.numbers(known, tokens)
        known.nodes.extend(more)
        if known.contents is not known.nodes:
            known.contents.extend(self.in_epoch(more, known.epoch))
        known.tokens.extend(tokens)
        if self._config.enable_caching:
            self._learn(known)

    def cut(self, known: SimulatedRequest, num_tokens: int) -> None:
        """Keep this many of a request's tokens; its drafts are dropped."""
        known.tokens = known.tokens[:num_tokens]
        same = known.contents is known.nodes
        known.nodes = known.nodes[:num_tokens]
        known.contents = known.nodes if same else known.contents[:num_tokens]
        known.drafts = []
        known.num_hashed = min(known.num_hashed, num_tokens // self._size) if known.own else 0
        known.last_hash = b""
        if self._config.enable_caching:
            self._learn(known)

    def begin(self, known: SimulatedRequest, epoch: int) -> None:
        """Note that a request begins to be computed, with the weights of an epoch."""
        if known.epoch != epoch:
            known.epoch = epoch
            known.contents = self.in_epoch(known.nodes, epoch) if epoch else known.nodes

    def in_epoch(self, nodes: Nodes, epoch: int) -> Nodes:
        """Return the numbers of the contents that the weights of an epoch make of prefixes."""
        if not epoch:
            return nodes
        numbers = self._numbers
        return [numbers.setdefault((-epoch, node), len(numbers) + 1) for node in nodes]

    def own(self, known: SimulatedRequest) -> list[bytes]:
        """Return the engine's own hashes for blocks of a request that have none; none if it brings
        none.

        Each is one letter per block's prefix, so that a trace can write it; there are OWN of them.
        """
        found = []
        for end in range(self._size, len(known.nodes) + 1, self._size) if known.own else ():
            number = self._own.setdefault(known.nodes[end - 1], len(self._own))
            if number >= len(OWN):
                break
            block_hash = OWN[number].encode() * HASH_SIZE
            self._hashes.setdefault(block_hash, (known.nodes, end))
            found.append(block_hash)
        more = found[known.num_hashed :]
        known.num_hashed += len(more)
        return more

    def encode(self, num_tokens: int) -> Nodes:
        """Return the output of one encoder's run: its number at the position of each token."""
        self._num_encoders += 1
        return [FIRST_ENCODER - self._num_encoders] * num_tokens

    def numbers(self, known: SimulatedRequest, tokens: Sequence[int]) -> Nodes:
        """Return the numbers of tokens that follow a request's."""
        node = known.nodes[-1] if known.nodes else self._start(known.request)
        found = []
        media = known.request.media
        for position, token in enumerate(tokens, len(known.nodes)):
            seen = tuple(
                (each.identifier, position - each.offset)
                for each in media
                if 0 <= position - each.offset < each.length
            )
            step = (token, seen) if seen else token
            node = self._numbers.setdefault((node, step), len(self._numbers) + 1)
            found.append(node)
        return found

    def block(self, key: bytes, epoch: int = 0) -> Nodes:
        """Return the contents of a block under a key of an epoch, or of its first tokens under a
        tail key; a state stands for one prefix. Raises InvariantViolation.
        """
        return self.in_epoch(self._block(key), epoch)

    def _block(self, key: bytes) -> Nodes:
        group_id = group_of(key)
        group = self._config.groups[group_id]
        size = 1 if group.is_state else group.block_size
        known = self._hashes.get(key[:HASH_SIZE])
        if known is None:
            raise InvariantViolation("HASH-INJ", f"no prefix has the hash {key.hex()}")
        nodes, end = known
        if self._config.has_tails and not group.is_state:
            return nodes[(end - 1) // size * size : end]
        if end % size:
            detail = f"a key of group {group_id} ends at token {end}, blocks hold {size}"
            raise InvariantViolation("KEY-GRAN", detail)
        return nodes[end - size : end]

    def _start(self, request: Request) -> int:
        extra = (request.lora, request.cache_salt)
        if extra == (None, None):
            return 0
        return self._numbers.setdefault((0, extra), len(self._numbers) + 1)

    def _learn(self, known: SimulatedRequest) -> None:
        start = known.num_hashed * self._size
        if known.own or len(known.tokens) - start < self._size:
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
    """Make a request of one of KINDS."""
    match kind:
        case "lora":
            return Request(name, tokens, lora=LoRA("one"))
        case "salt":
            return Request(name, tokens, cache_salt="one")
        case "skip":
            return Request(name, tokens, skip_reading_prefix_cache=True)
        case "kept":
            return Request(name, tokens, retention=retention(0, 1 + len(tokens) // 2, 80, 2000))
        case "picture" | "sound" if len(tokens) > 2:
            length = (len(tokens) + 1) // 3
            return Request(name, tokens, media=(MediaItem(kind, length, length),))
    return Request(name, tokens)


def media_end(known: SimulatedRequest) -> int:
    """Return the fewest tokens that a request can be cut to with its media whole."""
    return max((each.offset + each.length for each in known.request.media), default=1)


def retention(first: int, end: int | None, level: int, ms: int | None) -> KvCacheRetentionConfig:
    """Make a wish for some tokens; those of answers may leave early."""
    wish = TokenRangeRetentionConfig(first, end, level, ms)
    return KvCacheRetentionConfig([wish], decode_retention_priority=min(level, 20))


KINDS = ("plain",) * 10 + ("picture", "sound", "lora", "salt", "skip", "own")
"""Kinds of requests; the plain one is the most likely."""
