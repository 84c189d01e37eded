# SPDX-License-Identifier: Apache-2.0
"""Sampling: a function of logits, parameters, seed and index, and of nothing else."""

import math
from collections import Counter
from itertools import pairwise
from typing import Any

import pytest
import torch
from kvcore_runtime.errors import InvalidSampling, ShapeMismatch
from kvcore_runtime.model.sampling import (
    FinishReason,
    Sampling,
    cut_at_stop,
    derive_seed,
    finish_reason,
    sample,
    uniform,
)

LOGITS = torch.tensor([0.0, 3.0, 1.0, 2.0])


def draws(sampling: Sampling, count: int) -> Counter[int]:
    rows = LOGITS.expand(count, -1)
    return Counter(sample(rows, [sampling] * count, range(count)))


def test_temperature_zero_takes_the_likeliest() -> None:
    assert draws(Sampling(), 3) == {1: 3}


def test_the_smallest_temperature_takes_the_likeliest_too() -> None:
    assert draws(Sampling(temperature=5e-324, seed=3), 50) == {1: 50}


def test_a_token_does_not_depend_on_its_batch() -> None:
    torch.manual_seed(0)
    logits = torch.randn(6, 50)
    samplings = [Sampling(temperature=0.5 * i, seed=i, top_k=3 * i) for i in range(6)]
    indices = [5, 4, 3, 2, 1, 0]
    together = sample(logits, samplings, indices)
    alone = [sample(logits[i : i + 1], [samplings[i]], [indices[i]])[0] for i in range(6)]
    order = [3, 1, 5, 0, 4, 2]
    shuffled = sample(logits[order], [samplings[i] for i in order], [indices[i] for i in order])
    assert alone == together
    assert shuffled == [together[i] for i in order]


@pytest.mark.parametrize("temperature", [0.7, 1.0, 2.0])
def test_frequencies_follow_the_softmax(temperature: float) -> None:
    count = 4000
    found = draws(Sampling(temperature=temperature, seed=11), count)
    for token, chance in enumerate((LOGITS / temperature).softmax(0).tolist()):
        deviation = math.sqrt(count * chance * (1 - chance))
        assert abs(found[token] - count * chance) < 4 * deviation


def test_top_k_keeps_the_likeliest_k() -> None:
    assert set(draws(Sampling(temperature=5.0, top_k=2), 200)) == {1, 3}
    assert set(draws(Sampling(temperature=5.0, top_k=1), 20)) == {1}


def test_top_p_keeps_the_fewest_that_reach_p() -> None:
    chances = sorted(LOGITS.softmax(0).tolist(), reverse=True)
    just_two = (chances[0] + chances[0] + chances[1]) / 2
    assert set(draws(Sampling(temperature=1.0, top_p=just_two), 200)) == {1, 3}
    assert set(draws(Sampling(temperature=1.0, top_p=chances[0] / 2), 20)) == {1}


def test_the_stream_of_a_seed_is_spread_evenly() -> None:
    """The means of numbers and of products of neighbours are within four deviations."""
    count = 4000
    for seed in (0, 1, -1, 2**63, 12345678901234567890123):
        numbers = [uniform(seed, index) for index in range(count + 1)]
        assert all(0 <= number < 1 for number in numbers)
        assert abs(sum(numbers) / (count + 1) - 1 / 2) < 4 * math.sqrt(1 / 12 / count)
        products = [(left - 0.5) * (right - 0.5) for left, right in pairwise(numbers)]
        assert abs(sum(products) / count) < 4 / 12 / math.sqrt(count)


def test_near_seeds_have_unlike_streams() -> None:
    streams = {tuple(uniform(seed, index) for index in range(3)) for seed in range(500)}
    numbers = {number for stream in streams for number in stream}
    assert len(numbers) == 1500


def test_samples_of_one_prompt_have_seeds_of_their_own() -> None:
    seeds = [derive_seed(seed, sample_index) for seed in range(20) for sample_index in range(20)]
    assert derive_seed(7, 0) == 7
    assert len(set(seeds)) == 400


def test_an_answer_ends_at_its_first_reason() -> None:
    sampling = Sampling(max_tokens=3, end_ids=frozenset({9}), stop=("\n\n",))
    assert finish_reason(sampling, []) is None
    assert finish_reason(sampling, [1, 9, 2]) is FinishReason.LENGTH
    assert finish_reason(sampling, [1, 2]) is None
    assert finish_reason(sampling, [1, 9]) is FinishReason.END
    assert finish_reason(sampling, [1, 2, 9]) is FinishReason.END
    assert finish_reason(sampling, [1, 2], "a\n\nb") is FinishReason.STOP


def test_text_is_cut_before_the_first_stop_string() -> None:
    sampling = Sampling(stop=("end", "b"))
    assert cut_at_stop(sampling, "a b end") == "a "
    assert cut_at_stop(sampling, "an end") == "an "
    assert cut_at_stop(sampling, "none") == "none"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("top_k", -1),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("max_tokens", 0),
        ("stop", ("",)),
    ],
)
def test_parameters_out_of_range_are_refused(field: str, value: Any) -> None:
    arguments: dict[str, Any] = {field: value}
    with pytest.raises(InvalidSampling, match=field):
        Sampling(**arguments)


def test_rows_and_requests_must_match() -> None:
    with pytest.raises(ShapeMismatch):
        sample(LOGITS.expand(2, -1), [Sampling()], [0])
