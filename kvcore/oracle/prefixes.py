# SPDX-License-Identifier: Apache-2.0
"""Numbers prefixes: equal numbers mean equal content, whatever the hashes are.

No transition calls anything here. The keys and values of a position depend on the tokens up to it,
the adapter, and the media items or embedding at the position; the salt, and the epoch of weights if
above 0, decide which requests may share them. Together these are the identity of a prefix. A hash
stands for one identity, that of the first request with it; hashes have one granularity, and a block
ends where a hash ends.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Protocol

import attrs

from kvcore.oracle.contents import group_of
from kvcore.types.config import Config
from kvcore.types.errors import InvariantViolation
from kvcore.types.extra_inputs import NO_EXTRA_KEYS, ExtraKeys
from kvcore.types.keys import HASH_SIZE

Letter = tuple[object, ...]
"""What one position adds to a prefix: its token, and the media item or embedding there."""

EPOCH = "epoch"
"""Marks the extra first letter of a prefix that began in an epoch above 0."""

NOTHING = (None,) * 4
"""The second part of the letter of a plain token."""

PREFIX_PROPERTIES = {
    "HASH-INJ": "a block hash stands for exactly one sequence of tokens",
    "KEY-SEP": "equal tokens with another adapter, media item, embedding or salt have another key",
    "KEY-GRAN": "a key ends where a block of its group ends, a tail key inside one",
}


class Tokens(Protocol):
    """A request's tokens, the drafts after them, and what else belongs to its prefixes."""

    @property
    def tokens(self) -> Iterable[int]: ...
    @property
    def drafts(self) -> Sequence[int]: ...
    @property
    def extra_keys(self) -> ExtraKeys: ...


class Hashed(Tokens, Protocol):
    """A request with the hashes of its full blocks."""

    @property
    def block_hashes(self) -> Sequence[bytes]: ...


class Requests(Protocol):
    """Anything that has requests, such as a state."""

    @property
    def requests(self) -> Mapping[str, Hashed]: ...


@attrs.frozen
class Chain:
    """The meaning of a hash: the first `end` tokens of a request, and their letters."""

    tokens: tuple[int, ...]
    letters: tuple[Letter, ...]
    nodes: tuple[int, ...]
    end: int


Learnt = tuple[bytes, tuple[int, ...], tuple[Letter, ...], int]
"""A hash, and the tokens, letters and length of what it stands for."""


