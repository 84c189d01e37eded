# SPDX-License-Identifier: Apache-2.0
"""`docs/generations.md` shows what the older managers do: its output is real, its names exist."""

from __future__ import annotations

import ast
import importlib
import re
import tomllib
from collections.abc import Iterator, Mapping

import pytest

from kvcore import KVCacheManager
from kvcore.legacy.blocks import tiers
from kvcore.legacy.v0.block_manager import SelfAttnBlockSpaceManager
from kvcore.legacy.v0.prefix_caching_block import PrefixCachingBlockAllocator
from kvcore.legacy.v0_3.block_space_manager import BlockAllocator, BlockSpaceManager
from kvcore.legacy.v1_0_8 import kv_cache_manager
from kvcore.legacy.v1_first import kv_cache_manager as early_v1
from tests.docs.test_docs import GENERATIONS, ROOT

TEXT = GENERATIONS.read_text(encoding="utf-8")
MANAGERS: dict[str, type] = {
    "0.3": BlockSpaceManager,
    "V0": SelfAttnBlockSpaceManager,
    "early V1": early_v1.KVCacheManager,
    "V1 of 0.8.5": kv_cache_manager.KVCacheManager,
    "kvcore": KVCacheManager,
}
BLOCKS: dict[str, object] = {
    "0.3: `BlockAllocator`": BlockAllocator,
    "V0: `PrefixCachingBlockAllocator`": PrefixCachingBlockAllocator,
    "V1 of 0.8.5: `BlockPool`": kv_cache_manager.BlockPool,
    "`kvcore.legacy.blocks.tiers`": tiers,
}
TABLES: dict[str, Mapping[str, object]] = {
    "What each call became": MANAGERS,
    "The blocks beneath": BLOCKS,
}
CALL = re.compile(r"`(\w+)\(")


def section(title: str) -> str:
    """Return the text under a heading of the page."""
    return TEXT.partition(f"## {title}\n")[2].partition("\n## ")[0]


def calls(title: str = "What each call became") -> Iterator[tuple[str, str]]:
    """Yield the column and the name of each call in the table under a heading."""
    rows = [line for line in section(title).splitlines() if line.startswith("|")]
    head, _, *body = ([cell.strip() for cell in row.split("|")[2:-1]] for row in rows)
    assert head == list(TABLES[title])
    for cells in body:
        for manager, cell in zip(head, cells, strict=True):
            yield from ((manager, name) for name in CALL.findall(cell))


def test_the_output_is_what_the_example_prints() -> None:
    program = (ROOT / "examples" / "generations.py").read_text(encoding="utf-8")
    header = ast.get_docstring(ast.parse(program)) or ""
    _, *lines = header[header.index("    $ ") :].splitlines()
    output = "".join(f"{line.removeprefix('    ')}\n" for line in lines)
    assert f"```text\n{output}```" in TEXT


@pytest.mark.parametrize("title", TABLES)
def test_each_call_that_a_table_names_is_there(title: str) -> None:
    named = set(calls(title)) - {("kvcore", "Refused")}
    assert len(named) > 20
    missing = {
        (column, name)
        for column, name in named
        if not callable(getattr(TABLES[title][column], name, None))
    }
    assert missing == set()


@pytest.mark.parametrize("manager", MANAGERS)
def test_the_table_leaves_no_step_of_a_request_out(manager: str) -> None:
    named = {name for each, name in calls() if each == manager}
    steps = ("allocate", "append", "fork", "swap_out", "swap_in", "free")
    public = {name for name in dir(MANAGERS[manager]) if name.startswith(steps)}
    assert public <= named


def test_each_fact_that_the_page_names_is_one() -> None:
    words = tomllib.loads((ROOT / "tests" / "conformance" / "facts.toml").read_text())["words"]
    named = [
        f"{part}-{number}"
        for part, numbers in re.findall(r"\b(S\d{3})-(\d\d(?:, \d\d\b(?!-))*)", TEXT)
        for number in numbers.split(", ")
    ]
    assert len(named) > 40
    assert set(named) <= set(words)


def test_the_modules_of_the_table_exist() -> None:
    rows = [
        line.split("|")[2] for line in TEXT.splitlines() if re.match(r"\| (0\.3|V0|early)", line)
    ]
    names = re.findall(r"`([\w.]+)`", " ".join(rows[:3]))
    assert len(names) == 7
    for name in names:
        importlib.import_module(f"kvcore.legacy.{name}")
