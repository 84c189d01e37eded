# SPDX-License-Identifier: Apache-2.0
"""Requests as an observer knows them, and the namespaces of their tokens.

A namespace is an adapter, a salt, and whether the engine supplies its own hashes; each has a tree.
Media, embeddings and supplied hashes change the labels of the tokens that they cover. The plain
tokens of such requests are in one more tree, since the ideal compares plain tokens.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping
from hashlib import blake2b
from typing import Any

import attrs

from kvcore.explain.explanation import Nearest
from kvcore.explain.known_tokens import LABEL, Tree, TreePosition, num_equal
from kvcore.types.tokens import read_tokens
from kvcore.types.values import Request


def to_bytes(tokens: Any) -> bytes:
    """Encode tokens as labels of 4 bytes."""
    is_plain = isinstance(tokens, array) and tokens.typecode == "I"
    if is_plain or (isinstance(tokens, memoryview) and tokens.format == "I"):
        return bytes(tokens.tobytes())
    return array("I", read_tokens(tokens, signed=True)).tobytes()


@attrs.define(eq=False, kw_only=True)
class KnownRequest:
    """A request that the manager knows or knew.

    place: its place in its namespace. bare: the place of its plain tokens, if its labels differ
    from them. computed: the manager's count. step, before: the last batch that scheduled it, and
    its count before that. epoch: the epoch in which its count began.
    """

    name: str
    number: int
    place: TreePosition
    bare: TreePosition | None
    num_prompt: int
    known_before: tuple[int, Nearest | None]
    drafts: bytes = b""
    computed: int = 0
    step: int = -1
    before: int = 0
    was_admitted: bool = False
    epoch: int = 0
    loading: set[int] = attrs.field(factory=set)
    load_start: int = 0

    @property
    def labels(self) -> bytearray:
        """All its tokens, as labels of its namespace."""
        return self.place.labels

    @property
    def num_there(self) -> int:
        """The manager's count, without tokens that a load has not brought yet."""
        return min(self.computed, self.load_start) if self.loading else self.computed

    def extend(self, labels: bytes) -> None:
        """Add tokens."""
        self.place.labels += labels
        if self.bare is not None:
            self.bare.labels += labels

    def join(self) -> None:
        """Put all its tokens into the tree."""
        self.place.join()
        if self.bare is not None:
            self.bare.join()

    def schedule(self, step: int) -> None:
        """Note that the open batch computes tokens of it; to be called before its count rises."""
        if self.step != step:
            self.step, self.before = step, self.computed
        elif self.computed < self.before:  # a load has failed
            self.before = self.computed

    def settle(self, step: int, epoch: int) -> None:
        """Note what was computed of it for good, without what the open batch would compute."""
        count = min(self.before, self.num_there) if self.step == step else self.num_there
        if count:
            self.place.compute(count, is_fresh=self.epoch == epoch)


class Decodes:
    """Tokens and counts of calls of `append` that the requests do not have yet: those of the newest
    calls, while they name the same requests.
    """

    def __init__(self) -> None:
        self._requests: list[KnownRequest] = []
        self._named: list[Any] = []
        self._tokens = bytearray()
        self._count = self._in_step = self._step = 0

    def add(
        self, named: list[Any], known: Mapping[Any, KnownRequest], tokens: bytes | None, step: int
    ) -> None:
        """Note a call. named: the requests that got a slot, by their keys in `known`."""
        if named != self._named or tokens is None:
            self.flush()
            self._named, self._requests = named, [known[each] for each in named]
        self._in_step = self._in_step + 1 if self._count and self._step == step else 1
        self._tokens += tokens or b""
        self._count, self._step = self._count + 1, step
        if tokens is None:
            self.flush()

    def settle(self, request: KnownRequest) -> None:
        """Give the requests what they do not have yet if this is one of them."""
        if request in self._requests:
            self.flush()

    def flush(self) -> None:
        """Give the requests what they do not have yet."""
        tokens = array("I", bytes(self._tokens))
        stride = len(self._requests)
        for place, request in enumerate(self._requests if self._count else ()):
            request.extend(tokens[place::stride].tobytes())
            request.computed += self._count - self._in_step
            request.schedule(self._step)
            request.computed += self._in_step
        self._named, self._requests, self._count = [], [], 0
        self._tokens.clear()


