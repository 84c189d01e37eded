# SPDX-License-Identifier: Apache-2.0
"""The options of `kvcore replay`, and which of them cannot be combined.

Impossible combinations are refused before anything is read or run, with one sentence that says what
to do instead. Numbers of blocks include the null block, as in engines.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from importlib import util
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import attrs

from kvcore import _twin
from kvcore.cli.arguments import MOST, CommandParser, count, positive
from kvcore.replay.configuration import make_config, read_groups
from kvcore.replay.request_trace import STDIN
from kvcore.replay.results import BackendName, Options
from kvcore.replay.whole_file import check_writable
from kvcore.types.config import EVICTIONS, EvictionName
from kvcore.types.errors import KvcoreError

if TYPE_CHECKING:
    from kvcore.oracle.device import MakeDevice

T = TypeVar("T")

TRACES = "JSONL of Mooncake or Bailian, or another form (docs/replay.md); - for standard input"
OR_RECORD = "; or a record, for which `%(prog)s RECORD --help` shows the options"
DEFAULTS = Options(num_blocks=1)
WITHOUT_WISHES = tuple(each for each in EVICTIONS if each != "retention")
"""Traces have no retention wishes, so `retention` equals `uncached_first` there."""
HOMES = {"torch": "kvcore-runtime"}
"""Device -> the distribution that provides it."""


class BadOptions(KvcoreError):
    """The options cannot be combined, or need something that is missing. Fields: reason."""

    message = "{reason}"


@attrs.frozen(kw_only=True)
class Arguments:
    """The arguments of one call of the command. sizes, policies: of the sweep, besides the
    first.
    """

    trace: str
    options: Options
    sizes: tuple[int, ...]
    policies: tuple[EvictionName, ...]
    backend: BackendName
    device: MakeDevice | None
    skip_bad: bool
    rate: float | None
    json: bool
    html: str | None
    explain: bool


def make_parser() -> argparse.ArgumentParser:
    """Build the parser of the command."""
    parser = CommandParser(
        prog="kvcore replay",
        description="Replay a recorded workload on the real manager, in virtual time.",
        epilog="Exit code: 0 replayed, 1 --apply found wrong content, 2 bad arguments or a bad "
        "trace, 130 interrupted, with a report of what was done.",
    )
    parser.source = "trace"
    parser.add_argument("trace", metavar="TRACE", help=TRACES + OR_RECORD)
    add_pool(pool := parser.add_argument_group("the pool"))
    _add_variants(pool)
    add_loop(loop := parser.add_argument_group("the loop"))
    loop.add_argument(
        "--apply",
        metavar="DEVICE",
        help="apply each batch to real memory and check every read: torch",
    )
    _add_result(parser.add_argument_group("output"))
    return parser


def add_pool(group: argparse._ArgumentGroup) -> None:
    """Add the options of the pool."""
    add = group.add_argument
    add("--blocks", type=count, metavar="N", required=True, help="blocks of the pool")
    _number(group, "--block-size", "TOKENS", DEFAULTS.block_size, "tokens per block")
    add(
        "--model",
        metavar="CONFIG",
        help="config.json of a model: blocks of its layers, as `kvcore size` shows them",
    )
    add(
        "--hash-block-size",
        type=count,
        metavar="TOKENS",
        help="let hits end at multiples of it, inside blocks too (ends of blocks)",
    )
    add(
        "--policy",
        choices=EVICTIONS,
        default=DEFAULTS.policy,
        help=f"the policy: which free block leaves first ({DEFAULTS.policy})",
    )
    add("--backend", choices=("rust", "python"), help="the core (rust, if compiled)")


def _add_variants(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add(
        "--policies",
        type=policies,
        metavar="NAME,NAME,...",
        default=(),
        help="also replay under each of these, on all cores; all: those that need no wishes",
    )
    add(
        "--sweep",
        type=counts,
        metavar="N,N,...",
        default=(),
        help="also replay on pools of these sizes: hit rate against pool size",
    )


def add_loop(group: argparse._ArgumentGroup) -> None:
    """Add the options of the loop."""
    add = group.add_argument
    _number(group, "--max-running", "N", DEFAULTS.max_running, "maximum number of running requests")
    _number(
        group,
        "--token-budget",
        "TOKENS",
        DEFAULTS.token_budget,
        "maximum number of tokens per step",
    )
    add(
        "--preempt",
        choices=("recompute", "swap"),
        default=DEFAULTS.preempt,
        help=f"what to do with a preempted request ({DEFAULTS.preempt})",
    )
    _number(group, "--waiting", "N", DEFAULTS.num_known, "waiting requests that the manager knows")
    add("--far-blocks", type=count, metavar="N", help="blocks of a far tier below the pool")
    add(
        "--store-policy",
        choices=("publication", "second_use"),
        help=f"which blocks it keeps: all computed ones, or those that a second prompt uses "
        f"({DEFAULTS.store_policy})",
    )
    add(
        "--host-blocks",
        type=count,
        metavar="N",
        help="host blocks for swapping (as many as --blocks)",
    )
    add("--requests", type=count, metavar="N", help="read at most this many requests")
    costs = (DEFAULTS.base_seconds, DEFAULTS.seconds_per_prefill_token, DEFAULTS.seconds_per_decode)
    add(
        "--step-us",
        type=step_us,
        metavar="BASE,PROMPT,DECODE",
        default=costs,
        help="virtual time in us per step, per prompt token and per decoded token "
        f"({','.join(f'{each * 1e6:g}' for each in costs)})",
    )
    add("--skip-bad", action="store_true", help="skip bad lines, and count them")
    add_rate(group)


def add_rate(group: argparse._ActionsContainer) -> None:
    """Add the option of a trace without times."""
    what = "requests per second, for a trace without times"
    group.add_argument("--rate", type=positive, metavar="N", help=what)


def _add_result(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--json", action="store_true", help="write plain data instead of text")
    add("--html", metavar="FILE", help="also write one page with plots (kvcore[plots])")
    add(
        "--explain",
        action="store_true",
        help="explain why tokens were computed again (kvcore explain)",
    )
    add("--no-bounds", action="store_true", help="skip ideal and optimum, which need memory")


def read_arguments(given: argparse.Namespace) -> Arguments:
    """Read the options. Raises BadOptions, CannotWrite, and what `make_config` raises."""
    if given.policies and given.apply is not None:
        raise BadOptions(reason="--apply checks one policy: omit --policies")
    if given.policies and given.explain:
        raise BadOptions(reason="--explain explains one policy: omit --policies")
    if given.far_blocks is None and given.store_policy is not None:
        raise BadOptions(reason="--store-policy needs --far-blocks")
    if given.far_blocks is not None and given.apply is not None:
        raise BadOptions(reason="--apply has no far tier: omit --far-blocks")
    inside = given.model is not None or given.hash_block_size is not None
    for name in ("far_blocks", "apply", "optimum"):
        if inside and getattr(given, name, False):
            option = "--" + name.replace("_", "-")
            reason = f"{option} has blocks of one size that are hit whole"
            raise BadOptions(reason=f"{reason}: omit --model and --hash-block-size")
    if given.host_blocks is not None and given.preempt != "swap":
        raise BadOptions(reason="--host-blocks needs --preempt swap")
    options = Options(
        num_blocks=given.blocks,
        block_size=given.block_size,
        groups=() if given.model is None else read_groups(given.model, given.block_size),
        hash_block_size=given.hash_block_size,
        policy=given.policy,
        max_running=given.max_running,
        token_budget=given.token_budget,
        preempt=given.preempt,
        num_host_blocks=given.host_blocks,
        num_requests=given.requests,
        num_known=given.waiting,
        bounds=not given.no_bounds,
        far_blocks=given.far_blocks,
        store_policy=given.store_policy or DEFAULTS.store_policy,
        base_seconds=given.step_us[0],
        seconds_per_prefill_token=given.step_us[1],
        seconds_per_decode=given.step_us[2],
    )
    for size in (given.blocks, *given.sweep):
        for policy in (given.policy, *given.policies):
            make_config(attrs.evolve(options, num_blocks=size, policy=policy))
    if given.html is not None:
        _check_page(given.html, given.trace)
    return Arguments(
        trace=given.trace,
        options=options,
        sizes=given.sweep,
        policies=given.policies,
        backend=_backend(given.backend),
        device=_device(given.apply),
        skip_bad=given.skip_bad,
        rate=given.rate,
        json=given.json,
        html=given.html,
        explain=given.explain,
    )


def _backend(name: BackendName | None) -> BackendName:
    """Return the requested core, or the faster of the available ones."""
    if name == "rust" and not _twin.available():
        raise BadOptions(reason="the compiled twin is missing: use --backend python")
    return name or ("rust" if _twin.available() else "python")


def _device(name: str | None) -> MakeDevice | None:
    """Return the requested device."""
    if name is None:
        return None
    from kvcore.oracle.device import find_device

    make = find_device(name)
    if make is None:
        home = HOMES.get(name)
        needs = f"needs {home}, which is not installed" if home else "names no installed device"
        raise BadOptions(reason=f"--apply {name} {needs}")
    return make


def _check_page(path: str, trace: str) -> None:
    """Raise BadOptions or CannotWrite unless a page can be drawn and written."""
    if util.find_spec("matplotlib") is None:
        reason = "--html draws with matplotlib, which is not installed: install kvcore[plots]"
        raise BadOptions(reason=reason)
    if path == STDIN:
        raise BadOptions(reason="--html - is not a file, and standard output is for the report")
    check_writable(path, () if trace == STDIN else [Path(trace)])


def _number(group: argparse._ArgumentGroup, name: str, unit: str, default: int, what: str) -> None:
    group.add_argument(
        name, type=count, metavar=unit, default=default, help=f"{what} ({default:,})"
    )


def counts(text: str) -> tuple[int, ...]:
    """Read comma-separated numbers."""
    return _listed(text, count)


def policies(text: str) -> tuple[EvictionName, ...]:
    """Read comma-separated names of policies, or all that a trace can distinguish."""
    names = WITHOUT_WISHES if text == "all" else tuple(each.strip() for each in text.split(","))
    known = tuple(each for each in EVICTIONS if each in names)
    for name in names:
        if name not in known:
            listed = ", ".join(EVICTIONS)
            raise argparse.ArgumentTypeError(f"must be all, or some of {listed}; not {name!r}")
    return known


def step_us(text: str) -> tuple[float, ...]:
    """Read three times in microseconds; return seconds."""
    times = _listed(text, _us)
    if len(times) != 3:
        raise argparse.ArgumentTypeError(f"must be three times, BASE,PROMPT,DECODE, not {text!r}")
    return times


def _us(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= MOST:
        raise argparse.ArgumentTypeError(f"must be a number of microseconds, not {text!r}")
    return value / 1e6


def _listed(text: str, read: Callable[[str], T]) -> tuple[T, ...]:
    return tuple(read(each.strip()) for each in text.split(","))
