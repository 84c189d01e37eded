# SPDX-License-Identifier: Apache-2.0
"""Exact causal attention of the sequences of one step, wherever their keys come from.

The queries of a sequence are its last `query_len` positions. Each sequence is attended alone,
so neighbours in the batch never change its bits.

Invariant mode cuts the queries of a sequence into tiles of `QUERY_TILE` aligned to its absolute
positions. A tile always has all its rows (absent ones are zero), always sees the same number of
keys (up to its own end, absent ones zero and masked) and is always masked: one shape a tile,
therefore one order of additions, however the sequence was cut into steps.
"""

from collections.abc import Iterable

import attrs
import torch
from torch import Tensor
from torch.nn import functional

from kvcore_runtime.errors import ShapeMismatch, TooLong

QUERY_TILE = 16
"""Queries of a tile, and the keys of a tile are a multiple of it, in invariant mode."""


@attrs.frozen(kw_only=True, eq=False)
class RaggedStep:
    """How many positions each sequence of a step computes, and how many it has afterwards."""

    query_lens: tuple[int, ...]
    seq_lens: tuple[int, ...]
    invariant: bool = False
    device: torch.device = attrs.field(factory=lambda: torch.device("cpu"))
    _masks: tuple[Tensor | None, ...] = attrs.field(init=False, repr=False)

    def __attrs_post_init__(self) -> None:
        if len(self.query_lens) != len(self.seq_lens):
            raise ShapeMismatch(
                name="seq_lens", expected=(len(self.query_lens),), actual=(len(self.seq_lens),)
            )
        for index, (query_len, seq_len) in enumerate(self.pairs()):
            if query_len <= 0:
                raise ShapeMismatch(name=f"queries of {index}", expected=(1,), actual=(query_len,))
            if query_len > seq_len:
                raise TooLong(
                    what=f"sequence {index}", num_tokens=query_len, num_tokens_max=seq_len
                )
        object.__setattr__(self, "_masks", self._build_masks())

    @property
    def num_tokens(self) -> int:
        """Rows of the step, over all sequences."""
        return sum(self.query_lens)

    def pairs(self) -> Iterable[tuple[int, int]]:
        """(query_len, seq_len) of each sequence."""
        return zip(self.query_lens, self.seq_lens, strict=True)

    def positions(self) -> Tensor:
        """Position of each row in its sequence, [T] int64."""
        parts = [torch.arange(s - n, s, device=self.device) for n, s in self.pairs()]
        return torch.cat(parts) if parts else torch.empty(0, dtype=torch.int64, device=self.device)

    def last_rows(self) -> Tensor:
        """Row of each sequence's last token, [num_seqs] int64: the rows one samples from."""
        lens = torch.tensor(self.query_lens, dtype=torch.int64, device=self.device)
        return lens.cumsum(0) - 1

    def attend(self, q: Tensor, keys_values: Iterable[tuple[Tensor, Tensor]]) -> Tensor:
        """Attend every sequence to its own keys.

        q: [T, num_heads, head_dim]. keys_values: a sequence's ([seq_len, num_kv_heads, head_dim],
        the same), any strides, taken one after another. Returns [T, num_heads, head_dim].
        """
        attend_one = _attend_tiles if self.invariant else _attend_plain
        queries = torch.split(q, list(self.query_lens))
        outputs = [
            attend_one(query, keys, values, mask)
            for query, (keys, values), mask in zip(queries, keys_values, self._masks, strict=True)
        ]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    def _build_masks(self) -> tuple[Tensor | None, ...]:
        """One mask a sequence, for all layers; None where causal or single-query needs none."""
        if self.invariant:
            width = _round_up(max(self.seq_lens, default=0))
            mask = torch.ones(QUERY_TILE, width, dtype=torch.bool, device=self.device)
            return (mask.tril(width - QUERY_TILE),) * len(self.seq_lens)
        return tuple(
            torch.ones(n, s, dtype=torch.bool, device=self.device).tril(s - n)
            if 1 < n < s
            else None
            for n, s in self.pairs()
        )


def _attend_plain(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
    """[L, H, D] over [S, H_kv, D]; without a mask L is 1 or S."""
    causal = mask is None and q.shape[0] > 1
    return _attention(q, keys, values, mask=mask, causal=causal)


def _attend_tiles(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
    """As `_attend_plain`, tile by tile. mask: [QUERY_TILE, >= S], the last tile's at its right."""
    assert mask is not None
    query_len, seq_len = q.shape[0], keys.shape[0]
    start = seq_len - query_len
    first = start - start % QUERY_TILE
    end = _round_up(seq_len)
    keys, values = (functional.pad(x, (0, 0, 0, 0, 0, end - seq_len)) for x in (keys, values))
    tiled = functional.pad(q, (0, 0, 0, 0, start - first, end - seq_len))
    outputs = []
    for tile_start in range(first, end, QUERY_TILE):
        tile_end = tile_start + QUERY_TILE
        tile = tiled[tile_start - first : tile_end - first]
        tile_mask = mask[:, mask.shape[1] - tile_end :]
        outputs.append(_attention(tile, keys[:tile_end], values[:tile_end], mask=tile_mask))
    return torch.cat(outputs)[start - first : start - first + query_len]


def _attention(
    q: Tensor, keys: Tensor, values: Tensor, *, mask: Tensor | None, causal: bool = False
) -> Tensor:
    """Scaled dot-product attention of one sequence; tokens first, grouped key-value heads."""
    query, key, value = (x.transpose(0, 1).unsqueeze(0) for x in (q, keys, values))
    seen = functional.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=causal, enable_gqa=True
    )
    return seen.squeeze(0).transpose(0, 1)


def _round_up(num_tokens: int) -> int:
    return -(-num_tokens // QUERY_TILE) * QUERY_TILE
