# SPDX-License-Identifier: Apache-2.0
"""A prefix tree of all tokens ever seen, and how far they were computed.

A token is a label of 4 bytes in native byte order. An edge is a run of labels that all requests
which pass its start share; an edge also ends where a request ends. The labels that a request added
to the tree are its segment, which stays whole when edges are split. Outputs of a running request
join the tree when another request could match them.
"""

from __future__ import annotations

import attrs

LABEL = 4


@attrs.define(eq=False)
class Segment:
    """Labels that one request added. start: position of the first."""

    start: int
    labels: bytearray


@attrs.define(eq=False)
class Edge:
    """Positions [start, end) of a prefix. first, newest: numbers of the first and the newest
    request with it. computed, fresh: how far it was computed, at any time and in this epoch.
    growing: places that end here and still get outputs.
    """

    parent: Edge | None
    segment: Segment
    start: int
    end: int
    first: int
    newest: int
    computed: int = 0
    fresh: int = 0
    children: dict[bytes, Edge] = attrs.field(factory=dict)
    growing: list[TreePosition] = attrs.field(factory=list)

    def label(self, position: int) -> bytes:
        """Return the label at a position of this edge."""
        place = (position - self.segment.start) * LABEL
        return bytes(self.segment.labels[place : place + LABEL])


@attrs.define(eq=False)
class TreePosition:
    """Where a request ends in a tree. labels: all of its labels; those after its edge are not in
    the tree.
    """

    tree: Tree
    number: int
    labels: bytearray
    edge: Edge

    def join(self) -> None:
        """Put all labels into the tree."""
        if len(self.labels) > self.edge.end * LABEL:
            self.tree.lengthen(self)

    def compute(self, count: int, *, is_fresh: bool) -> None:
        """Note that the first `count` labels are computed. is_fresh: in this epoch."""
        self.join()
        edge = self.edge
        while edge.parent is not None:
            reached = min(count, edge.end)
            if reached > edge.start:
                if edge.fresh >= reached or (edge.computed >= reached and not is_fresh):
                    return
                edge.computed = max(edge.computed, reached)
                edge.fresh = reached if is_fresh else edge.fresh
            edge = edge.parent

    def num_computed(self) -> tuple[int, int]:
        """Return the number of leading labels that were computed, at any time and in this epoch."""
        edge = self.edge
        while edge.parent is not None and edge.computed <= edge.start:
            edge = edge.parent
        computed = edge.computed
        while edge.parent is not None and edge.fresh <= edge.start:
            edge = edge.parent
        return computed, edge.fresh


class Tree:
    """The prefixes of one namespace."""

    def __init__(self) -> None:
        self.root = Edge(None, Segment(0, bytearray()), 0, 0, -1, -1)

    def add(self, labels: bytes, number: int) -> TreePosition:
        """Add the labels of a request. number: of the request; above all earlier ones."""
        place = TreePosition(self, number, bytearray(labels), self.root)
        self.lengthen(place)
        return place

    def match(self, labels: bytes, edge: Edge, before: int | None = None) -> tuple[Edge, int]:
        """Return how many labels are in the tree, and the edge with the last of them.

        edge: start at its end. before: count only labels of requests with a lower number.
        """
        depth, num_labels = edge.end, len(labels) // LABEL
        while depth < num_labels:
            child = edge.children.get(labels[depth * LABEL : (depth + 1) * LABEL])
            if child is None or (before is not None and child.first >= before):
                late = [each for each in edge.growing if len(each.labels) > edge.end * LABEL]
                for each in late:
                    each.join()
                if not late:
                    break
                child = edge if edge.end > depth else None
            if child is None:
                continue
            edge, most = child, min(child.end, num_labels) - depth
            segment = child.segment
            depth += num_equal(segment.labels, depth - segment.start, labels, depth, most)
            if depth < child.end:
                break
        return edge, depth

    def lengthen(self, place: TreePosition) -> None:
        """Add the labels after a place's edge to the tree."""
        old, labels, number = place.edge, bytes(place.labels), place.number
        if place in old.growing:
            old.growing.remove(place)
        num_labels, tail = len(labels) // LABEL, old.segment
        own = old.first == old.newest == number and not old.children and not old.growing
        if own and (old.end - tail.start) * LABEL == len(tail.labels):
            tail.labels += labels[old.end * LABEL :]
            old.end = num_labels
        else:
            edge, depth = self.match(labels, old)
            if depth < edge.end:
                edge = self._split(edge, depth)
            each: Edge | None = edge
            while each is not None and each.parent is not None:
                each.first, each.newest = min(each.first, number), max(each.newest, number)
                each = each.parent
            if depth < num_labels:
                behind = labels[depth * LABEL :]
                segment = Segment(depth, bytearray(behind))
                new = Edge(edge, segment, depth, num_labels, number, number)
                edge.children[behind[:LABEL]] = new
                edge = new
            place.edge = edge
        place.edge.growing.append(place)

    def begin_epoch(self) -> None:
        """Start an epoch, in which nothing is computed yet."""
        edges = [self.root]
        for edge in edges:  # it grows
            edge.fresh = 0
            edges.extend(edge.children.values())

    def _split(self, edge: Edge, depth: int) -> Edge:
        """Split an edge in two; return the upper one, which is new."""
        assert edge.parent is not None
        upper = attrs.evolve(edge, end=depth, children={edge.label(depth): edge}, growing=[])
        upper.computed, upper.fresh = min(edge.computed, depth), min(edge.fresh, depth)
        edge.parent.children[edge.label(edge.start)] = upper
        edge.parent, edge.start = upper, depth
        return upper


def num_equal(one: bytearray, start: int, other: bytes | bytearray, place: int, most: int) -> int:
    """Return how many labels are equal, from a position of each on, at most `most`."""
    low, high = 0, most
    step = high
    while low < high:
        size = step * LABEL
        here, there = (start + low) * LABEL, (place + low) * LABEL
        if one[here : here + size] == other[there : there + size]:
            low += step
        else:
            high = low + step - 1
        step = max(1, (high - low) // 2)
    return low