class Namespaces:
    """All tokens that were ever known, by namespace."""

    def __init__(self, hash_block_size: int) -> None:
        self._fine = hash_block_size
        self._trees: dict[Any, Tree] = {_PLAIN: Tree()}
        self._bare: Tree | None = None
        self._names: list[str] = []

    def add(self, request: Request) -> KnownRequest:
        """Add a request with its prompt."""
        tokens = to_bytes(request.tokens)
        own = request.block_hashes is not None
        namespace = (request.lora, request.cache_salt, own)
        labels = tokens
        if request.media or request.prompt_embeds or own:
            labels = _labels(request, tokens, self._fine)
        is_bare = namespace != _PLAIN or labels is not tokens
        return self._add(request.request_id, namespace, labels, tokens if is_bare else None)

    def fork(self, parent: KnownRequest, name: str) -> KnownRequest:
        """Add a child that shares all that its parent has."""
        namespace = next(key for key, tree in self._trees.items() if tree is parent.place.tree)
        bare = None if parent.bare is None else bytes(parent.bare.labels)
        child = self._add(name, namespace, bytes(parent.labels), bare)
        child.num_prompt, child.epoch = parent.num_prompt, parent.epoch
        return child

    def shorten(self, request: KnownRequest, num_tokens: int) -> None:
        """Cut a request's tokens; those cut off stay known."""
        request.join()
        request.before = min(request.before, num_tokens)
        for each in (request.place, request.bare):
            if each is not None:
                each.edge.growing.remove(each)
                del each.labels[num_tokens * LABEL :]
                each.edge = each.tree.root
                each.tree.lengthen(each)

    def begin_epoch(self) -> None:
        """Start an epoch, in which nothing is computed yet."""
        for tree in self._trees.values():
            tree.begin_epoch()

    def lengths(
        self, request: KnownRequest, others: Iterable[KnownRequest], epoch: int
    ) -> tuple[int, int, int, int]:
        """Count a request's leading tokens that are known, known with equal extra keys, computed at
        any time, and computed in this epoch.

        others: the requests that the manager knows, with their counts.
        """
        place, labels = request.place, request.labels
        computed, fresh = place.num_computed()
        num_labels = len(labels) // LABEL
        for other in others:
            least = fresh if other.epoch == epoch else computed
            if other.computed <= least or other.num_there <= least:
                continue
            if other is request or least >= num_labels:
                continue
            if other.place.tree is place.tree:
                start, theirs = least * LABEL, other.labels
                if theirs[start : start + LABEL] == labels[start : start + LABEL]:
                    most = min(other.num_there, num_labels, len(theirs) // LABEL)
                    equal = num_equal(theirs, 0, labels, 0, most)
                    computed = max(computed, equal)
                    fresh = max(fresh, equal) if other.epoch == epoch else fresh
        same = max(computed, self._before(request, place.tree, bytes(labels)))
        known = same
        if self._bare is not None:
            tokens = bytes(labels if request.bare is None else request.bare.labels)
            for tree in (self._trees[_PLAIN], self._bare):
                known = max(known, self._before(request, tree, tokens))
        return known, same, computed, fresh

    def nearest(self, request: KnownRequest, known: int) -> Nearest | None:
        """Return the request that shares the first `known` tokens, if they were known when it was
        added.
        """
        length, nearest = request.known_before
        return nearest if known and length == known else None

    def _before(self, request: KnownRequest, tree: Tree, labels: bytes) -> int:
        return tree.match(labels, tree.root, request.number)[1]

    def _add(self, name: str, namespace: Any, labels: bytes, bare: bytes | None) -> KnownRequest:
        tree = self._trees.setdefault(namespace, Tree())
        number = len(self._names)
        self._names.append(name)
        trees = [(tree, labels)]
        if self._bare is not None or bare is not None:
            self._bare = self._bare or Tree()
            tokens = labels if bare is None else bare
            trees = [(self._trees[_PLAIN], tokens), (self._bare, tokens)]
        near = max((self._near(each, tokens) for each, tokens in trees), key=lambda near: near[0])
        return KnownRequest(
            name=name,
            number=number,
            place=tree.add(labels, number),
            bare=None if bare is None or self._bare is None else self._bare.add(bare, number),
            num_prompt=len(labels) // LABEL,
            known_before=near,
        )

    def _near(self, tree: Tree, labels: bytes) -> tuple[int, Nearest | None]:
        """Return how many of a new request's labels are in a tree, and whose they are."""
        edge, depth = tree.match(labels, tree.root)
        if not depth:
            return 0, None
        its = edge.label(depth) if depth < edge.end else b""
        if not its:
            its = next((k for k, c in edge.children.items() if c.newest == edge.newest), b"")
        mine = labels[depth * LABEL : (depth + 1) * LABEL]
        values = [array("I", each)[0] if each else None for each in (mine, its)]
        return depth, Nearest(
            request=self._names[edge.newest],
            differs_at=depth,
            token=values[0],
            its_token=values[1],
        )


_PLAIN = (None, None, False)


def _labels(request: Request, tokens: bytes, hash_block_size: int) -> bytes:
    """Return labels that combine tokens, media, embeddings and supplied hashes."""
    labels = array("I", tokens)
    for item in request.media:
        for position in range(item.offset, item.offset + item.length):
            place = f"{item.identifier} {position - item.offset}".encode()
            labels[position] = _mixed(labels[position], place)
    if request.prompt_embeds is not None:
        data, row = request.prompt_embeds.data, request.prompt_embeds.bytes_per_token
        for position in range(len(labels)):
            place = data[position * row : (position + 1) * row]
            labels[position] = _mixed(labels[position], place)
    for number, each in enumerate(request.block_hashes or ()):
        for position in range(number * hash_block_size, (number + 1) * hash_block_size):
            labels[position] = _mixed(position, each)
    return labels.tobytes()


def _mixed(label: int, data: bytes) -> int:
    """Return a label for one and other data; it has no structure in which two could be equal."""
    mixed = blake2b(label.to_bytes(4, "little") + data, digest_size=LABEL)
    return int.from_bytes(mixed.digest(), "little")
