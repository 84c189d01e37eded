# SPDX-License-Identifier: Apache-2.0
"""Settings of the runtime's tests: one thread of torch, since their tensors are tiny."""

import gc
from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(scope="session", autouse=True)
def _modules_are_no_garbage() -> Iterator[None]:
    """Collections are rare, and leave out what is loaded before the first test: torch is large."""
    gc.collect()
    gc.freeze()
    before = gc.get_threshold()
    gc.set_threshold(20_000, *before[1:])
    yield
    gc.set_threshold(*before)
    gc.unfreeze()


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
