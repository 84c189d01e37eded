# SPDX-License-Identifier: Apache-2.0
"""The bench of a CUDA device runs on the CPU too, by the clock, and says if there is no device."""

from __future__ import annotations

import pytest
import torch

from benches import gpu


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    """Run the program with these arguments; its threads are those of the tests again."""
    threads = torch.get_num_threads()
    monkeypatch.setattr("sys.argv", ["gpu", *arguments])
    try:
        gpu.main()
    finally:
        torch.set_num_threads(threads)


def test_every_line_is_measured_on_the_device_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run(monkeypatch, "--device", "cpu", "--pages", "2", "--rounds", "2")
    lines = capsys.readouterr().out.splitlines()
    *of_pages, of_tables = lines
    named = [line.split("  ")[0].strip() for line in of_pages]
    assert named == ["CopyOnWrite", "SwapOut", "SwapIn", "Zero"] * len(gpu.PAGE_KIB)
    assert all(line.endswith("us of the caller") for line in lines)
    assert "one entry for each of 1024 requests" in of_tables


def test_without_a_device_it_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    run(monkeypatch)
    assert "no CUDA device" in capsys.readouterr().out
