# SPDX-License-Identifier: Apache-2.0
"""The reports of a result: figures as defined, as text and as data."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
import pytest

from kvcore.replay.report_json import to_json
from kvcore.replay.report_text import counted, percent, span, to_text
from kvcore.replay.results import Options, Sample, Spent
from kvcore.replay.summary import Report, course_of, rates_of
from tests.replay.results import REFUSED, RESULT, SAMPLES, made, of_size

PAGE = Path(__file__).parents[2] / "docs" / "replay.md"


def line_of(text: str, label: str) -> str:
    """Return the line of a report with this label."""
    (found,) = [each for each in text.splitlines() if each.startswith(f"{label:<12} ")]
    return found


def test_rates_are_of_the_first_look_ups() -> None:
    rates = rates_of(RESULT)
    assert (rates.run, rates.ideal, rates.optimum, rates.again) == (0.25, 0.5, 0.4, 0.8)
    nothing = rates_of(made(looked_up_tokens=0, again_looked_up_tokens=0, ideal_hit_tokens=None))
    assert attrs.astuple(nothing) == (None,) * 5


def test_use_is_weighed_by_time() -> None:
    course = course_of(RESULT)
    assert course is not None
    assert course.use.median == 0.9  # for six of ten seconds
    assert course.use.mean == pytest.approx((0.2 * 1 + 0.9 * 6 + 0.5 * 3) / 10)
    assert course.use.most == 0.9
    assert course.cached.mean == pytest.approx((0.1 * 1 + 0.45 * 3) / 10)
    assert (course.cached.median, course.cached.most) == (0.0, 0.45)
    assert course.nearly_full == pytest.approx(0.6)
    assert course.first_full == 7.0
    assert (course.running.median, course.running.most) == (4, 4)
    assert course.waiting.mean == pytest.approx(1.2)


def test_a_run_without_time_or_steps_has_figures_or_none() -> None:
    assert course_of(made(samples=())) is None
    at_once = made(
        samples=tuple(attrs.evolve(each, time=0.0) for each in SAMPLES),
        spent=Spent(),
    )
    course = course_of(at_once)
    assert course is not None
    assert course.running.mean == pytest.approx((1 + 4 + 2) / 3)
    for result in (at_once, made(samples=(), steps=0)):
        assert "hit rate" in to_text(Report(result))


def test_the_text_has_each_figure_with_its_meaning() -> None:
    text = to_text(Report(RESULT))
    assert text.startswith("day & night <1>.jsonl: 6 requests in 3 steps, 10.0 s of virtual time")
    assert "101 blocks of 16 tokens, lru, 256 running at most" in text
    for label, figures in {
        "requests": ("6", "5 finished", "1 refused", "3 bad lines skipped"),
        "tokens": ("6,000", "77"),
        "hit rate": ("25.00 %", "250 of 1,000"),
        "ideal": ("50.00 %", "50.00 % of it"),
        "optimum": ("40.00 %", "62.50 % of it"),
        "hit again": ("80.00 %", "40 of 50"),
        "evictions": ("42",),
        "preemptions": ("1",),
        "queueing": ("250 ms", "2.0 s", "12.5 s"),
        "use": ("90.00 %",),
        "cached": ("0.00 %", "most 45.00 %"),
        "nearly full": ("60.00 %", "first after 7.0 s"),
        "running": ("4", "mean 3.1"),
    }.items():
        line = line_of(text, label)
        for figure in figures:
            assert figure in line, f"{figure} is not in {line!r}"
    assert "request 7 (line 8) has 5,000 tokens and needs 313 blocks, the pool has 100" in text
    assert re.search(r"^append +4 +5\.0 +4\.0 +6\.0 +8\.0 +10\.0 +0\.000 s$", text, re.MULTILINE)
    assert "a step takes 8,000 us, 50 us per prompt token and 40 us per decoded one" in text
    assert max(map(len, text.splitlines())) <= 120


def test_bounds_that_were_not_counted_are_not_shown() -> None:
    text = to_text(Report(made(ideal_hit_tokens=None, optimum_hit_tokens=None)))
    labels = {line.split("  ")[0] for line in text.splitlines()}
    assert not {"ideal", "optimum"} & labels
    assert "hit rate" in labels


def test_many_refused_requests_are_named_and_counted() -> None:
    refused = tuple(attrs.evolve(REFUSED, request=str(each)) for each in range(12))
    text = to_text(Report(made(refused=refused, num_refused=120)))
    assert "request 9 (line 8)" in text
    assert "request 10 (line 8)" not in text
    assert "and 110 more" in text


def test_swaps_are_told_apart() -> None:
    options = Options(num_blocks=101, preempt="swap", num_host_blocks=30)
    text = to_text(Report(made(options=options, preemptions=5, swaps=4)))
    assert "preempt by swap to 30 host blocks" in text
    assert "4 of them by swap" in line_of(text, "preemptions")


def test_an_interrupt_leads_the_text() -> None:
    text = to_text(Report(made(interrupted=True)))
    assert text.startswith("interrupted: day & night")
    text = to_text(Report(RESULT, (RESULT,), (202, 4000)))
    assert "interrupted: not run to the end with 202, 4,000 blocks" in text


def test_a_sweep_has_a_row_a_size() -> None:
    report = Report(RESULT, (of_size(51, 100), RESULT, of_size(2001, 400)))
    text = to_text(report)
    rows = re.findall(r"^([\d,]+) +([\d.]+ %) +50\.00 % +40\.00 %", text, re.MULTILINE)
    assert rows == [("51", "10.00 %"), ("101", "25.00 %"), ("2,001", "40.00 %")]


def test_the_data_has_the_same_figures() -> None:
    data = json.loads(json.dumps(to_json(Report(RESULT, (of_size(51, 100), RESULT)))))
    assert (data["format"], data["trace"], data["interrupted"]) == (1, RESULT.trace, False)
    assert data["requests"]["refused_named"] == [attrs.asdict(REFUSED)]
    rates = {"run": 0.25, "ideal": 0.5, "optimum": 0.4, "again": 0.8, "far": None}
    assert data["hit_rate"] == rates
    assert data["cost_us"]["append"] == {
        "count": 4,
        "total": 20.0,
        "median": 4.0,
        "p99": 6.0,
        "p999": 8.0,
        "worst": 10.0,
    }
    assert data["samples"]["evictions"] == [0, 30, 42]
    assert set(data["samples"]) == {each.name for each in attrs.fields(Sample)}
    assert [row["num_blocks"] for row in data["sweep"]] == [51, 101]
    assert [row["hit_rate"]["run"] for row in data["sweep"]] == [0.1, 0.25]


def keys_of(data: dict[str, Any]) -> Iterator[tuple[str, set[str]]]:
    """Yield each key of a report and those in it; names of calls are no keys."""
    for key, value in data.items():
        inner = value[0] if key == "sweep" else value
        yield key, set(inner) if isinstance(inner, dict) and key != "cost_us" else set()


def test_the_keys_of_the_data_are_those_that_the_page_promises() -> None:
    _, _, section = PAGE.read_text(encoding="utf-8").partition("\n## The data\n")
    rows = re.findall(r"^\| `(\w+)` \| ([`\w ]*) ?\|", section, re.MULTILINE)
    promised = [(key, set(re.findall(r"`(\w+)`", inner))) for key, inner in rows]
    assert promised == list(keys_of(to_json(Report(RESULT, (RESULT,)))))


def test_numbers_are_written_as_people_say_them() -> None:
    assert [span(each) for each in (0, 0.0004, 0.25, 1, 999.94, 12345.6)] == [
        *("0 s", "0.4 ms", "250 ms", "1.0 s", "999.9 s", "12,346 s")
    ]
    assert [counted(each, "block") for each in (0, 1, 2000)] == [
        "0 blocks",
        "1 block",
        "2,000 blocks",
    ]
    assert (percent(0.36642), percent(None)) == ("36.64 %", "-")
