# SPDX-License-Identifier: Apache-2.0
"""The page of a replay: whole, well-formed, and needing nothing from outside."""

from __future__ import annotations

import re
from collections import Counter
from xml.etree import ElementTree

import attrs
import pytest

pytest.importorskip("matplotlib", reason="kvcore[plots] is not installed")

from kvcore.cli.page_style import DARK, LIGHT
from kvcore.replay.page import to_html
from kvcore.replay.plots import NAMES, draw_course, draw_sweep, from_zero, with_colours
from kvcore.replay.summary import Report
from tests.replay.results import REFUSED, RESULT, SAMPLES, made, of_size

SWEEP = Report(RESULT, (of_size(51, 100), RESULT, of_size(2001, 400)))


PAGES: dict[int, tuple[Report, str]] = {}
"""The pages that were drawn, by the identity of their reports."""


def page_of(report: Report) -> str:
    """Return the whole page, drawn once."""
    if id(report) not in PAGES:
        PAGES[id(report)] = report, "".join(to_html(report))
    return PAGES[id(report)][1]


REPORTS = [
    pytest.param(Report(RESULT), id="one run"),
    pytest.param(SWEEP, id="sweep"),
    pytest.param(Report(made(samples=(), costs=(), steps=0, interrupted=True)), id="no step"),
    pytest.param(Report(made(samples=SAMPLES[:1])), id="one step"),
    pytest.param(Report(made(ideal_hit_tokens=None, optimum_hit_tokens=None)), id="no bounds"),
    pytest.param(Report(RESULT, (), (5, 6)), id="sweep cut off"),
]


@pytest.mark.parametrize("report", REPORTS)
def test_the_page_is_well_formed_and_names_nothing_outside(report: Report) -> None:
    page = page_of(report)
    root = ElementTree.fromstring(page)
    assert root.tag == "html"
    kinds = {each.tag for each in root.iter()}
    assert not kinds & {"script", "link", "img", "iframe", "object", "use-external", "base"}
    for each in root.iter():
        for name, value in each.attrib.items():
            assert "//" not in value, f"{each.tag} has {name}={value}"
            if name in {"href", "src"}:
                assert value.startswith("#"), f"{each.tag} points to {value}"
    assert "://" not in page
    assert "@import" not in page
    assert all(target.startswith("#") for target in re.findall(r"url\(([^)]*)\)", page))


@pytest.mark.parametrize("report", REPORTS)
def test_every_id_is_there_once_and_every_reference_meets_one(report: Report) -> None:
    page = page_of(report)
    ids = Counter(re.findall(r'\bid="([^"]*)"', page))
    assert not [name for name, count in ids.items() if count > 1]
    assert set(re.findall(r"(?:href=\"|url\()#([^\")]*)", page)) <= set(ids)


def test_each_drawing_is_there_and_has_its_curves() -> None:
    root = ElementTree.fromstring(page_of(SWEEP))
    course, sweep = root.iter("svg")
    words = {text.text for text in course.iter("text")}
    assert words >= {
        "running",
        "waiting",
        "so far",
        "in this stretch of time",
        "preemptions",
        "virtual seconds",
    }
    assert "swapped" not in words
    words = {text.text for text in sweep.iter("text")}
    assert words >= {"this policy", "optimum", "ideal", "51", "101", "2,001"}
    assert len(list(ElementTree.fromstring(page_of(Report(RESULT))).iter("svg"))) == 1


def test_time_without_requests_is_drawn_empty() -> None:
    late = attrs.evolve(SAMPLES[0], step=1, time=20.0, idle_time=15.0)
    drawn = from_zero([SAMPLES[0], late])
    assert [(each.time, each.running, each.used_blocks) for each in drawn] == [
        (0.0, 0, 0),
        (1.0, 1, 20),
        (16.0, 0, 0),
        (20.0, 1, 20),
    ]


def test_bounds_that_were_not_counted_are_not_drawn() -> None:
    bare = made(ideal_hit_tokens=None, optimum_hit_tokens=None)
    assert "this policy" in draw_sweep(Report(bare, (bare,)))
    assert "optimum" not in draw_sweep(Report(bare, (bare,)))


def test_names_from_the_trace_are_escaped() -> None:
    root = ElementTree.fromstring(page_of(Report(RESULT)))
    (heading,) = root.iter("h1")
    assert heading.text is not None
    assert heading.text.startswith("day & night <1>.jsonl: ")


def test_what_limits_the_page_is_said_on_it() -> None:
    report = Report(made(interrupted=True, refused=(REFUSED,) * 3, num_refused=9), (), (202,))
    reported = " ".join(ElementTree.fromstring(page_of(report)).itertext())
    for sentence in (
        "Interrupted: this is what was done until then.",
        "Interrupted: not run to the end with 202 blocks.",
        "request 7 (line 8) has 5,000 tokens",
        "and 6 more",
    ):
        assert sentence in reported


def test_each_colour_is_there_for_light_and_dark() -> None:
    page = page_of(SWEEP)
    used = set(re.findall(r"var\(--([\w-]+)\)", page))
    light, dark = page.partition("@media (prefers-color-scheme: dark)")[::2]
    for screen in (light, dark.partition("@media print")[0]):
        assert used <= set(re.findall(r"--([\w-]+):", screen))
    assert set(LIGHT) == set(DARK) == {*NAMES.values(), "page", "card"}
    svgs = "".join(re.findall(r"<svg .*?</svg>", page, re.DOTALL))
    assert not re.findall(r"(?:fill|stroke): ?#", svgs)


def test_a_drawing_can_stand_alone() -> None:
    picture = with_colours(draw_course(RESULT), LIGHT)
    root = ElementTree.fromstring(picture)
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    assert "var(" not in picture


def test_the_same_result_gives_the_same_page() -> None:
    assert "".join(to_html(SWEEP)) == page_of(SWEEP)
