# SPDX-License-Identifier: Apache-2.0
"""The table of facts is complete: each number has a test, and the table says what is wrong.

Reads the tests' text alone, so that the whole suite fails on a fact without one; what the tests say
is `make conformance`.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.conformance import (
    CONFLICTS,
    MAX_NOT_APPLYING,
    NUMBERS,
    Facts,
    Result,
    complaints,
    decisions,
    files_of_tests,
    main,
    make_lines,
    marks,
    read_facts,
    table,
)
from tools.facts_page import PAGE, facts_page

WORDS = dict.fromkeys(NUMBERS, "some words")
DECIDED = dict.fromkeys(CONFLICTS, "some words")
SETTLED = " ".join(CONFLICTS)
PASSED = [
    Result(number, "test_it", "passed", name) for number in NUMBERS for name in ("python", "rust")
]


def verdict(facts: Facts, results: list[Result], number: str) -> tuple[str, bool]:
    """Return the table's entry for a number, and whether that is an error."""
    (line,) = (line for line in make_lines(facts, results) if line.number == number)
    return line.verdict, line.bad


def without(*numbers: str) -> list[Result]:
    """Return a report in which all tests passed, but these facts have no test."""
    return [each for each in PASSED if each.number not in numbers]


def test_every_fact_has_its_words_and_every_conflict_its_line() -> None:
    assert complaints(read_facts(), decisions()) == []


def test_every_fact_has_a_marked_test_and_every_mark_a_fact() -> None:
    facts = read_facts()
    marked = {number for number, _ in marks(files_of_tests())}
    assert sorted(marked - {*NUMBERS, *CONFLICTS}) == []
    assert sorted(set(NUMBERS) - marked - set(facts.does_not_apply)) == []
    assert sorted(marked & set(facts.does_not_apply)) == []


def test_there_are_as_many_facts_as_the_specification_has() -> None:
    assert len(NUMBERS) == len(set(NUMBERS)) == 61 + 85 + 73 + 37 + 22 == 278
    assert len(CONFLICTS) == 14


def test_a_fact_passes_with_its_tests_in_both_backends() -> None:
    lines = make_lines(Facts(WORDS, DECIDED), PASSED)
    assert [line.number for line in lines] == [*NUMBERS, *CONFLICTS]
    verdicts = {(line.verdict, line.bad, line.num_tests) for line in lines[: len(NUMBERS)]}
    assert verdicts == {("pass", False, 1)}
    assert table(lines).endswith("292 numbers: 14 decided, 278 pass; 0 to mend")


def test_a_decision_needs_no_test_and_may_not_fail_one() -> None:
    assert verdict(Facts(WORDS, DECIDED), PASSED, "X-09") == ("decided", False)
    results = [*PASSED, Result("X-09", "test_it", "failed", None)]
    assert verdict(Facts(WORDS, DECIDED), results, "X-09") == ("fail: test_it", True)


def test_a_fact_without_test_is_missing() -> None:
    assert verdict(Facts(WORDS, DECIDED), without("S001-12"), "S001-12") == ("missing", True)
    skipped = [*without("S001-12"), Result("S001-12", "test_it", "skipped", "rust")]
    assert verdict(Facts(WORDS, DECIDED), skipped, "S001-12")[1]


def test_a_fact_shown_in_one_backend_is_missing_in_the_other() -> None:
    results = [*without("S000-37"), Result("S000-37", "test_it", "passed", "python")]
    assert verdict(Facts(WORDS, DECIDED), results, "S000-37") == ("missing on rust", True)
    once = Facts(WORDS, DECIDED, once={"S000-37": "some part"})
    assert verdict(once, results, "S000-37") == ("pass", False)
    unnamed = [*without("S000-37"), Result("S000-37", "test_it", "passed", None)]
    assert verdict(Facts(WORDS, DECIDED), unnamed, "S000-37") == (
        "missing on python and rust",
        True,
    )


def test_one_failing_test_fails_its_fact() -> None:
    results = [*PASSED, Result("S004-18", "test_other", "failed", "rust")]
    assert verdict(Facts(WORDS, DECIDED), results, "S004-18") == ("fail: test_other", True)


