# SPDX-License-Identifier: Apache-2.0
"""Damaged bytes: real ones whose parts were changed, cut, copied or put elsewhere.

The fields of a sample are changed, so most of the damage lies behind the first check of a decoder.
Everything is drawn from one source of random numbers: a seed gives the same bytes again, and
Hypothesis, which can be the source, finds small damage.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from random import Random

import attrs

NUMBERS = (0, 1, 2, 127, 128, 255, 256, 2**16, 2**31 - 1, 2**31, 2**32 - 2, 2**32 - 1, 2**64 - 1)
MOST_CHANGES = 4
DIGITS_MAX = 1000
"""Python makes no number of more than 4,300 digits."""
_WORD = re.compile(rb"\w+|\s+|.", re.DOTALL)


@attrs.frozen
class Sample:
    """Real bytes, as the fields that they consist of."""

    fields: tuple[bytes, ...]


def split_words(data: bytes) -> Sample:
    """Return the words, gaps and signs of a text."""
    return Sample(tuple(_WORD.findall(data)))


def split_at(data: bytes, starts: Iterable[int]) -> Sample:
    """Return the fields that start at these places."""
    places = sorted({0, *starts, len(data)})
    return Sample(tuple(data[a:b] for a, b in pairwise(places)))


class Damager:
    """Makes damaged bytes of samples.

    words: what else may stand in the place of a field; for binary samples the numbers at which
    counts go wrong are among them.
    """

    def __init__(self, samples: Sequence[Sample], words: Sequence[bytes] = ()) -> None:
        self.samples = samples
        self._words = words

    def make(self, random: Random) -> bytes:
        """Return damaged bytes; now and then a sample as it is."""
        fields = list(random.choice(self.samples).fields)
        for _ in range(random.choice((0, 1, 1, 1, 1, 1, 2, 2, 3, MOST_CHANGES))):
            random.choice(_CHANGES)(self, random, fields)
        data = b"".join(fields)
        if random.randrange(12) == 0:
            return data[: random.randrange(len(data) + 1)]
        return data

    def _place(self, random: Random, fields: list[bytes]) -> int:
        if not fields:
            fields.append(b"\0")
        return random.randrange(len(fields))

    def _word(self, random: Random, like: bytes) -> bytes:
        """Return something to put in the place of a field."""
        if self._words and random.randrange(2):
            return random.choice(self._words)
        if random.randrange(3) == 0:
            fields = random.choice(self.samples).fields
            return random.choice(fields) if fields else b""
        size = len(like) if len(like) in (1, 4, 8) else 4
        return (random.choice(NUMBERS) % (1 << 8 * size)).to_bytes(size, "little")

    def flip(self, random: Random, fields: list[bytes]) -> None:
        """Change one bit."""
        at = self._place(random, fields)
        changed = bytearray(fields[at] or b"\0")
        changed[random.randrange(len(changed))] ^= 1 << random.randrange(8)
        fields[at] = bytes(changed)

    def count(self, random: Random, fields: list[bytes]) -> None:
        """Make a number one more or less."""
        at = self._place(random, fields)
        if fields[at].isdigit() and len(fields[at]) < DIGITS_MAX:
            fields[at] = str(int(fields[at]) + random.choice((-1, 1))).encode()
        elif len(fields[at]) <= 8:
            value = int.from_bytes(fields[at], "little") + random.choice((-1, 1))
            fields[at] = (value % 256 ** len(fields[at])).to_bytes(len(fields[at]), "little")

    def put(self, random: Random, fields: list[bytes]) -> None:
        """Put something else in the place of a field."""
        at = self._place(random, fields)
        fields[at] = self._word(random, fields[at])

    def insert(self, random: Random, fields: list[bytes]) -> None:
        """Put something between two fields."""
        at = self._place(random, fields)
        fields.insert(at, self._word(random, fields[at]))

    def cut(self, random: Random, fields: list[bytes]) -> None:
        """Leave some fields out."""
        at = self._place(random, fields)
        del fields[at : at + 1 + random.choice((0, 0, 1, 3, 9))]

    def copy(self, random: Random, fields: list[bytes]) -> None:
        """Say some fields twice."""
        at = self._place(random, fields)
        fields[at:at] = fields[at : at + 1 + random.choice((0, 0, 1, 3, 9))]

    def swap(self, random: Random, fields: list[bytes]) -> None:
        """Exchange two fields."""
        one, other = self._place(random, fields), self._place(random, fields)
        fields[one], fields[other] = fields[other], fields[one]

    def graft(self, random: Random, fields: list[bytes]) -> None:
        """Go on as another sample does."""
        other = random.choice(self.samples).fields
        at = self._place(random, fields)
        there = min(at, len(other)) if random.randrange(2) else random.randrange(len(other) + 1)
        fields[at:] = other[there:]


_CHANGES: tuple[Callable[[Damager, Random, list[bytes]], None], ...] = (
    *(Damager.flip, Damager.count, Damager.put, Damager.put, Damager.insert, Damager.cut),
    *(Damager.copy, Damager.swap, Damager.graft),
)
