# SPDX-License-Identifier: Apache-2.0
"""Exact causal attention of the sequences of one step, for any source of keys.

The queries of a sequence are its last `query_len` positions. Each sequence is attended alone,
so neighbours in the batch never change its bits. Keys that no query of the step sees, those before
its window, may be missing.

Invariant mode cuts the queries of a sequence into tiles of `QUERY_TILE` aligned to its absolute
positions. A tile always has all its rows (absent ones are zero), always sees the same number of
keys (from the first position to its own end, absent ones zero and masked) and is always masked: one
shape per tile, and therefore one order of additions, however the sequence was cut into steps and
whatever has left its window.
"""

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext

import attrs
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from kvcore_runtime.attention.visibility import FULL, Visibility
from kvcore_runtime.errors import ShapeMismatch, TooLong

QUERY_TILE = 16
"""Queries of a tile, and the keys of a tile are a multiple of it, in invariant mode."""

ANY_SHAPE = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
"""What torch may attend with. cuDNN plans every new length for milliseconds, in every thread."""


def any_shape(device: torch.device) -> AbstractContextManager[None]:
    """Make attention cost the same for a new length as for a known one, within a context.

    It changes torch's choice of kernels for the whole process; on the CPU it does nothing.
    """
    return sdpa_kernel(ANY_SHAPE) if device.type == "cuda" else nullcontext()


@attrs.frozen(kw_only=True, eq=False)
class RaggedStep:
    """The number of positions that each sequence of a step computes, and its length afterwards.

    first_keys: the first position of each sequence that a query of the step sees.
    """

    query_lens: tuple[int, ...]
    seq_lens: tuple[int, ...]
    invariant: bool = False
    device: torch.device = attrs.field(factory=lambda: torch.device("cpu"))
    visibility: Visibility = FULL
    _tiles: "_TileMasks | None" = attrs.field(init=False, repr=False)
    _masks: tuple[Tensor | None, ...] = attrs.field(init=False, repr=False)
    first_keys: tuple[int, ...] = attrs.field(init=False, repr=False)

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
        first_keys = (
            (0,) * len(self.seq_lens)
            if self.visibility.window is None
            else tuple(self.visibility.first_seen(s - n) for n, s in self.pairs())
        )
        object.__setattr__(self, "first_keys", first_keys)
        tiles = None
        if self.invariant:
            width = _round_up(max(self.seq_lens, default=0))
            tiles = _TileMasks(self.visibility, width, self.device)
        object.__setattr__(self, "_tiles", tiles)
        object.__setattr__(self, "_masks", () if self.invariant else self._build_masks())

    @property
    def num_tokens(self) -> int:
        """Number of rows of the step, over all sequences."""
        return sum(self.query_lens)

    def pairs(self) -> Iterable[tuple[int, int]]:
        """Pair up (query_len, seq_len) of each sequence."""
        return zip(self.query_lens, self.seq_lens, strict=True)

    def positions(self) -> Tensor:
        """Compute the position of each row in its sequence, [T] int64."""
        starts = [s - n for n, s in self.pairs()]
        return torch.from_numpy(flat_ranges(starts, self.query_lens)).to(self.device)

    def last_rows(self) -> Tensor:
        """Find the row of each sequence's last token, [num_seqs] int64: the rows to sample from."""
        lens = torch.tensor(self.query_lens, dtype=torch.int64, device=self.device)
        return lens.cumsum(0) - 1

    def attend(self, q: Tensor, keys_values: Iterable[tuple[Tensor, Tensor]]) -> Tensor:
        """Attend every sequence to its own keys.

        q: [T, num_heads, head_dim]. keys_values: a sequence's ([1, num_kv_heads, n, head_dim], the
        same: see `heads_first`), those of its last n positions, beginning at its first key
        (`first_keys`) or earlier; with any strides, consumed in order. Returns a tensor like q.
        """
        queries = heads_first(q).split_with_sizes(self.query_lens, dim=2)
        outputs = []
        for index, (keys, values) in zip(range(len(queries)), keys_values, strict=True):
            if self._tiles is not None:
                seq_len = self.seq_lens[index]
                output = _attend_tiles(queries[index], keys, values, seq_len, self._tiles)
            else:
                unseen = keys.shape[2] - self.seq_lens[index] + self.first_keys[index]
                if unseen:
                    keys, values = keys[:, :, unseen:], values[:, :, unseen:]
                mask = self._masks[index]
                causal = mask is None and self.query_lens[index] > 1
                output = _attention(queries[index], keys, values, mask, causal)
            outputs.append(output)
        joined = outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=2)
        return joined.squeeze(0).transpose(0, 1)

    def _build_masks(self) -> tuple[Tensor | None, ...]:
        """Build one mask per sequence, for all layers; None if a causal or single query
        needs none.
        """
        if max(self.query_lens, default=1) == 1:
            return (None,) * len(self.query_lens)
        return tuple(
            self.visibility.mask(range(s - n, s), range(first, s), self.device)
            if n > 1 and (n < s or self.visibility.window is not None)
            else None
            for (n, s), first in zip(self.pairs(), self.first_keys, strict=True)
        )