class Prefixes:
    """The tree of all prefixes seen so far, and the identity of each hash."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._children: dict[tuple[int, Letter], int] = {}
        self._paths: dict[int, tuple[Letter, ...]] = {}
        self._nodes: dict[tuple[Letter, ...], tuple[int, ...]] = {}
        self._letters: dict[tuple[tuple[int, ...], ExtraKeys], tuple[Letter, ...]] = {}
        self._chains: dict[bytes, Chain] = {}
        self._num_reported = 0

    def nodes(self, request: Tokens, epoch: int = 0) -> tuple[int, ...]:
        """Return the number of the prefix that ends at each token and draft of a request. epoch: in
        which it began to compute.
        """
        return self.number(in_epoch(self.letters(request), epoch))[epoch > 0 :]

    def letters(self, request: Tokens) -> tuple[Letter, ...]:
        """Return the letter of each token and draft of a request."""
        tokens = (*request.tokens, *request.drafts)
        known = self._letters.get((tokens, request.extra_keys))
        if known is None:
            known = tuple(_letters(tokens, request.extra_keys, self._config.hash_block_size))
            self._letters[tokens, request.extra_keys] = known
        return known

    def news(self) -> list[Learnt]:
        """Return the hashes that were learnt since the last call."""
        new = list(self._chains.items())[self._num_reported :]
        self._num_reported = len(self._chains)
        return [(block_hash, each.tokens, each.letters, each.end) for block_hash, each in new]

    def take_in(self, news: Iterable[Learnt]) -> None:
        """Add what another process learnt."""
        for block_hash, tokens, letters, end in news:
            if block_hash not in self._chains:
                chain = Chain(tokens, letters, self.number(letters), end)
                self._chains[block_hash] = chain
        self._num_reported = len(self._chains)

    def learn(self, state: Requests) -> None:
        """Learn the identities of the hashes of a state's requests. Raises as `learn_from` does."""
        self.learn_from(state.requests.values())

    def learn_from(self, requests: Iterable[Hashed]) -> None:
        """Learn the identities of these requests' hashes; the first request with a hash decides.
        Hashes behind the tokens are left out: REQ-HASH reports them. Raises InvariantViolation
        (HASH-INJ, KEY-SEP) after all are learnt.
        """
        size, wrong = self._config.hash_block_size, None
        for request in requests:
            if not request.block_hashes:
                continue
            letters = self.letters(request)
            nodes = self.number(letters)
            tokens = tuple(request.tokens)
            for position, block_hash in enumerate(request.block_hashes):
                end = (position + 1) * size
                if end > len(tokens):
                    break
                known = self._chains.get(block_hash)
                if known is None:
                    self._chains[block_hash] = Chain(tokens, letters, nodes, end)
                elif known.end != end or known.nodes[end - 1] != nodes[end - 1]:
                    wrong = _collision(block_hash, known, Chain(tokens, letters, nodes, end))
        if wrong is not None:
            raise wrong

    def chain(self, key: bytes) -> tuple[Letter, ...]:
        """Return the letters of the prefix that ends with a block under a key."""
        chain = self._chains[key[:HASH_SIZE]]
        return chain.letters[: chain.end]

    def tokens(self, key: bytes) -> tuple[int, ...]:
        """Return the tokens of the prefix that ends with a block under a key."""
        chain = self._chains[key[:HASH_SIZE]]
        return chain.tokens[: chain.end]

    def block(self, key: bytes, epoch: int = 0) -> tuple[int, ...]:
        """Return the prefixes in a block under a key of an epoch; that of a state is one. Raises
        InvariantViolation (KEY-GRAN).
        """
        group_id = group_of(key)
        size = self._config.groups[group_id].block_size
        chain = self._chains[key[:HASH_SIZE]]
        if self._config.groups[group_id].is_state:
            size = 1
        if chain.end % size:
            detail = f"a key of group {group_id} ends at token {chain.end}, blocks hold {size}"
            raise InvariantViolation("KEY-GRAN", detail)
        nodes = self.number(in_epoch(chain.letters, epoch))[1:] if epoch else chain.nodes
        return nodes[chain.end - size : chain.end]

    def tail(self, key: bytes, epoch: int = 0) -> tuple[int, ...]:
        """Return the prefixes in a block up to the end of a tail key of an epoch. Raises
        InvariantViolation (KEY-GRAN).
        """
        group_id = group_of(key)
        size, chain = self._config.groups[group_id].block_size, self._chains[key[:HASH_SIZE]]
        num_inside = chain.end % size
        if not num_inside or self._config.groups[group_id].is_state:
            detail = f"a tail key of group {group_id} ends at token {chain.end}, blocks hold {size}"
            raise InvariantViolation("KEY-GRAN", detail)
        nodes = self.number(in_epoch(chain.letters, epoch))[1:] if epoch else chain.nodes
        return nodes[chain.end - num_inside : chain.end]

    def path(self, node: int) -> tuple[Letter, ...]:
        """Return the letters of the prefix with a number."""
        return self._paths[node]

    def tokens_of_nodes(self) -> dict[int, tuple[int, ...]]:
        """Return the tokens of each numbered prefix."""
        found: dict[int, tuple[int, ...]] = {0: ()}
        for (parent, letter), node in self._children.items():
            token = letter[0]
            found[node] = (*found[parent], token if isinstance(token, int) else -1)
        return found

    def number(self, letters: tuple[Letter, ...]) -> tuple[int, ...]:
        """Return the number of the prefix that ends at each letter."""
        known = self._nodes.get(letters)
        if known is None:
            node, found = 0, []
            for letter in letters:
                node = self._children.setdefault((node, letter), len(self._children) + 1)
                found.append(node)
                self._paths.setdefault(node, letters[: len(found)])
            known = self._nodes[letters] = tuple(found)
        return known


def in_epoch(letters: tuple[Letter, ...], epoch: int) -> tuple[Letter, ...]:
    """Return the letters of a prefix that began in an epoch, with an extra first letter above epoch
    0.
    """
    return ((EPOCH, epoch), *letters) if epoch else letters


def _letters(
    tokens: tuple[int, ...], extra_keys: ExtraKeys, hash_block_size: int
) -> Iterator[Letter]:
    if extra_keys == NO_EXTRA_KEYS:
        yield from ((token,) for token in tokens)
        return
    places: dict[int, tuple[tuple[str, int], ...]] = {}
    for item in extra_keys.media:
        for position in range(item.offset, item.end):
            place = (item.identifier, position - item.offset)
            places[position] = (*places.get(position, ()), place)
    lora, salt, embeds = extra_keys.lora, extra_keys.cache_salt, extra_keys.embeds
    for position, token in enumerate(tokens):
        row = embeds[position // hash_block_size] if position < extra_keys.num_rows else None
        extra = (lora, salt if position == 0 else None, places.get(position), row)
        yield (token,) if extra == NOTHING else (token, *extra)


def _collision(block_hash: bytes, known: Chain, other: Chain) -> InvariantViolation:
    same = known.tokens[: known.end] == other.tokens[: other.end]
    detail = f"hash {block_hash.hex()[:8]} stands for {_said(known)} and for {_said(other)}"
    return InvariantViolation("KEY-SEP" if same else "HASH-INJ", detail)


def _said(chain: Chain) -> str:
    """Format the identity of a hash: its tokens, and what else is part of the prefix."""
    letters = chain.letters[: chain.end]
    others = [repr(each) for letter in letters for each in letter[1:] if each is not None]
    behind = f" with {', '.join(dict.fromkeys(others))}" if others else ""
    return f"tokens {', '.join(map(str, chain.tokens[: chain.end]))}{behind}"
