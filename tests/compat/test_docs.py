# SPDX-License-Identifier: Apache-2.0
"""`docs/from_vllm.md` says what `kvcore.compat` does: its programs run, its names exist."""

from __future__ import annotations

import builtins
import inspect
import pkgutil
import re
from pathlib import Path
from typing import get_args

import attrs
import pytest

import kvcore
from kvcore import Config, Group, compat
from kvcore.types import errors
from kvcore.types.groups import Kind
from tests.conftest import Backend
from tests.docs.test_docs import programs

PAGE = Path(__file__).parents[2] / "docs" / "from_vllm.md"
TEXT = PAGE.read_text(encoding="utf-8")
VLLMS_OWN = {
    *("KVCacheBlock", "KVCacheConfig", "KVCacheMetricsCollector", "PrefixCachingMetrics"),
    "PYTHONHASHSEED",
}
PROGRAMS = dict(programs(PAGE))
NO_COUNTERPART = TEXT.partition("## What has no counterpart")[2].partition("\n## ")[0]
"""The part whose names are vLLM's own."""


@pytest.mark.parametrize("heading", PROGRAMS)
def test_programs_of_the_page_run(
    heading: str, backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvcore.manager.default_backend", lambda: backend)
    code = compile(PROGRAMS[heading], PAGE.name, "exec", dont_inherit=True)
    exec(code, {"__name__": "tests.compat.test_docs"})


def test_the_page_has_every_public_name_of_both_classes() -> None:
    for kind in (compat.KVCacheManager, compat.KVCacheBlocks):
        public = {name for name, _ in inspect.getmembers(kind) if not name.startswith("_")}
        named = set(re.findall(r"`(?:KVCacheBlocks\.)?(\w+)", TEXT))
        assert public - {"has_key"} <= named


def test_the_page_has_every_parameter() -> None:
    for call in (compat.KVCacheManager.__init__, compat.KVCacheManager.allocate_slots):
        for name in list(inspect.signature(call).parameters)[1:]:
            assert re.search(rf"`[^`]*\b{name}\b[^`]*`", TEXT), name


def test_the_page_calls_events_and_the_manager_as_they_are_made() -> None:
    for event in (kvcore.BlockStored, kvcore.BlockRemoved):
        fields = ", ".join(field.name for field in attrs.fields(event))
        assert f"`{event.__name__}({fields})`" in TEXT
    shown: list[str] = []
    for each in list(inspect.signature(compat.KVCacheManager).parameters.values()):
        if each.kind is each.KEYWORD_ONLY and "*" not in shown:
            shown.append("*")
        shown.append(each.name if each.default is each.empty else f"{each.name}={each.default}")
    assert f"`KVCacheManager({', '.join(shown)})`" in TEXT


def test_what_the_page_names_exists() -> None:
    for name in set(re.findall(r"`(kvcore(?:\.\w+)+)", TEXT)):
        assert pkgutil.resolve_name(name) is not None
    known = {*vars(errors), *vars(compat), *vars(kvcore), *dir(builtins)}
    text = TEXT.replace(NO_COUNTERPART, "")
    assert set(re.findall(r"`([A-Z]\w+)`", text)) - known <= VLLMS_OWN


def test_the_options_in_the_page_are_fields_of_the_configuration() -> None:
    table = TEXT.partition("## Configuration")[2].partition("\n## ")[0]
    right = [line.split("|")[2] for line in table.splitlines() if line.startswith("| `")]
    named = {name for cell in right for name in re.findall(r"`(\w+)`", cell)}
    fields = {field.name for kind in (Config, Group) for field in attrs.fields(kind)}
    kinds = set(get_args(Kind))
    assert kinds <= named
    assert named - kinds - {"InvalidConfig"} <= fields
