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
import types
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any


def release() -> str:
    """Return the release in the folder that KVCORE_OLD_VLLM names."""
    return Path(os.environ["KVCORE_OLD_VLLM"]).name.removeprefix("vllm-")


class _Meta(type):
    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        setattr(cls, name, found := _Meta(name, (_Absent,), {}))
        return found

    def __iter__(cls) -> Iterator[Any]:
        return iter(())


class _Absent(metaclass=_Meta):
    """A stand-in for a class, function or enumeration that the scheduler imports."""

    def __init__(self, *args: Any, **fields: Any) -> None:
        del args
        self.__dict__.update(fields)


class _Module(types.ModuleType):
    """A module whose names are all stand-ins, except for those that the scheduler computes with."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        given = {
            "init_logger": logging.getLogger,
            "Device": _Device,
            "RequestMetrics": SimpleNamespace,
            "chunk_list": lambda items, size: [
                items[at : at + size] for at in range(0, len(items), size)
            ],
            "merge_dicts": _merged,
            "cdiv": lambda a, b: -(a // -b),
            "SingletonInputsAdapter": lambda inputs: inputs,
            "compute_encoder_budget": lambda *_: (0, 0),
        }
        found = given.get(name) or _Meta(name, (_Absent,), {})
        setattr(self, name, found)
        return found


class _Device(enum.Enum):
    GPU = enum.auto()
    CPU = enum.auto()


def _merged(*tables: dict[Any, list[Any]]) -> dict[Any, list[Any]]:
    merged = defaultdict[Any, list[Any]](list)
    for table in tables:
        for key, values in table.items():
            merged[key] += values
    return dict(merged)


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds some modules of the release in its sources, and stand-ins for all others."""

    def __init__(self, present: tuple[str, ...]) -> None:
        self.present = present

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name != "vllm" and not name.startswith("vllm."):
            return None
        if name.startswith(self.present):
            return importlib.machinery.PathFinder.find_spec(name, path, target)
        spec = importlib.machinery.ModuleSpec(name, self, is_package=True)
        spec.submodule_search_locations = [
            str(Path(os.environ["KVCORE_OLD_VLLM"], *name.split(".")))
        ]
        return spec

    def create_module(self, spec: Any) -> Any:
        return _Module(spec.name)

    def exec_module(self, module: Any) -> None:
        pass


def source(name: str, *present: str) -> Any:
    """Import a module of the release. present: the prefixes of modules that are not stand-ins."""
    if not any(isinstance(each, _Finder) for each in sys.meta_path):
        sys.meta_path.insert(0, _Finder(tuple(f"vllm.{each}" for each in present)))
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
