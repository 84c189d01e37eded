# SPDX-License-Identifier: Apache-2.0
"""Two prompts to answer, and torch's number of threads as it was."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.runtime.generate.calls import TWO_PROMPTS


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text(TWO_PROMPTS)
    return path
