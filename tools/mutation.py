# SPDX-License-Identifier: Apache-2.0
"""Put one-line defects of mutation tools into a scratch copy, one by one, and see what finds each.

`draw LANGUAGE` fills up the table (needs `make mutation-tools`), `run LANGUAGE` tries the defects
that nothing has killed yet, `slice` repeats ten that the commit's hash selects, `score` counts.
Each defect runs through the stages of `tools.mutation_stages`, cheapest first, until one fails.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator

from tools.mutation_stages import ROOT, STAGES, UNBUILT, Scratch, Stage, known_tests
from tools.mutation_table import LANGUAGES, Row, apply_row, find_line, read_table, write_table

SEED = "kvcore one-line defects 1"
NUM_ROWS = {"python": 165, "rust": 175}
"""More than 150, to allow for rows that become stale or, in Rust, do not compile."""
NUM_IN_SLICE = {"python": 8, "rust": 2}
CONTEXT_MAX = 8
TOOLS = ROOT / "target" / "mutation-tools"
PLACES = (
    *("hashing", "pool", "state", "transitions", "legacy/blocks", "codec/decode_batch"),
    *("manager", "types/arguments", "types/effects", "types/groups", "types/ids", "types/keys"),
    *("types/event_log", "types/extra_inputs", "types/slot_request", "types/tokens"),
)
"""Folders and files, in either language, of the transitions, the pool, the hashing and requests."""


def rank(*words: str) -> str:
    """Return the sort key of a defect in the seeded order; it depends only on the defect's text."""
    return hashlib.sha256("\0".join((SEED, *words)).encode()).hexdigest()


def drawn_from(language: str) -> list[str]:
    """Return the files whose lines are changed, without package and unit test files."""
    folder, suffix = LANGUAGES[language]
    found = [path for place in PLACES for path in (ROOT / folder / place).rglob(f"*{suffix}")]
    found += [path for place in PLACES if (path := ROOT / folder / f"{place}{suffix}").exists()]
    left_out = ("__init__", "mod", "tests")
    return sorted(str(path.relative_to(ROOT)) for path in found if path.stem not in left_out)


def listed(language: str) -> Iterator[dict[str, str | int]]:
    """Yield each one-line change of the language's mutation tool: file, function, number, now."""
    files = drawn_from(language)
    if language == "python":
        command = [str(TOOLS / "venv/bin/python"), "tools/mutation_list.py", *files]
        for text in subprocess.check_output(command, cwd=ROOT, text=True).splitlines():
            yield json.loads(text)
        return
    options = [word for name in files for word in ("-f", name)]
    command = [str(TOOLS / "bin/cargo-mutants"), "mutants", "--list", "--json", *options]
    for found in json.loads(subprocess.check_output(command, cwd=ROOT)):
        start, end = found["span"]["start"], found["span"]["end"]
        line = (ROOT / found["file"]).read_text().split("\n")[start["line"] - 1]
        if start["line"] == end["line"] and "debug_assert" not in line:
            yield {
                "file": found["file"],
                "function": (found["function"] or {}).get("function_name", ""),
                "number": start["line"] - 1,
                "now": (
                    line[: start["column"] - 1] + found["replacement"] + line[end["column"] - 1 :]
                ).strip(),
            }


def placed(mutant: dict[str, str | int]) -> Row | None:
    """Return the mutant as a row, with enough lines before it to make its place unique, or None."""
    lines = (ROOT / str(mutant["file"])).read_text().split("\n")
    number = int(mutant["number"])
    for length in range(min(CONTEXT_MAX, number) + 1):
        row = Row(
            file=str(mutant["file"]),
            function=str(mutant["function"]),
            before=[line.strip() for line in lines[number - length : number]],
            was=lines[number].strip(),
            now=str(mutant["now"]),
        )
        if find_line(lines, row) is not None:
            return row
    return None


def drawn(language: str) -> list[Row]:
    """Return one mutant per line that has any, in the seeded order."""
    of_line: dict[tuple[str, ...], Row] = {}
    for mutant in listed(language):
        row = placed(mutant)
        if row is not None:
            place = (row.file, *row.before, row.was)
            known = of_line.setdefault(place, row)
            of_line[place] = min(known, row, key=lambda row: rank(*place, row.now))
    return [of_line[place] for place in sorted(of_line, key=lambda place: rank(*place))]


def draw(language: str) -> None:
    """Keep the rows that still apply, and fill up the table in the seeded order."""
    old = read_table(language)
    rows = [row for row in old if applies(row)]
    known = known_tests(language)
    lost = [row for row in rows if row.status == "killed" and row.test not in known]
    for row in lost:
        row.status, row.stage, row.test = "unrun", "", ""
    places = {(row.file, *row.before, row.was) for row in rows}
    for row in drawn(language):
        if len(rows) < NUM_ROWS[language] and (row.file, *row.before, row.was) not in places:
            rows.append(row)
    write_table(language, rows)
    print(
        f"{language}: {len(rows)} rows, {len(old)} before; gone stale: {num_stale(old)}; "
        f"the test that killed it is gone: {len(lost)}"
    )


