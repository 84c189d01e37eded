# SPDX-License-Identifier: Apache-2.0
"""Makes tokens for what a trace only names: prompts from hash ids, and outputs.

An id always stands for the same tokens, in every process and version: below 2**29 for itself, again
and again, so that two of these ids differ in every token, and blocks of any size are equal only if
ids are; from there on for numbers made of its bytes. Prompts have tokens below 2**30, outputs from
there to 2**31: an output never equals a prompt, nor the output of another request.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence
from hashlib import blake2b
from itertools import chain

ID_BITS = 29
OUTPUT_BITS = 30
TOKEN_BYTES = 4
_LOW_BITS = int.from_bytes(((1 << ID_BITS) - 1).to_bytes(TOKEN_BYTES, "little") * 16, "little")
_SCATTER = 2654435761
"""An odd number: multiplying by it permutes the numbers of any number of bits."""


def prompt_tokens(ids: Sequence[int], num_tokens: int, unit: int) -> array[int]:
    """Return the first `num_tokens` tokens of the ids, as unsigned 32-bit integers."""
    parts = [id_bytes(each, unit) for each in ids]
    tokens = array("I", b"".join(parts)[: num_tokens * TOKEN_BYTES])
    if sys.byteorder == "big":
        tokens.byteswap()
    return tokens


def outputs(request: int, num_tokens: int) -> array[int]:
    """Return the first outputs of a request given by its number in the trace."""
    base = 1 << OUTPUT_BITS
    start = base + request * _SCATTER % base
    end = start + num_tokens
    return array("I", chain(range(start, min(end, 2 * base)), range(base, end - base)))


def id_bytes(hash_id: int, unit: int) -> bytes:
    """Return the tokens of one id, little-endian."""
    if hash_id < 1 << ID_BITS:
        return hash_id.to_bytes(TOKEN_BYTES, "little") * unit
    digest = blake2b(b"%d" % hash_id).digest()
    numbers = int.from_bytes(digest, "little") & _LOW_BITS
    return (numbers.to_bytes(len(digest), "little") * unit)[: unit * TOKEN_BYTES]
