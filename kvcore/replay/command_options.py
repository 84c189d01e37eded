# SPDX-License-Identifier: Apache-2.0
"""The options of `kvcore replay`, and which of them do not go together.

What cannot be done is refused before anything is read or run, in one sentence that says what
to do instead. Blocks are those of the pool as engines count them, the null block included.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from importlib import util
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import attrs

from kvcore import _twin
from kvcore.cli.arguments import MOST, count, positive
from kvcore.replay.loop import make_config
from kvcore.replay.request_trace import STDIN
from kvcore.replay.results import BackendName, Options
from kvcore.replay.whole_file import check_writable
from kvcore.types.config import EVICTIONS, EvictionName
from kvcore.types.errors import KvcoreError

if TYPE_CHECKING:
    from kvcore.oracle.device import MakeDevice

T = TypeVar("T")

TRACES = "JSONL of Mooncake or Bailian, or another form (docs/replay.md); - for standard input"
DEFAULTS = Options(num_blocks=1)
WITHOUT_WISHES = tuple(each for each in EVICTIONS if each != "retention")
"""No trace says how long content should stay: there `retention` is `uncached_first`."""
HOMES = {"torch": "kvcore-runtime"}
"""Device to the distribution that brings it."""


class BadOptions(KvcoreError):
    """Options that do not go together, or that need what is not there. Fields: reason."""

    message = "{reason}"


@attrs.frozen(kw_only=True)
class Arguments:
    """Arguments of one call of the command. sizes, policies: the sweep's, besides the first."""

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
    """The parser of the command."""
    parser = argparse.ArgumentParser(
        prog="kvcore replay",
        description="Replay a recorded workload on the real manager, in virtual time.",
        epilog="Exit code: 0 replayed, 1 --apply found wrong content, 2 the call or the trace was "
        "wrong, 130 interrupted; then, too, it reports what was done.",
    )
    parser.add_argument("trace", metavar="TRACE", help=TRACES)
    add_pool(parser.add_argument_group("the pool"))
    add_loop(parser.add_argument_group("the loop"))
    _add_result(parser.add_argument_group("what comes out"))
    return parser


def add_pool(group: argparse._ArgumentGroup) -> None:
    """Options of the pool."""
    add = group.add_argument
    add("--blocks", type=count, metavar="N", required=True, help="blocks of the pool")
    _number(group, "--block-size", "TOKENS", DEFAULTS.block_size, "tokens per block")
    add(
        "--policy",
        choices=EVICTIONS,
        default=DEFAULTS.policy,
        help=f"which free block leaves first ({DEFAULTS.policy})",
    )
    add(
        "--policies",
        type=policies,
        metavar="NAME,NAME,...",
        default=(),
        help="replay under each of these, too, on all cores; all: those that need no wishes",
    )
    add("--backend", choices=("rust", "python"), help="the core (rust, if it is compiled)")
    add(
        "--sweep",
        type=counts,
        metavar="N,N,...",
        default=(),
        help="replay on pools of these sizes, too: hit rate against pool size",
    )


def add_loop(group: argparse._ArgumentGroup) -> None:
    """Options of the loop."""
    add = group.add_argument
    _number(group, "--max-running", "N", DEFAULTS.max_running, "requests that run at a time")
    _number(group, "--token-budget", "TOKENS", DEFAULTS.token_budget, "most tokens of a step")
    add(
        "--preempt",
        choices=("recompute", "swap"),
        default=DEFAULTS.preempt,
        help=f"what happens to a preempted request ({DEFAULTS.preempt})",
    )
    _number(group, "--waiting", "N", DEFAULTS.num_known, "waiting requests that the manager knows")
    add("--far-blocks", type=count, metavar="N", help="blocks of a far tier below the pool")
    add(
        "--store-policy",
        choices=("publication", "second_use"),
        help=f"which blocks it keeps: all that are computed, or those of a second prompt "
        f"({DEFAULTS.store_policy})",
    )
    add("--host-blocks", type=count, metavar="N", help="to swap to (as many as --blocks)")
    add("--requests", type=count, metavar="N", help="read at most this many")
    costs = (DEFAULTS.base_seconds, DEFAULTS.seconds_per_prefill_token, DEFAULTS.seconds_per_decode)
    add(
        "--step-us",
        type=step_us,
        metavar="BASE,PROMPT,DECODE",
        default=costs,
        help="virtual us of a step, and of each token of prompts and decodes in it "
        f"({','.join(f'{each * 1e6:g}' for each in costs)})",
    )
    add("--skip-bad", action="store_true", help="count and leave out bad lines")
    add_rate(group)
    add(
        "--apply",
        metavar="DEVICE",
        help="give each batch to real memory and check every read: torch",
    )


