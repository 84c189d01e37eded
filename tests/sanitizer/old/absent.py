# SPDX-License-Identifier: Apache-2.0
"""Import some modules of an old vLLM, from the sources in the folder KVCORE_OLD_VLLM.

Its scheduler and managers are imported as they are. What else they import (kernels, models,
configuration) is absent: classes without behavior stand in for it.
"""

from __future__ import annotations

import enum
import importlib
import importlib.abc
import importlib.machinery
import inspect
import logging
import os
import sys
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from kvcore.sanitizer.hunter.driven import AbsentModules


def release() -> str:
    """Return the release in the folder that KVCORE_OLD_VLLM names."""
    return Path(os.environ["KVCORE_OLD_VLLM"]).name.removeprefix("vllm-")


class _Device(enum.Enum):
    GPU = enum.auto()
    CPU = enum.auto()


def _merged(*tables: dict[Any, list[Any]]) -> dict[Any, list[Any]]:
    merged = defaultdict[Any, list[Any]](list)
    for table in tables:
        for key, values in table.items():
            merged[key] += values
    return dict(merged)


KNOWN = {
    "init_logger": logging.getLogger,
    "Device": _Device,
    "RequestMetrics": SimpleNamespace,
    "chunk_list": lambda items, size: [items[at : at + size] for at in range(0, len(items), size)],
    "merge_dicts": _merged,
    "cdiv": lambda a, b: -(a // -b),
    "SingletonInputsAdapter": lambda inputs: inputs,
    "compute_encoder_budget": lambda *_: (0, 0),
}


def source(name: str, *present: str) -> Any:
    """Import a module of the release. present: the prefixes of modules that are not stand-ins."""
    if not any(isinstance(each, AbsentModules) for each in sys.meta_path):
        root = Path(os.environ["KVCORE_OLD_VLLM"])
        AbsentModules(root, ["vllm"], KNOWN, present=[f"vllm.{each}" for each in present])
    return importlib.import_module(f"vllm.{name}")


def called(function: Any, **known: Any) -> Any:
    """Call a function with those of the arguments that it has, and None for unknown ones."""
    wanted = inspect.signature(function).parameters.values()
    return function(
        **{
            each.name: known.get(each.name)
            for each in wanted
            if each.name in known or each.default is each.empty
        }
    )