def test_a_number_that_is_no_fact_is_a_line_of_its_own() -> None:
    lines = make_lines(
        Facts(WORDS, DECIDED), [*PASSED, Result("S000-62", "test_it", "passed", "rust")]
    )
    assert (lines[-1].number, lines[-1].verdict, lines[-1].bad) == ("S000-62", "unknown", True)
    assert table(lines).endswith("293 numbers: 14 decided, 278 pass, 1 unknown; 1 to mend")


def test_what_does_not_apply_needs_no_test_and_may_have_none() -> None:
    facts = Facts(WORDS, DECIDED, does_not_apply={"S004-20": "other figures"})
    assert verdict(facts, without("S004-20"), "S004-20") == ("does not apply: other figures", False)
    assert verdict(facts, PASSED, "S004-20")[1]


@pytest.mark.parametrize(
    ("number", "reason", "allowed"),
    [
        ("S004-17", "a remark", True),
        ("S001-73", "S000-14 has it otherwise", True),
        ("S001-73", "X-07", True),
        ("S001-73", "it is old", False),
        ("S001-73", "S001-73 itself", False),
        ("S000-45", "X-07", False),
    ],
)
def test_only_older_facts_are_superseded_and_something_must_be_named(
    number: str, reason: str, allowed: bool
) -> None:
    found = complaints(Facts(WORDS, DECIDED, does_not_apply={number: reason}), SETTLED)
    assert [number in each for each in found] == [] if allowed else [True]


def test_few_facts_do_not_apply() -> None:
    reasons = {number: "X-01" for number in NUMBERS if number.startswith("S001")}
    most = dict(list(reasons.items())[:MAX_NOT_APPLYING])
    assert complaints(Facts(WORDS, DECIDED, does_not_apply=most), SETTLED) == []
    more = dict(list(reasons.items())[: MAX_NOT_APPLYING + 1])
    assert complaints(Facts(WORDS, DECIDED, does_not_apply=more), SETTLED) == [
        "13 facts are said not to apply, at most 12 may"
    ]


def test_conflicts_and_quirks_need_their_line() -> None:
    facts = Facts(WORDS, DECIDED, quirks=["S000-45"])
    assert complaints(facts, SETTLED) == [
        "S000-45 has no line in docs/decisions.md or docs/differences.md"
    ]
    assert complaints(facts, f"{SETTLED} S000-45") == []
    assert complaints(Facts(WORDS, DECIDED), SETTLED.replace("X-09", "")) == [
        "X-09 has no line in docs/decisions.md or docs/differences.md"
    ]


def test_facts_are_in_few_words_and_none_is_invented() -> None:
    lacking = {**WORDS, "S000-01": "x" * 73, "S000-99": "what?"}
    del lacking["S000-02"]
    found = complaints(Facts(lacking, DECIDED), SETTLED)
    assert [each.split()[0] for each in found] == ["S000-02", "S000-99", "S000-01"]


def test_marks_are_read_from_the_text(tmp_path: Path) -> None:
    file = tmp_path / "test_some.py"
    file.write_text(
        'import pytest\npytestmark = pytest.mark.seed("S000-01")\n'
        '@pytest.mark.seed("S000-02", "S000-03")\ndef test_it(): ...\n'
    )
    assert marks([file]) == [
        ("S000-01", "test_some.py:2"),
        ("S000-02", "test_some.py:3"),
        ("S000-03", "test_some.py:3"),
    ]
    file.write_text("import pytest\npytestmark = pytest.mark.seed(number)\n")
    with pytest.raises(ValueError, match=r"test_some\.py:2 "):
        marks([file])


def test_the_marks_can_be_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--list"]) == 0
    listed = capsys.readouterr().out.splitlines()
    assert len(listed) == len(marks(files_of_tests()))
    assert listed == sorted(listed)


def test_the_page_of_facts_is_the_one_that_make_conformance_writes() -> None:
    assert PAGE.read_text(encoding="utf-8") == facts_page(read_facts())
