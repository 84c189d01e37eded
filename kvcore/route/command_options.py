# SPDX-License-Identifier: Apache-2.0
"""The options of `kvcore route`, and the runs that they describe.

All combinations of options with several values are run, except those that make no difference: a
weight for rules other than `cost`, a delay or loss of events for rules without an index.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator
from typing import Any, TypeVar, get_args

import attrs

from kvcore import _twin
from kvcore.cli.arguments import MOST, CommandParser, count, natural, positive
from kvcore.replay.command_options import TRACES, BadOptions, add_rate, counts
from kvcore.replay.results import BackendName
from kvcore.route.results import (
    PREFILL_RATE,
    SECONDS_PER_DECODE,
    WITH_INDEX,
    ModelName,
    Options,
    RuleName,
)

T = TypeVar("T")

RULES: tuple[RuleName, ...] = get_args(RuleName)
MODELS: tuple[ModelName, ...] = get_args(ModelName)
REPLICAS_MAX = 65_536


@attrs.frozen(kw_only=True)
class Arguments:
    """The arguments of one call of the command. runs: in the order of the report."""

    trace: str
    runs: tuple[Options, ...]
    backend: BackendName | None
    num_requests: int | None
    speed: float
    skip_bad: bool
    rate: float | None
    json: bool
    timing: bool


def make_parser() -> argparse.ArgumentParser:
    """Build the parser of the command."""
    parser = CommandParser(
        prog="kvcore route",
        description="Replay a recorded workload on replicas behind a router, in virtual time.",
        epilog="If options have several values, all combinations are run. Exit code: 0 replayed, "
        "2 bad arguments or a bad trace, 130 interrupted.",
    )
    parser.source = "trace"
    parser.add_argument("trace", metavar="TRACE", help=TRACES)
    _add_fleet(parser.add_argument_group("the replicas"))
    _add_router(parser.add_argument_group("the router"))
    _add_workload(parser.add_argument_group("the workload"))
    add = parser.add_argument_group("output").add_argument
    add("--json", action="store_true", help="write plain data instead of text")
    add(
        "--timing",
        action="store_true",
        help="also report the time of the router's choice (varies between runs)",
    )
    return parser


def _add_fleet(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--replicas", type=counts, metavar="R,R,...", default=(64,), help="number of replicas (64)")
    add(
        "--blocks",
        type=count,
        metavar="N",
        required=True,
        help="blocks per replica, of one id each",
    )
    add("--model", choices=MODELS, default="lru", help="the cache of a replica (lru)")
    add(
        "--backend",
        choices=get_args(BackendName),
        help="the core of the managers (rust, if compiled)",
    )
    rate = f"prompt tokens per second of each replica ({PREFILL_RATE:,.0f})"
    add("--prefill-rate", type=positive, metavar="TOKENS", default=PREFILL_RATE, help=rate)
    add(
        "--decode-ms",
        type=_from_zero,
        metavar="MS",
        default=1000 * SECONDS_PER_DECODE,
        help=f"milliseconds per output token ({1000 * SECONDS_PER_DECODE:g})",
    )
    add(
        "--die",
        type=_several(natural),
        metavar="K,K,...",
        default=(0,),
        help="replicas that die when half of the requests have come (0)",
    )


def _add_router(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add(
        "--rule",
        type=_rules,
        metavar="NAME,NAME,...",
        default=("cost",),
        help=f"{', '.join(RULES)}; or all (cost)",
    )
    add(
        "--scale",
        type=_several(positive),
        metavar="X,X,...",
        default=(1.0,),
        help="weight of prefill in the cost rule (1)",
    )
    add(
        "--delay",
        type=_several(_from_zero),
        metavar="S,S,...",
        default=(0.0,),
        help="delay of events in seconds (0)",
    )
    add(
        "--loss",
        type=_several(_share),
        metavar="P,P,...",
        default=(0.0,),
        help="share of event messages that are lost (0)",
    )
    add("--no-replay", action="store_true", help="lost events are never requested again")
    seed = "seed of losses, deaths and the hash rule (0)"
    add("--seed", type=natural, metavar="N", default=0, help=seed)


def _add_workload(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--requests", type=count, metavar="N", help="read at most this many requests")
    add(
        "--speed",
        type=positive,
        metavar="X",
        default=1.0,
        help="replay this many times as fast as recorded (1)",
    )
    add("--skip-bad", action="store_true", help="skip bad lines, and count them")
    add_rate(group)


def read_arguments(given: argparse.Namespace) -> Arguments:
    """Read the options. Raises BadOptions."""
    if given.backend == "rust" and not _twin.available():
        raise BadOptions(reason="the compiled twin is missing: use --backend python")
    if max(given.replicas) > REPLICAS_MAX:
        reason = f"--replicas {max(given.replicas)} are more than {REPLICAS_MAX:,}"
        raise BadOptions(reason=reason)
    if max(given.die) >= min(given.replicas):
        reason = f"--die {max(given.die)} leaves none of {min(given.replicas)} replicas"
        raise BadOptions(reason=reason)
    return Arguments(
        trace=given.trace,
        runs=tuple(dict.fromkeys(_runs(given))),
        backend=given.backend,
        num_requests=given.requests,
        speed=given.speed,
        skip_bad=given.skip_bad,
        rate=given.rate,
        json=given.json,
        timing=given.timing,
    )


def _runs(given: argparse.Namespace) -> Iterator[Options]:
    """Yield the runs, with repetitions."""
    first = Options(
        num_replicas=1,
        num_blocks=given.blocks,
        model=given.model,
        replay=not given.no_replay,
        prefill_rate=given.prefill_rate,
        seconds_per_decode=given.decode_ms / 1000,
        seed=given.seed,
    )
    for replicas in given.replicas:
        for rule in given.rule:
            has_index = rule in WITH_INDEX
            for scale in given.scale if rule == "cost" else (1.0,):
                for delay in given.delay if has_index else (0.0,):
                    for loss in given.loss if has_index else (0.0,):
                        for dead in given.die:
                            yield attrs.evolve(
                                first,
                                num_replicas=replicas,
                                rule=rule,
                                scale=scale,
                                delay=delay,
                                loss=loss,
                                num_dead=dead,
                            )


def _several(read: Callable[[str], T]) -> Callable[[str], tuple[T, ...]]:
    """Make a reader of comma-separated values."""
    return lambda text: tuple(read(each.strip()) for each in text.split(","))


def _rules(text: str) -> tuple[RuleName, ...]:
    names: Any = RULES if text == "all" else tuple(each.strip() for each in text.split(","))
    for name in names:
        if name not in RULES:
            listed = ", ".join(RULES)
            raise argparse.ArgumentTypeError(f"must be all, or some of {listed}; not {name!r}")
    return tuple(dict.fromkeys(names))


def _from_zero(text: str) -> float:
    return _between(text, MOST, f"a number from 0 to {MOST}")


def _share(text: str) -> float:
    return _between(text, 1, "a number from 0 to 1")


def _between(text: str, most: float, what: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value <= most:
        raise argparse.ArgumentTypeError(f"must be {what}, not {text!r}")
    return value