def add_rate(group: argparse._ActionsContainer) -> None:
    """The option of a trace without times."""
    what = "requests a second, of a trace without times"
    group.add_argument("--rate", type=positive, metavar="N", help=what)


def _add_result(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--json", action="store_true", help="plain data instead of text")
    add("--html", metavar="FILE", help="write one page with plots, too (kvcore[plots])")
    add(
        "--explain", action="store_true", help="say why tokens were computed again (kvcore explain)"
    )
    add("--no-bounds", action="store_true", help="do not count ideal and optimum: less memory")


def read_arguments(given: argparse.Namespace) -> Arguments:
    """Read the options. Raises BadOptions, CannotWrite, and what `make_config` raises."""
    if given.policies and given.apply is not None:
        raise BadOptions(reason="--apply checks one policy: leave --policies out")
    if given.far_blocks is None and given.store_policy is not None:
        raise BadOptions(reason="--store-policy is of a far tier: say --far-blocks, too")
    if given.far_blocks is not None and given.apply is not None:
        raise BadOptions(reason="--apply has no far tier: leave --far-blocks out")
    if given.host_blocks is not None and given.preempt != "swap":
        raise BadOptions(reason="--host-blocks are to swap to: say --preempt swap, too")
    options = Options(
        num_blocks=given.blocks,
        block_size=given.block_size,
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
        make_config(attrs.evolve(options, num_blocks=size))
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
    """The core that is requested, or the quicker one of those there are."""
    if name == "rust" and not _twin.available():
        raise BadOptions(reason="the compiled twin is missing: say --backend python")
    return name or ("rust" if _twin.available() else "python")


def _device(name: str | None) -> MakeDevice | None:
    """The device that is requested."""
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
    """Raise BadOptions or CannotWrite unless a page can be made and put there."""
    if util.find_spec("matplotlib") is None:
        reason = "--html draws with matplotlib, which is not installed: install kvcore[plots]"
        raise BadOptions(reason=reason)
    if path == STDIN:
        raise BadOptions(reason="--html - names no file, and the report goes to standard output")
    if trace != STDIN and Path(path).resolve() == Path(trace).resolve():
        raise BadOptions(reason=f"--html {path} would replace the trace")
    check_writable(path)


def _number(group: argparse._ArgumentGroup, name: str, unit: str, default: int, what: str) -> None:
    group.add_argument(
        name, type=count, metavar=unit, default=default, help=f"{what} ({default:,})"
    )


def counts(text: str) -> tuple[int, ...]:
    """Numbers with commas between."""
    return _listed(text, count)


def policies(text: str) -> tuple[EvictionName, ...]:
    """Names of policies with commas between, or all of them that a trace can tell apart."""
    names = WITHOUT_WISHES if text == "all" else tuple(each.strip() for each in text.split(","))
    known = tuple(each for each in EVICTIONS if each in names)
    for name in names:
        if name not in known:
            listed = ", ".join(EVICTIONS)
            raise argparse.ArgumentTypeError(f"must be all or of {listed}, not {name!r}")
    return known


def step_us(text: str) -> tuple[float, ...]:
    """Three times in microseconds, as seconds."""
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
