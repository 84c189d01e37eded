# SPDX-License-Identifier: Apache-2.0
"""Load the compiled tree core of SGLang's wheel alone.

Importing `sglang` itself needs a long chain of packages that the tree does not use.
"""

from __future__ import annotations

import importlib.util
import sys
from importlib.machinery import ExtensionFileLoader
from importlib.metadata import distribution
from types import ModuleType

import torch  # the extension's libraries come with it

NAME = "sglang.srt.mem_cache.rust_tree_core.mem_cache"


def load() -> ModuleType:
    """Return the extension module."""
    folder = "/".join(NAME.split(".")[:-1])
    files = distribution("sglang").files or []
    found = [each for each in files if each.as_posix().startswith(f"{folder}/mem_cache.")]
    path = str(found[0].locate())
    loader = ExtensionFileLoader(NAME, path)
    spec = importlib.util.spec_from_file_location(NAME, path, loader=loader)
    if spec is None or not torch.__version__:
        raise ImportError(f"{path} is no extension")
    module = importlib.util.module_from_spec(spec)
    sys.modules[NAME] = module
    loader.exec_module(module)
    return module


bindings = load()
