# SPDX-License-Identifier: Apache-2.0
"""Requests as an observer knows them, and the namespaces of their tokens.

A namespace is an adapter, a salt, and whether the engine supplies its own hashes; each has a tree.
Media, embeddings and supplied hashes change the labels of the tokens that they cover. The plain
tokens of such requests are in one more tree, since the ideal compares plain tokens.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from hashlib import blake2b
from typing import Any

import attrs

from kvcore.explain.explanation import Nearest
from kvcore.explain.known_tokens import LABEL, Edge, Segment, Tree, TreePosition, num_equal
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
    its count before that. held: its blocks, in table order unless is_odd (copied, swapped, cut).
    places, states: blocks by place (group, position), when all of its table was looked at last, and
    the newest states. has_moved: whether blocks left since `held` was set, so that only the places
    tell which ones it holds. published: blocks per group that need no further check. epoch: the
    epoch in which its count began.
    """

    name: str
    number: int
    place: TreePosition
    bare: TreePosition | None
    sizes: Sequence[int]
    num_prompt: int
    known_before: tuple[int, Nearest | None]
    drafts: bytes = b""
    computed: int = 0
    step: int = -1
    before: int = 0
    holds: bool = False
    was_admitted: bool = False
    is_odd: bool = False
    epoch: int = 0
    loading: set[int] = attrs.field(factory=set)
    load_start: int = 0
    places: dict[tuple[int, int], int] = attrs.field(factory=dict)
    states: dict[tuple[int, int], int] = attrs.field(factory=dict)
    published: list[int] = attrs.field(init=False)
    has_moved: bool = False
    _held: list[int] = attrs.field(factory=list)
    _on_edge: tuple[Edge, int, int] | None = None

    def __attrs_post_init__(self) -> None:
        self.published = [0] * len(self.sizes)

    @property
    def held(self) -> list[int]:
        """The blocks that it holds."""
        if self.has_moved:
            self.held = list(self.places.values())
        return self._held

    @held.setter
    def held(self, blocks: list[int]) -> None:
        self._held, self.has_moved = blocks, False

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

    def content(self, group_id: int, position: int) -> tuple[Segment, int, int]:
        """Return the content of the block at a position of its table, or of the part of a block at
        a position among those of its group.
        """
        return self.run_from(group_id, position)[0]

    def run_from(self, group_id: int, position: int) -> tuple[tuple[Segment, int, int], int]:
        """Return a content, and the position at which those behind it in its segment end."""
        size = self.sizes[group_id]
        edge, end = self.place.edge, self.place.edge.end // size
        while edge.start // size > position and edge.parent is not None:
            end = edge.start // size
            edge = edge.parent
        content = edge.segment, group_id, position - edge.segment.start // size
        return content, max(end, position + 1)


class Namespaces:
    """All tokens that were ever known, by namespace. sizes: tokens per block of each group."""

    def __init__(self, sizes: Sequence[int], hash_block_size: int) -> None:
        self._sizes, self._fine = sizes, hash_block_size
        self._trees: dict[Any, Tree] = {_PLAIN: Tree(sizes)}
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
        child.num_prompt, child.is_odd = parent.num_prompt, True
        child.epoch, parent.is_odd = parent.epoch, True
        return child

    def shorten(self, request: KnownRequest, num_tokens: int) -> None:
        """Cut a request's tokens; those cut off stay known."""
        request.join()
        request.is_odd, request.published = True, [0] * len(self._sizes)
        request.before = min(request.before, num_tokens)
        for each in (request.place, request.bare):
            if each is not None:
                each.edge.growing.remove(each)
                del each.labels[num_tokens * LABEL :]
                each.edge = each.tree.root
                each.tree.lengthen(each)

    def begin_epoch(self) -> None:
        """Start an epoch, in which nothing is computed yet and nothing was findable."""
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
            if other.num_there <= least or other is request or least >= num_labels:
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
        tree = self._trees.setdefault(namespace, Tree(self._sizes))
        number = len(self._names)
        self._names.append(name)
        trees = [(tree, labels)]
        if self._bare is not None or bare is not None:
            self._bare = self._bare or Tree(self._sizes)
            tokens = labels if bare is None else bare
            trees = [(self._trees[_PLAIN], tokens), (self._bare, tokens)]
        near = max((self._near(each, tokens) for each, tokens in trees), key=lambda near: near[0])
        return KnownRequest(
            name=name,
            number=number,
            place=tree.add(labels, number),
            bare=None if bare is None or self._bare is None else self._bare.add(bare, number),
            sizes=self._sizes,
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
