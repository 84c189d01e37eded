# SPDX-License-Identifier: Apache-2.0
"""vLLM's own tests over kvcore, and the adapter's tests, pass in the environment that has vLLM."""

from __future__ import annotations

import importlib.util
from collections import Counter

import pytest

from benches.peers import install
from tests.engines.vllm import environment as there
from tests.engines.vllm.vllm_outcomes import (
    BEYOND,
    HIT_COUNTS,
    HIT_RULES,
    NO_LOOK_UP,
    NOT_SERVED,
    OUTCOMES,
    PASSES,
    SAME,
    differences,
    judge,
    read_outcomes,
    write_outcomes,
    wrongly_listed,
)

PASSING = 384
"""Of vLLM's tests that reach the manager by its public methods, at least."""
BY_INTERFACE = 350
"""Of those that use no more of it than vLLM's scheduler, at least."""
NUM_OF_HITS = 249
"""vLLM's tests of hits inside blocks and of states."""


@pytest.mark.vllm
def test_the_tests_of_the_adapter_pass_where_vllm_is() -> None:
    if importlib.util.find_spec("vllm") is not None:
        pytest.skip("this environment has vLLM: the tests run themselves")
    if not install.is_installed(there.FAMILY):
        pytest.skip(f"vLLM is not in {install.home()}: make engines-vllm-tests")
    assert there.run_own_tests("-q") == 0


@pytest.mark.slow
@pytest.mark.vllm
def test_each_of_vllms_tests_has_the_expected_outcome() -> None:
    if importlib.util.find_spec("vllm") is not None:
        pytest.skip("this environment has vLLM: make engines-vllm-tests runs them")
    if not (install.is_installed(there.FAMILY) and there.is_fetched()):
        pytest.skip(f"vLLM and its tests are not in {install.home()}: make engines-vllm-tests")
    assert there.run_vllm_tests() == 0


@pytest.mark.slow
@pytest.mark.vllm
def test_hits_are_as_long_as_those_of_vllms_manager_or_a_rule_says_why() -> None:
    if importlib.util.find_spec("vllm") is not None:
        pytest.skip("this environment has vLLM: make engines-vllm-tests runs them")
    if not (install.is_installed(there.FAMILY) and there.is_fetched()):
        pytest.skip(f"vLLM and its tests are not in {install.home()}: make engines-vllm-tests")
    assert there.compare_hits() == 0


def test_a_hit_of_another_length_is_unexpected_unless_a_rule_says_so() -> None:
    assert judge(set(), [(0, 0), (8, 8)]) == SAME
    assert judge(set(), []) == NO_LOOK_UP
    assert judge({NOT_SERVED}, [(8, 0)]) == NOT_SERVED
    for rule, (how, why) in HIT_RULES.items():
        differs, other = [(8, 4), (4, 8)] if how == "shorter" else [(4, 8), (8, 4)]
        assert judge({rule}, [(8, 8), differs]) == f"{how}: {why}"
        assert f"{how}: {why}" in HIT_COUNTS
        for rules, length in ((set[str](), differs), ({rule}, other)):
            assert judge(rules, [(8, 8), length]) not in HIT_COUNTS
        assert judge({rule}, [differs, other]) not in HIT_COUNTS
    assert judge(set(HIT_RULES), [(8, 8)], "an error") not in HIT_COUNTS
    assert sum(HIT_COUNTS.values()) == NUM_OF_HITS


def test_the_expected_outcomes_are_those_of_tests_that_are_named_once() -> None:
    outcomes = read_outcomes(OUTCOMES)
    text = [line for line in OUTCOMES.read_text().splitlines() if not line.startswith("#")]
    assert write_outcomes(outcomes).splitlines() == text
    counts = Counter(outcomes.values())
    assert counts[PASSES] >= PASSING
    beyond = read_outcomes(BEYOND)
    by_interface = Counter(each for name, each in outcomes.items() if name not in beyond)
    assert by_interface[PASSES] >= BY_INTERFACE
    assert all(len(reason) > 20 for reason in counts if reason != PASSES)


def test_an_outcome_that_is_not_the_expected_one_fails_a_run() -> None:
    expected = {"a": PASSES, "b": PASSES, "c": "kvcore has no such thing", "d": "nor that"}
    assert differences(expected, {"a": True, "b": True, "c": False, "d": False}) == []
    assert differences(expected, {"b": False, "c": True, "d": False}) == [
        "fails, and should pass: b",
        "is not there any more: a",
        "passes, and was expected to fail (kvcore has no such thing): c",
    ]


def test_the_tests_beyond_the_schedulers_interface_are_listed_with_the_others() -> None:
    beyond = read_outcomes(BEYOND)
    assert beyond.keys() < read_outcomes(OUTCOMES).keys()
    assert len(set(beyond.values())) == 1


def test_a_test_that_uses_more_than_it_is_listed_for_fails_a_run() -> None:
    found = {"a": True, "b": False, "c": True}
    assert wrongly_listed({"a", "b"}, {"a"}, found) == []  # b fails before it gets there
    assert wrongly_listed({"a", "b"}, {"c"}, found) == [
        "uses more than the scheduler's interface: c",
        "uses only the scheduler's interface: a",
    ]
