# SPDX-License-Identifier: Apache-2.0
"""Makes tokens for what a trace only names: prompts from hash ids, and outputs.

An id always stands for the same tokens, in every process and version. Two ids below 2**29 differ in
every token, so that blocks of any size are equal only if ids are. Prompts have tokens below 2**30,
outputs from there to 2**31: an output never equals a prompt, nor the output of another request.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence
from functools import lru_cache
from itertools import chain
from random import Random

ID_BITS = 29
OUTPUT_BITS = 30
TOKEN_BYTES = 4
NUM_CACHED = 4096
_SCATTER = 2654435761
"""An odd number: multiplying by it permutes the numbers of any number of bits."""


def prompt_tokens(ids: Sequence[int], num_tokens: int, unit: int) -> array[int]:
    """Return the first `num_tokens` tokens of the ids, as unsigned 32-bit integers."""
    tokens = array("I", b"")
    tokens.frombytes(b"".join([id_bytes(each, unit) for each in ids])[: num_tokens * TOKEN_BYTES])
    if sys.byteorder == "big":
        tokens.byteswap()
    return tokens


def outputs(request: int, num_tokens: int) -> array[int]:
    """Return the first outputs of a request given by its number in the trace."""
    base = 1 << OUTPUT_BITS
    start = base + request * _SCATTER % base
    end = start + num_tokens
    return array("I", chain(range(start, min(end, 2 * base)), range(base, end - base)))


@lru_cache(NUM_CACHED)
def id_bytes(hash_id: int, unit: int) -> bytes:
    """Return the tokens of one id, little-endian.

    One sum of large integers makes all of them: each token has 32 bits of it, and no sum overflows
    into its neighbour.
    """
    pattern, ones = _pattern(hash_id >> ID_BITS, unit)
    low = hash_id & ((1 << ID_BITS) - 1)
    return (pattern + low * ones).to_bytes(unit * TOKEN_BYTES, "little")


@lru_cache(64)
def _pattern(seed: int, unit: int) -> tuple[int, int]:
    random = Random(seed)
    pattern = ones = 0
    for position in range(unit):
        pattern |= random.getrandbits(ID_BITS) << (8 * TOKEN_BYTES * position)
        ones |= 1 << (8 * TOKEN_BYTES * position)
    return pattern, ones