class _TileMasks:
    """Masks of the tiles of a step; one that ends at position e is [QUERY_TILE, e]."""

    def __init__(self, visibility: Visibility, width: int, device: torch.device) -> None:
        """width: the largest e."""
        self._visibility = visibility
        self._device = device
        self._by_end: dict[int, Tensor] = {}
        # The visibility in a chunk depends on positions. Others depend only on distances, so the
        # right end of the widest mask is the mask of every other tile.
        self._width = 0 if visibility.kind == "chunked_local" else width

    def ending_at(self, end: int) -> Tensor:
        """Return the mask of the tile whose last query is at end - 1."""
        made_for = max(end, self._width)
        if made_for not in self._by_end:
            queries = range(made_for - QUERY_TILE, made_for)
            mask = self._visibility.mask(queries, range(made_for), self._device)
            self._by_end[made_for] = mask
        return self._by_end[made_for][:, made_for - end :]


def flat_ranges(starts: npt.ArrayLike, counts: npt.ArrayLike) -> npt.NDArray[np.int64]:
    """Concatenate, for all i, counts[i] numbers from starts[i] on."""
    count = np.asarray(counts, dtype=np.int64)
    shift = np.asarray(starts, dtype=np.int64) - (count.cumsum() - count)
    ranges: npt.NDArray[np.int64] = (np.arange(count.sum()) + shift.repeat(count)).astype(np.int64)
    return ranges


def heads_first(x: Tensor) -> Tensor:
    """Return a view of [n, heads, head_dim] in attention's form, [1, heads, n, head_dim]."""
    return x.transpose(0, 1).unsqueeze(0)


def _attend_tiles(
    q: Tensor, keys: Tensor, values: Tensor, seq_len: int, masks: _TileMasks
) -> Tensor:
    """Attend one sequence tile by tile; heads first."""
    query_len, absent = q.shape[2], seq_len - keys.shape[2]
    start = seq_len - query_len
    first = start - start % QUERY_TILE
    end = _round_up(seq_len)
    keys, values = (functional.pad(x, (0, 0, absent, end - seq_len)) for x in (keys, values))
    tiled = functional.pad(q, (0, 0, start - first, end - seq_len))
    outputs = []
    for tile_end in range(first + QUERY_TILE, end + 1, QUERY_TILE):
        tile = tiled[:, :, tile_end - QUERY_TILE - first : tile_end - first]
        seen = keys[:, :, :tile_end], values[:, :, :tile_end]
        outputs.append(_attention(tile, *seen, masks.ending_at(tile_end)))
    return torch.cat(outputs, dim=2)[:, :, start - first : start - first + query_len]


def _attention(
    q: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, causal: bool = False
) -> Tensor:
    """Compute scaled dot-product attention of one sequence, heads first, with grouped KV heads."""
    return functional.scaled_dot_product_attention(
        q, keys, values, attn_mask=mask, is_causal=causal, enable_gqa=True
    )


def _round_up(num_tokens: int) -> int:
    return -(-num_tokens // QUERY_TILE) * QUERY_TILE
