# SPDX-License-Identifier: Apache-2.0
"""Print a table of the facts of docs/facts.md: the tests that show each one, and its verdict.

A test names the facts that it shows (`@pytest.mark.seed("S000-15")`), and may name a decision;
`tests/conformance/facts.toml` has their texts. A fact is shown if all its tests pass, on both
backends unless `facts.toml` says that its code exists once. `python -m tools.conformance` runs the
marked tests and prints the table; it fails on a number without a test or verdict, on a failing or
unknown number, on too many that do not apply, and on a decision without its line in
`docs/decisions.md` or `docs/differences.md`. `--list` prints the tests instead; it only reads the
files.
"""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import pytest

ROOT = Path(__file__).resolve().parents[1]
FACTS = ROOT / "tests" / "conformance" / "facts.toml"
DECISIONS = [ROOT / "docs" / name for name in ("decisions.md", "differences.md")]

NUMBERS = tuple(
    f"{seed}-{number:02d}"
    for seed, last in (("S000", 61), ("S001", 85), ("S002", 73), ("S003", 37), ("S004", 22))
    for number in range(1, last + 1)
)
CONFLICTS = tuple(f"X-{number:02d}" for number in range(1, 15))
NEVER_APPLY = ("S004-17", "S004-20", "S004-21", "S004-22")
MAX_NOT_APPLYING = 12
BACKENDS = frozenset({"python", "rust"})

WORDS_MAX = 72
REFERENCE = re.compile(r"\b(?:S00[0-4]-\d\d|X-\d\d)\b")
OLDER = re.compile(r"S00[14]-\d\d")


@attrs.frozen
class Facts:
    """The content of `facts.toml`.

    words: number -> the fact in a few words. conflicts: number -> the decision if sources differ.
    does_not_apply: number -> the reason. once: number -> the part that holds the fact's code, which
    exists in one language. quirks: numbers of facts about a quirk or defect of the original.
    """

    words: Mapping[str, str]
    conflicts: Mapping[str, str] = attrs.field(factory=dict)
    does_not_apply: Mapping[str, str] = attrs.field(factory=dict)
    once: Mapping[str, str] = attrs.field(factory=dict)
    quirks: Sequence[str] = ()


@attrs.frozen
class Result:
    """One run of one test: the fact that it shows, on which backend, and how it ended."""

    number: str
    test: str
    outcome: str
    backend: str | None = None


@attrs.frozen
class Line:
    """A line of the table. tests: by name. bad: the run fails because of it."""

    number: str
    words: str
    tests: tuple[str, ...]
    verdict: str
    bad: bool

    @property
    def num_tests(self) -> int:
        """The number of tests that show the fact."""
        return len(self.tests)


def read_facts(path: Path = FACTS) -> Facts:
    """Read the facts from a file."""
    tables = tomllib.loads(path.read_text(encoding="utf-8"))
    quirks = tables.pop("quirks")["numbers"]
    once = {number: part for part, numbers in tables.pop("once").items() for number in numbers}
    return Facts(once=once, quirks=quirks, **tables)


def decisions() -> str:
    """Return the text of the pages that settle conflicts and quirks."""
    return "\n".join(page.read_text(encoding="utf-8") for page in DECISIONS)


def complaints(facts: Facts, decisions: str) -> list[str]:
    """Return what is wrong with the facts, and with the text that settles their conflicts."""
    worded = {**facts.words, **facts.conflicts}
    found = [
        f"{each} is not in facts.toml" for each in (*NUMBERS, *CONFLICTS) if each not in worded
    ]
    named = {*facts.words, *facts.does_not_apply, *facts.once, *facts.quirks}
    unknown = (named - set(NUMBERS)) | (set(facts.conflicts) - set(CONFLICTS))
    found += [f"{each} in facts.toml is no fact" for each in sorted(unknown)]
    found += [
        f"{number} has {len(words)} characters, at most {WORDS_MAX} are a few words"
        for number, words in worded.items()
        if not 0 < len(words) <= WORDS_MAX
    ]
    found += [
        f"{number} cannot be said not to apply: nothing newer is named that supersedes it"
        for number, reason in facts.does_not_apply.items()
        if number not in NEVER_APPLY and not _supersedes(number, reason)
    ]
    if len(facts.does_not_apply) > MAX_NOT_APPLYING:
        count = len(facts.does_not_apply)
        found.append(f"{count} facts are said not to apply, at most {MAX_NOT_APPLYING} may")
    settled = set(REFERENCE.findall(decisions))
    found += [
        f"{each} has no line in docs/decisions.md or docs/differences.md"
        for each in (*CONFLICTS, *facts.quirks)
        if each not in settled
    ]
    return found


def _supersedes(number: str, reason: str) -> bool:
    return bool(OLDER.fullmatch(number)) and bool(set(REFERENCE.findall(reason)) - {number})


def make_lines(facts: Facts, results: Iterable[Result]) -> list[Line]:
    """Return one line per fact and conflict, then one per number that is neither."""
    by_number: dict[str, list[Result]] = defaultdict(list)
    for result in results:
        by_number[result.number].append(result)
    lines = []
    for number in (*NUMBERS, *CONFLICTS):
        verdict, bad = _verdict(facts, number, by_number[number])
        words = facts.words.get(number) or facts.conflicts.get(number, "")
        tests = tuple(sorted({each.test for each in by_number[number]}))
        lines.append(Line(number, words, tests, verdict, bad))
    for number in sorted(set(by_number) - {*NUMBERS, *CONFLICTS}):
        tests = tuple(sorted({each.test for each in by_number[number]}))
        lines.append(Line(number, tests[0], tests, "unknown", True))
    return lines


