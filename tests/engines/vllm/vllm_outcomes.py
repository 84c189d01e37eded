# SPDX-License-Identifier: Apache-2.0
"""The expected outcomes of vLLM's own tests over kvcore: `vllm_outcomes.txt`.

A line with `#` is a comment, one without indent ends in `:` and names an outcome: "passes", or the
reason of a failure. Below it are files, and below a file its tests, each with its parameters.
"""

from __future__ import annotations

from pathlib import Path

PASSES = "passes"
OUTCOMES = Path(__file__).with_name("vllm_outcomes.txt")
BEYOND = Path(__file__).with_name("vllm_beyond.txt")
"""In the same form, the tests that use more of the manager than vLLM's scheduler does."""
FOLDER = "tests/v1/core/"

SAME, NO_LOOK_UP, NOT_SERVED = "the same", "no request in a manager", "refused: circular buffers"
HIT_RULES = {
    "pool": ("shorter", "the test takes blocks out of the pool by itself"),
    "pieces": ("shorter", "no hits inside a block if a block of any group is as small as a hash"),
    "again": ("shorter", "no states of chunks whose last tokens the next chunk writes again"),
    "parts": ("longer", "every part of a block is found"),
}
"""How kvcore's hits may differ from those of vLLM's own manager, and why, by rule of
vllm_hits.py."""
HIT_COUNTS = {
    SAME: 222,
    NO_LOOK_UP: 12,
    NOT_SERVED: 2,
    "shorter: no hits inside a block if a block of any group is as small as a hash": 7,
    "shorter: no states of chunks whose last tokens the next chunk writes again": 4,
    "shorter: the test takes blocks out of the pool by itself": 1,
    "longer: every part of a block is found": 1,
}
"""How many of vLLM's 249 tests of hits come out how."""


def read_outcomes(path: Path) -> dict[str, str]:
    """Return each test's id and its expected outcome."""
    found: dict[str, str] = {}
    outcome = file = ""
    for line in path.read_text().splitlines():
        if not line.strip() or line.startswith("#"):
            continue
        indent = len(line) - len(line.lstrip())
        if indent == 0:
            outcome = line.removesuffix(":")
        elif indent == 2:
            file = line.strip()
        else:
            name, *parameters = line.strip().split(" [")
            for each in [f"[{part}" for part in parameters] or [""]:
                found[f"{FOLDER}{file}::{name}{each}"] = outcome
    return found


def differences(expected: dict[str, str], found: dict[str, bool]) -> list[str]:
    """Return a line for each test that is missing or differs. found: whether it passed."""
    lines = [f"is not there any more: {name}" for name in expected.keys() - found.keys()]
    for name, passed in found.items():
        if not passed and expected[name] == PASSES:
            lines.append(f"fails, and should pass: {name}")
        if passed and expected[name] != PASSES:
            lines.append(f"passes, and was expected to fail ({expected[name]}): {name}")
    return sorted(lines)


def wrongly_listed(beyond: set[str], seen: set[str], found: dict[str, bool]) -> list[str]:
    """Return a line for each test that `beyond` lists wrongly. seen: those that used more than the
    scheduler's interface; a test that fails may not have come so far.
    """
    idle = {name for name in beyond - seen if found[name]}
    lines = [f"uses more than the scheduler's interface: {name}" for name in seen - beyond]
    return sorted([*lines, *(f"uses only the scheduler's interface: {name}" for name in idle)])


def judge(rules: set[str], lengths: list[tuple[int, int]], error: str | None = None) -> str:
    """Return how a test of hits comes out, in the words of HIT_COUNTS if it may. rules: those that
    apply to it. lengths: of each look-up, vLLM's and kvcore's.
    """
    if NOT_SERVED in rules:
        return NOT_SERVED
    if error is not None:
        return f"the comparison ended: {error}"
    kinds = {"shorter" if kvcore < vllm else "longer" for vllm, kvcore in lengths if kvcore != vllm}
    for kind in sorted(kinds, reverse=True):
        allowed = [why for rule, (how, why) in HIT_RULES.items() if rule in rules and how == kind]
        if not allowed:
            return f"{kind} than vLLM's, and no rule says so: {lengths}"
    if kinds:
        return f"{kind}: {allowed[0]}"
    return SAME if lengths else NO_LOOK_UP


def write_outcomes(outcomes: dict[str, str]) -> str:
    """Return the text that `read_outcomes` reads, without comments."""
    tree: dict[str, dict[str, dict[str, list[str]]]] = {}
    for node in sorted(outcomes):
        file, _, test = node.removeprefix(FOLDER).partition("::")
        name, bracket, parameters = test.partition("[")
        tests = tree.setdefault(outcomes[node], {}).setdefault(file, {})
        tests.setdefault(name, []).append(bracket + parameters)
    lines = []
    for outcome, files in tree.items():
        lines.append(f"{outcome}:")
        for file, tests in files.items():
            lines.append(f"  {file}")
            lines += [f"    {' '.join([name, *given]).strip()}" for name, given in tests.items()]
    return "\n".join(lines) + "\n"
