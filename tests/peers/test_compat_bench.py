# SPDX-License-Identifier: Apache-2.0
"""The bench of compat does the same work on both sides, by the calls that it names."""

from __future__ import annotations

import sys

import pytest

from benches import compat as bench
from kvcore import Config


@pytest.mark.parametrize("own_hashes", [False, True])
def test_both_sides_do_each_kind_of_call_as_often(own_hashes: bool) -> None:
    config = Config(8 * 3 + 1, bench.BLOCK_SIZE)
    sides = (bench.over_compat(config), bench.over_core(config))
    for name in ("1", "2"):  # the second round needs the blocks that the first gave back
        measured = [bench.measure(side, name, 3, own_hashes=own_hashes) for side in sides]
        assert measured[0].counts == measured[1].counts
        assert all(measured[0].counts.values())


def test_a_row_says_if_a_call_costs_more_than_it_may(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["bench", "--running", "2", "--rounds", "2"])
    for most, marked in ((-1e9, True), (1e9, False)):
        monkeypatch.setattr(bench, "MOST", most)
        bench.main()
        rows = [row for row in capsys.readouterr().out.splitlines() if "*" in row]
        assert [("more than" in row) for row in rows] == [marked] * len(rows)
        assert len(rows) == 2 * sum(words.endswith("*") for words in bench.CALLS.values())
