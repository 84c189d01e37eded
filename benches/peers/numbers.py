# SPDX-License-Identifier: Apache-2.0
"""The figures that the project sets itself, and how to read each from a run of the bench."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import attrs

from benches.peers.measure import Side

Sides = Mapping[str, Side]
PYTHON_CORE = ("kvcore-python", "kvcore-python-batched")


@attrs.frozen
class Number:
    """One figure. measured: reads it from the cases that ran; raises KeyError if one is missing."""

    title: str
    required: str
    aim: str
    measured: Callable[[Sides], str]


def ratio(case: str, slow: str, fast: str) -> Callable[[Sides], str]:
    """Return a figure: how many times as fast one peer is as another, with the spread."""

    def measured(sides: Sides) -> str:
        least, low, high = sides[case].ratio(slow, fast)
        return f"{least:.2g}x ({low:.2g} to {high:.2g})" if least < 1 else (
            f"{least:.1f}x ({low:.1f} to {high:.1f})"
        )  # fmt: skip

    return measured


def decode_step(peer: str) -> Callable[[Sides], str]:
    """Return a figure: one decode step of 1024 requests, and how many times as fast it is."""

    def measured(sides: Sides) -> str:
        side = sides["d1024"]
        mine, other = side.decode_step(peer), side.decode_step("vllm033")
        return f"{1e6 * mine:.0f} us ({other / mine:.0f}x vLLM 0.33)"

    return measured


def growth(peer: str) -> Callable[[Sides], str]:
    """Return a figure: the cost per block in the largest pool over that in the usual one."""
    return lambda sides: f"{sides['1m'].a_block(peer) / sides['16k'].a_block(peer):.2f}"


def tail(peer: str) -> Callable[[Sides], str]:
    """Return a figure: the 99.9th percentile of a step in the largest pool."""
    return lambda sides: f"{1e3 * sides['1m'].step(peer, 0.999):.2f} ms"


def memory(peer: str) -> Callable[[Sides], str]:
    """Return a figure: the memory of the largest pool, before and after."""

    def measured(sides: Sides) -> str:
        made, end = sides["1m"].runs[peer].memory
        return f"{made:.0f}, {end:.0f} MB"

    return measured


def least_of(*each: Callable[[Sides], str]) -> Callable[[Sides], str]:
    """Return a figure that shows several in one field."""
    return lambda sides: "; ".join(one(sides) for one in each)


NUMBERS = (
    Number(
        "twin from Rust, vLLM's sha256_cbor keys, over vLLM 0.33",
        "40x",
        "48x",
        ratio("16k", "vllm033", "kvcore-rust"),
    ),
    Number("the same with xxh3 keys", "100x", "117x", ratio("16k", "vllm033", "kvcore-rust-xxh3")),
    Number(
        "Python API, one call per request, plain lists, over vLLM 0.33",
        "22x",
        "28x",
        ratio("16k", "vllm033", "kvcore-calls"),
    ),
    Number(
        "Python API, batched, buffers, over vLLM 0.33",
        "28x",
        "34x",
        ratio("16k", "vllm033", "kvcore-batched"),
    ),
    Number(
        "the same with siphash keys, and with xxh3 keys",
        "50x",
        "65x",
        least_of(
            ratio("16k", "vllm033", "kvcore-batched-siphash"),
            ratio("16k", "vllm033", "kvcore-batched-xxh3"),
        ),
    ),
    Number(
        "the Python API, batched, in blocks of 64",
        "32x",
        "44x",
        ratio("64", "vllm033", "kvcore-batched"),
    ),
    Number(
        "one decode step of 1024 requests through Python, buffers",
        "36 us",
        "25 us",
        decode_step("kvcore-batched"),
    ),
    Number("the same from Rust", "20 us", "13 us", decode_step("kvcore-rust")),
    Number(
        "twin with SHA-256 keys over kvbm-logical",
        "4x",
        "8x",
        ratio("16k", "kvbm", "kvcore-rust-sha"),
    ),
    Number(
        "Python API, one call per request, over SGLang's Rust tree",
        "3x",
        "6x",
        ratio("16k", "sglang", "kvcore-calls"),
    ),
    Number(
        "cost per block at 1M blocks over that at 16k (twin; Python API)",
        "1.7",
        "1.3",
        least_of(growth("kvcore-rust"), growth("kvcore-calls")),
    ),
    Number(
        "99.9th percentile of a step's manager time at 1M blocks (twin; Python API)",
        "5 ms",
        "1 ms",
        least_of(tail("kvcore-rust"), tail("kvcore-calls")),
    ),
    Number(
        "memory of a 1M pool: before, after the run (twin)",
        "40, 200 MB",
        "32, 100 MB",
        memory("kvcore-rust"),
    ),
    Number(
        "Python core over vLLM 0.33 (one call per request; batched)",
        "0.35x",
        "0.5x",
        least_of(*(ratio("16k", "vllm033", name) for name in PYTHON_CORE)),
    ),
    Number(
        "the same, 1024 requests decoding",
        "0.25x",
        "0.5x",
        least_of(*(ratio("d1024", "vllm033", name) for name in PYTHON_CORE)),
    ),
)


def rows(sides: Sides) -> Iterator[tuple[str, str, str, str]]:
    """Yield the figures that these cases and peers allow."""
    for number in NUMBERS:
        try:
            yield number.title, number.required, number.aim, number.measured(sides)
        except KeyError:
            continue
