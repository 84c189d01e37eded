# SPDX-License-Identifier: Apache-2.0
"""A request as an engine knows it, and random requests of every kind."""

from __future__ import annotations

import hashlib
from random import Random
from typing import Any

import attrs

from kvcore import LoRA, MediaItem, PromptEmbeds, Request
from tests.oracle.contents import Contents

ADAPTERS = (LoRA("a"), LoRA("b"), LoRA("a", "path"))
IMAGES = {"cat": 2, "dog": 3, "film": 6}
NUM_TOKEN_IDS = 3
Stuff = tuple[Any, ...]
"""The token at a position, and what else decides its keys and values from there on."""


@attrs.define
class Guess:
    """Drafts that were scheduled before anybody knew them.

    offset: position of the first one. accepted, rejected: how many. batch: which one computes them,
    None while it is open.
    """

    offset: int
    accepted: int
    rejected: int
    batch: int | None = None


@attrs.define(kw_only=True)
class OracleRequest:
    """A request as its engine knows it.

    stuff: what stands at each position. count: of computed tokens. base: the count before its first
    slots in the open batch, None if it has none there; kept: what it keeps of them whatever is
    unscheduled. own: of the engine's hashes handed in, None if kvcore hashes. future: tokens of
    scheduled positions that are to come, each with the batch that samples it. guesses: drafts among
    these, whose verdict is to come. sampler: the batch that samples its next token, None if that is
    not certain. marked: a cut went through media or embeddings, so that keys differ from those of
    equal tokens. loading: unfinished loads, each with its first token; load_end: the tokens that
    are there when they end. num_learned: tokens of known keys. transfer: first and end of tokens on
    their way, and their batch.
    """

    name: str
    row: int
    stuff: list[Stuff]
    embedded: int = 0
    drafts: list[int] = attrs.Factory(list)
    future: list[tuple[int, int | None]] = attrs.Factory(list)
    guesses: list[Guess] = attrs.Factory(list)
    sampler: int | None = None
    count: int = 0
    base: int | None = None
    kept: int = 0
    swapped: bool = False
    own: int | None = None
    skips: bool = False
    marked: bool = False
    encoder: int = 0
    num_encoder_tokens: int = 0
    loading: dict[int, int] = attrs.Factory(dict)
    transfer: tuple[int, int, int] | None = None
    load_end: int = 0
    num_learned: int = 0

    @property
    def is_idle(self) -> bool:
        """Tell whether it can be scheduled, cut and shared."""
        return not (self.swapped or self.loading or self.transfer)

    @property
    def is_settled(self) -> bool:
        """Tell whether no scheduled draft waits for its verdict."""
        return bool(self.num_to_come) or self.count <= len(self.stuff)

    @property
    def num_to_come(self) -> int:
        """Scheduled positions whose tokens, or the verdict on whose drafts, are to come."""
        return 0 if self.drafts else max(0, self.count - len(self.stuff))

    @property
    def num_rejected(self) -> int:
        """Positions among these that hold drafts which were rejected."""
        return sum(each.rejected for each in self.guesses)

    @property
    def is_caught_up(self) -> bool:
        """Tell whether all its tokens are scheduled, those to come included."""
        return self.count == len(self.stuff) + len(self.future) + self.num_rejected

    def settled_count(self) -> int:
        """Return the known tokens that it counted before the open batch, without drafts."""
        count = self.count if self.base is None else self.base
        return min(count, len(self.stuff))

    def saved_count(self) -> int:
        """Return its count when swapped out: the last token is sampled again if more are to
        come.
        """
        return min(self.settled_count(), len(self.stuff) - bool(self.num_to_come))

    def chain(self, contents: Contents) -> list[int]:
        """Return the prefixes that end with each of its tokens, with those to come and drafts."""
        more = [token for token, _ in self.future] + self.drafts
        return contents.chain(0, [*self.stuff, *((token,) for token in more)])

    def add(self, tokens: list[int]) -> None:
        """Note tokens after those that it has."""
        self.stuff += [(token,) for token in tokens]

    def cut(self, num_tokens: int, hash_size: int) -> None:
        """Note that it keeps this many tokens."""
        start = num_tokens // hash_size * hash_size
        rest = self.stuff[num_tokens - 1 : num_tokens + 1]
        through_media = len(rest) == 2 and _goes_on(rest[1])
        self.marked |= start < num_tokens and (through_media or start < self.embedded)
        self.embedded = min(self.embedded, num_tokens)
        self.stuff = self.stuff[:num_tokens]
        if self.own is not None:
            self.own = min(self.own, num_tokens // hash_size)
        self.num_learned = min(self.num_learned, num_tokens)


def _goes_on(at: Stuff) -> bool:
    """Tell whether a media item has this position and the one before."""
    return any(each[0] == "media" and each[1][1] > 0 for each in at[1:])


def own_hashes(chain: list[int], hash_size: int, first: int, end: int) -> list[bytes]:
    """Return an engine's own hashes of the full blocks from first up to end."""
    ends = range((first + 1) * hash_size - 1, end * hash_size, hash_size)
    return [hashlib.sha256(b"own %d" % chain[at]).digest() for at in ends]


def draw_request(
    rng: Random, name: str, contents: Contents, families: list[list[int]], caching: bool, size: int
) -> tuple[Request, OracleRequest]:
    """Draw a request, most often with a prefix that others have. size: tokens of a hash block."""
    tokens = [rng.randrange(NUM_TOKEN_IDS) for _ in range(rng.randint(1, 9))]
    if families and rng.random() < 0.75:
        family = rng.choice(families)
        tokens = family[: rng.randint(1, len(family))] + tokens[: rng.randint(0, 6)]
    families.append(tokens[:24])
    del families[:-6]
    stuff: list[Stuff] = [(token,) for token in tokens]
    given: dict[str, Any] = {}
    if rng.random() < 0.12:
        given["lora"] = rng.choice(ADAPTERS)
        stuff[0] += (("lora", given["lora"]),)
    if rng.random() < 0.15:
        given["media"] = draw_media(rng, len(tokens))
        for item in given["media"]:
            for at in range(item.length):
                stuff[item.offset + at] += (("media", (item.identifier, at)),)
    if rng.random() < 0.1:
        given["cache_salt"] = rng.choice(("one", "two"))
        stuff[0] += (("salt", given["cache_salt"]),)
    if rng.random() < 0.08:
        rows = [bytes((token, rng.random() < 0.1)) for token in tokens]
        given["prompt_embeds"] = PromptEmbeds(b"".join(rows), 2)
        stuff = [(*each, ("row", row)) for each, row in zip(stuff, rows, strict=True)]
    known = OracleRequest(name=name, row=-1, stuff=stuff, skips=rng.random() < 0.05)
    known.embedded = len(tokens) if "prompt_embeds" in given else 0
    if caching and rng.random() < 0.1:
        known.own = rng.randint(0, len(tokens) // size)
        given["block_hashes"] = own_hashes(known.chain(contents), size, 0, known.own)
    if known.skips:
        given["skip_reading_prefix_cache"] = True
    return Request(name, tokens, **given), known


def draw_media(rng: Random, num_tokens: int) -> list[MediaItem]:
    """Draw items within this many tokens; they may overlap. Their identifiers say their length."""
    items, offset = [], 0
    for _ in range(rng.randint(1, 3)):
        identifier, offset = rng.choice(list(IMAGES)), offset + rng.randint(0, 3)
        if offset + IMAGES[identifier] > num_tokens:
            break
        items.append(MediaItem(identifier, offset, IMAGES[identifier]))
    return items