def _verdict(facts: Facts, number: str, results: Sequence[Result]) -> tuple[str, bool]:
    failed = sorted({each.test for each in results if each.outcome == "failed"})
    if failed:
        return f"fail: {', '.join(failed)}", True
    if number in CONFLICTS:
        return "decided", False
    passed = [each for each in results if each.outcome == "passed"]
    if number in facts.does_not_apply:
        if results:
            return "said not to apply, but has tests", True
        return f"does not apply: {facts.does_not_apply[number]}", False
    if not passed:
        return "missing" if not results else "missing: its tests were skipped", True
    lacking = BACKENDS - {each.backend for each in passed}
    if lacking and number not in facts.once:
        return f"missing on {' and '.join(sorted(lacking))}", True
    return "pass", False


def table(lines: Sequence[Line]) -> str:
    """Return the lines as text, followed by counts."""
    wide = max(len(line.words) for line in lines)
    rows = []
    for line in lines:
        rows.append(f"{line.number:7}  {line.words:{wide}}  {line.num_tests:5}  {line.verdict}")
        rows += (f"{'':9}{test.removeprefix('tests/')}" for test in line.tests)
    heading = f"{'number':7}  {'fact':{wide}}  tests  verdict"
    kinds = Counter(line.verdict.partition(":")[0].partition(" on ")[0] for line in lines)
    counts = ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items()))
    bad = sum(line.bad for line in lines)
    closing = f"{len(lines)} numbers: {counts}; {bad} to mend"
    return "\n".join([heading, *rows, "", closing])


def marks(files: Iterable[Path]) -> list[tuple[str, str]]:
    """Return number and place of each `pytest.mark.seed(...)` in files, without running them.

    Raises ValueError for a number that is not written out.
    """
    found: list[tuple[str, str]] = []
    for path in files:
        name = path.relative_to(ROOT).as_posix() if path.is_relative_to(ROOT) else path.name
        text = path.read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(text)) if "mark.seed" in text else ():
            found += [(number, f"{name}:{line}") for number, line in _numbers(node, name)]
    return found


def _numbers(node: ast.AST, name: str) -> Iterator[tuple[str, int]]:
    if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
        return
    if node.func.attr != "seed" or ast.unparse(node.func) != "pytest.mark.seed":
        return
    for argument in node.args:
        if not isinstance(argument, ast.Constant) or not isinstance(argument.value, str):
            raise ValueError(f"{name}:{node.lineno} does not write its numbers out")
        yield argument.value, node.lineno


def files_of_tests() -> list[Path]:
    """Return the files that may hold marks."""
    return sorted((ROOT / "tests").rglob("*.py"))


class Recorder:
    """A pytest plugin that runs only the marked tests and records their outcomes."""

    def __init__(self) -> None:
        self.results: list[Result] = []
        self._backends: dict[str, str | None] = {}

    def pytest_collection_modifyitems(
        self, config: pytest.Config, items: list[pytest.Item]
    ) -> None:
        """Deselect tests without a `seed` marker; record the backend of the others."""
        unmarked = [item for item in items if item.get_closest_marker("seed") is None]
        items[:] = [item for item in items if item.get_closest_marker("seed") is not None]
        config.hook.pytest_deselected(items=unmarked)
        for item in items:
            parameters = getattr(getattr(item, "callspec", None), "params", {})
            self._backends[item.nodeid] = _backend(parameters)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Record the outcome of the call, or of a set-up that failed before it."""
        if report.when != "call" and report.outcome == "passed":
            return
        test = report.nodeid.partition("[")[0]
        backend = self._backends[report.nodeid]
        for name, number in report.user_properties:
            if name == "seed":
                self.results.append(Result(str(number), test, report.outcome, backend))


def _backend(parameters: Mapping[str, Any]) -> str | None:
    names = (each for each in parameters.values() if isinstance(each, str) and each in BACKENDS)
    return next(names, None)


def main(arguments: Sequence[str]) -> int:
    """Run the marked tests and print the table; 0 if every fact has its verdict."""
    if {"-h", "--help"} & set(arguments):
        print(__doc__)
        return 0
    if list(arguments) == ["--list"]:
        for number, place in sorted(marks(files_of_tests())):
            print(number, place)
        return 0
    recorder = Recorder()
    files = sorted({place.partition(":")[0] for _, place in marks(files_of_tests())})
    code = pytest.main(["--quiet", "-r", "fE", *arguments, *files], plugins=[recorder])
    facts = read_facts()
    lines = make_lines(facts, recorder.results)
    wrong = complaints(facts, decisions())
    print(table(lines))
    settled = len(CONFLICTS) + len(facts.quirks)
    print("\n".join(wrong) or f"the documents settle all {settled} conflicts and quirks")
    if code != pytest.ExitCode.OK:
        print(f"pytest ended with {code!r}")
    return int(bool(wrong) or any(line.bad for line in lines) or code != pytest.ExitCode.OK)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