def applies(row: Row) -> bool:
    """Return whether the row's line occurs exactly once in the tree."""
    path = ROOT / row.file
    return path.exists() and find_line(path.read_text().split("\n"), row) is not None


def num_stale(rows: Iterable[Row]) -> int:
    """Return the number of rows that no longer apply."""
    return sum(not applies(row) for row in rows)


def run(language: str, minutes: float, num_stages: int) -> None:
    """Try each row that nothing has killed yet and that is not explained, while time is left.

    A row continues after the stage that it has survived; after the last, it starts again.
    """
    until = time.monotonic() + 60 * minutes
    scratch = Scratch(language)
    table, stages = read_table(language), STAGES[language][:num_stages]
    names = [stage.name for stage in stages]
    for row in table:
        if row.status in ("unrun", "survived") and applies(row) and time.monotonic() < until:
            started = time.monotonic()
            first = (names.index(row.stage) + 1) % len(names) if row.stage in names else 0
            while stage := try_row(scratch, row, stages[first:]):
                scratch.need_pass(stage)
            write_table(language, table)
            print(
                f"{row.status} {row.stage} {row.test} {time.monotonic() - started:.0f} s: "
                f"{row.file}: {row.was}  ->  {row.now}",
                flush=True,
            )
    score()


def try_row(scratch: Scratch, row: Row, stages: list[Stage]) -> Stage | None:
    """Run the stages on a defect and record the first that fails.

    Returns a stage that must first pass without a defect, or None.
    """
    with apply_row(scratch.folder, row):
        for stage in stages:
            if stage.name not in scratch.passed:
                return stage
            found = scratch.run(stage)
            if found is not None:
                row.status = "killed" if found != UNBUILT else "unbuildable"
                row.stage, row.test = stage.name, found
                return None
            last = stage == STAGES[scratch.language][-1]
            row.status, row.stage, row.test = "survived" if last else "unrun", stage.name, ""
    return None


def slice_of(language: str) -> list[Row]:
    """Return the rows that the commit's hash selects among those that a named test kills."""
    head = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
    ).stdout.strip()
    stages = [stage.name for stage in STAGES[language] if stage.in_slice]
    able = [
        row
        for row in read_table(language)
        if row.status == "killed" and row.stage in stages and row.is_named() and applies(row)
    ]
    num = NUM_IN_SLICE[language]
    if len(able) < num:
        raise SystemExit(f"{language}: {len(able)} rows can be tried, {num} are wanted: draw, run")
    return random.Random(head).sample(able, num)


def slice_again(languages: list[str]) -> int:
    """Check that the selected rows are still killed; returns the number that survive."""
    num_alive = 0
    for language in languages:
        chosen, scratch = slice_of(language), Scratch(language)
        print(f"{language}: rows that no longer apply: {num_stale(read_table(language))}")
        for row in chosen:
            stage = next(stage for stage in STAGES[language] if stage.name == row.stage)
            started = time.monotonic()
            with apply_row(scratch.folder, row):
                found = scratch.run(stage, row.test) or scratch.run(stage)
            num_alive += found is None
            result = f"killed by {found}" if found else f"LIVES ({row.test} killed it)"
            print(
                f"  {result}, {time.monotonic() - started:.0f} s: {row.file}: {row.now}", flush=True
            )
        tests = sorted({row.test for row in chosen})
        print(f"  as committed, {len(tests)} tests pass", flush=True)
        for stage in STAGES[language]:
            of_stage = sorted({row.test for row in chosen if row.stage == stage.name})
            failed = scratch.run(stage, *of_stage) if of_stage else None
            if failed:
                raise SystemExit(f"{failed} fails without a defect")
    return num_alive


def score() -> None:
    """Print each language's number of rows per status, and per stage that killed them."""
    for language in LANGUAGES:
        rows = read_table(language)
        kinds = Counter(row.status for row in rows)
        stages = Counter(row.stage for row in rows if row.status == "killed")
        result = ", ".join(f"{kinds[kind]} {kind}" for kind in sorted(kinds))
        by = ", ".join(f"{stages[s.name]} by {s.name}" for s in STAGES[language])
        print(f"{language}: {len(rows)} drawn: {result}; killed: {by}; stale: {num_stale(rows)}")


def main(arguments: list[str]) -> int:
    """Run one command."""
    parser = argparse.ArgumentParser(prog="tools.mutation", description=__doc__)
    parser.add_argument("command", choices=("draw", "run", "slice", "score"))
    parser.add_argument("language", nargs="?", choices=(*LANGUAGES, "both"), default="both")
    parser.add_argument(
        "--minutes", type=float, default=24 * 60, help="start no row after this many minutes"
    )
    parser.add_argument(
        "--stages", type=int, default=4, help="run only the first stages, this many"
    )
    options = parser.parse_args(arguments)
    languages = list(LANGUAGES) if options.language == "both" else [options.language]
    if options.command == "slice":
        return min(slice_again(languages), 1)
    for language in languages:
        if options.command == "draw":
            draw(language)
        elif options.command == "run":
            run(language, options.minutes, options.stages)
    if options.command == "score":
        score()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
