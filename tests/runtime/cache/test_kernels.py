# SPDX-License-Identifier: Apache-2.0
"""The Triton kernels under Triton's interpreter, on the CPU, against plain indexing.

TRITON_INTERPRET is read when triton is imported, so the checks run in a process of their own.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import pytest

CHECKS = """
import torch
from kvcore_runtime.cache import kernels
from kvcore_runtime.cache.cache import Cache
from kvcore_runtime.cache.layout import CacheLayout
from kvcore_runtime.cache.table_merge import entries_of
from kvcore_runtime.cache.tables import BlockTables
from kvcore_runtime.cache.apply import batch_columns
from kvcore.types.commands import CutTable, SetTable, close

kernels.CHUNK_ENTRIES = 4
kernels.CHUNK_WORDS = 16
checked = 0
for order in ("block_major", "layer_major"):
    for dtype, dim in ((torch.float32, 4), (torch.float16, 1), (torch.bfloat16, 8)):
        layout = CacheLayout(
            num_layers=2, num_kv_heads=1, head_dim=dim, block_size=5, dtype=dtype, order=order
        )
        cache = Cache(layout, 7, 4)
        for tier in (cache.blocks, cache.host_blocks):
            tier.data.copy_(torch.randn(tier.data.shape).to(dtype))
        for source, target, max_programs in (
            (cache.blocks, cache.blocks, None),
            (cache.blocks, cache.host_blocks, 3),
            (cache.host_blocks, cache.blocks, 1000),
        ):
            pairs = torch.tensor([[3, 0], [1, 2]])
            expected = target.data.clone()
            expected[pairs[1]] = source.data[pairs[0]]
            kernels.copy_pages(source.pieces, target.pieces, pairs, max_programs)
            assert torch.equal(target.data, expected), (order, dtype, source.name, target.name)
            checked += 1
        expected = cache.blocks.data.clone()
        expected[[6, 2]] = 0
        kernels.zero_pages(cache.blocks.pieces, torch.tensor([6, 2]))
        assert torch.equal(cache.blocks.data, expected), (order, dtype)
        none = torch.zeros(0, dtype=torch.int64)
        kernels.copy_pages(cache.blocks.pieces, cache.blocks.pieces, none.view(2, 0))
        kernels.zero_pages(cache.blocks.pieces, none)
        assert torch.equal(cache.blocks.data, expected), (order, dtype)
        checked += 1
tables = BlockTables(3, 5, 8, 2, num_groups=2)
for commands in (
    [SetTable(row, group, at, 7 + at) for row in (0, 2) for group in (0, 1) for at in (0, 1)],
    [CutTable(2, 0, 0), SetTable(2, 0, 0, 9), CutTable(0, 1, 1), SetTable(1, 1, 0, 4)],
):
    planned = tables.plan(batch_columns(close(0, commands)))
    entries = entries_of(planned, tables.blocks[0].numel(), 0)
    written = tables.blocks.clone()
    kernels.write_entries(written, entries)
    tables.commit(planned)
    assert torch.equal(written, tables.blocks), commands
    assert entries[0].unique().numel() == entries.shape[1]
    checked += 1
kernels.write_entries(written, entries[:, :0])
assert torch.equal(written, tables.blocks)
print("checked", checked)
"""


@pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton is not installed (no GPU build)"
)
def test_kernels_equal_indexing_under_the_interpreter() -> None:
    path = os.pathsep.join(each for each in sys.path if each)
    done = subprocess.run(
        [sys.executable, "-c", CHECKS],
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "checked 26\n"
