# SPDX-License-Identifier: Apache-2.0
"""The options of `kvcore check`: the world, the limits, the backend.

Numbers are those of a world; impossible combinations are refused in one sentence. Blocks are
counted without the null block, which is added if a group needs it.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

from kvcore import _twin
from kvcore.check.profiles.profile import SWAPS, Profile, world
from kvcore.check.profiles.registry import PROFILES
from kvcore.check.search.scope import BACKENDS
from kvcore.check.world.world import BASIC_CALLS, Symmetry, World
from kvcore.cli.arguments import CommandParser, natural, positive
from kvcore.types.config import EVICTIONS
from kvcore.types.groups import Group

KIND_WORDS = {
    "full": "full_attention",
    "state": "state",
    "window": "sliding_window",
    "chunk": "chunked_local",
}
MORE_CALLS = (
    *("truncate", "rewind", "swap_out", "swap_in", "evict_blocks", "pin", "unpin", "store", "load"),
    *("unschedule", "cache_blocks", "remove_skipped_blocks", "add_tokens"),
)
SYMMETRIES = ("requests", "blocks", "tokens")
OF_WORLD = ("blocks", "requests", "tokens")
USUAL = "3x2x4"
"""The named world that is explored by default."""


class BadOptions(ValueError):
    """The options cannot be combined; the message says why in one sentence."""


def make_parser() -> argparse.ArgumentParser:
    """Build the parser of the command."""
    parser = CommandParser(
        prog="kvcore check",
        description="Explore every state of a small world, and check every property at each step.",
        epilog="Exit code: 0 no violation, 1 a violation, 2 bad arguments, 3 a named world did "
        "not reach its goals, 130 interrupted.",
    )
    _add_world(parser.add_argument_group("the world"))
    _add_options(parser.add_argument_group("options of the core"))
    _add_search(parser.add_argument_group("the search"))
    _add_result(parser.add_argument_group("output"))
    return parser


def _add_world(group: Any) -> None:
    add = group.add_argument
    add(
        "--profile",
        metavar="NAME",
        help=f"explore a named world; --list shows them ({USUAL})",
    )
    add("--facade", metavar="NAME", help="explore an older manager, v0 or v0.3, in its own worlds")
    add("--manager", metavar="MODULE:FACTORY", help="explore your own manager, made with a Config")
    add("--names", type=names, metavar="OURS=THEIRS,...", help="the names of its methods")
    add("--blocks", type=natural, metavar="N", help="usable device blocks")
    add("--requests", type=natural, metavar="N", help="maximum number of requests, up to 10")
    add("--tokens", type=natural, metavar="N", help="maximum tokens per request")
    add("--prompt", type=natural, metavar="N", help="maximum tokens of a new request (as --tokens)")
    add(
        "--letters",
        type=natural,
        metavar="N",
        help="number of tokens that can follow one prefix (2)",
    )
    add("--drafts", type=natural, metavar="N", help="maximum number of drafts (0)")
    add("--lookahead", type=natural, metavar="N", help="maximum lookahead slots per call (0)")
    add("--external", type=natural, metavar="N", help="maximum external tokens per call (0)")
    add("--pins", type=natural, metavar="N", help="maximum number of pins (1, if pin is tried)")
    add("--ahead", type=natural, metavar="N", help="maximum positions to come per call (0)")
    add("--outputs", type=natural, metavar="N", help="maximum outputs to hand in, with --ahead (2)")
    add(
        "--forgets-overwritten",
        action="store_true",
        default=None,
        help="what batches to come overwrite unread counts as unknown, which folds states",
    )
    add("--marks", action="store_true", default=None, help="calls also keep states inside a block")
    add("--loads-fail", action="store_true", default=None, help="loads can fail, at each token")
    add("--moves", choices=("engine", "calls"), help="explore an engine's moves, or single calls")
    add("--moves-per-batch", type=natural, metavar="N", help="maximum moves per batch (1)")
    add(
        "--calls",
        type=names,
        metavar="NAME,...",
        help=f"also try these calls: {', '.join(MORE_CALLS)}",
    )
    add("--without", type=names, metavar="NAME,...", help="leave these calls out")


def _add_options(group: Any) -> None:
    add = group.add_argument
    add("--block-size", type=natural, metavar="TOKENS", help="tokens per block (2)")
    add(
        "--hash-block-size",
        type=natural,
        metavar="TOKENS",
        help="tokens per hash, where hits can end (whole blocks of all groups)",
    )
    add(
        "--groups",
        type=names,
        metavar="KIND,...",
        help="full, window:2, chunk:2, state (full); @1: block size",
    )
    add("--host-blocks", type=natural, metavar="N", help="blocks of the host tier (0)")
    add("--max-in-flight", type=natural, metavar="N", help="batches in flight (0)")
    add("--publish", choices=("scheduled", "completed"), help="when blocks are findable")
    add("--duplicates", choices=("keep", "merge"), help="whether duplicate blocks are kept")
    add("--eviction", choices=EVICTIONS, help="which free block leaves first")
    add("--watermark", type=natural, metavar="N", help="blocks that an admission leaves free (0)")
    add("--events", action="store_true", default=None, help="emit events, and check them")


def _add_search(group: Any) -> None:
    add = group.add_argument
    add("--backend", choices=BACKENDS, help="the core to explore (the named world's, else python)")
    add("--depth", type=natural, metavar="N", help="stop at this distance from the start")
    add("--limit", type=natural, metavar="N", help="stop at this many states")
    add("--time", type=positive, metavar="SECONDS", help="stop after this many seconds")
    add("--workers", type=natural, metavar="N", default=os.cpu_count() or 1, help="processes")
    add(
        "--properties",
        type=names,
        metavar="NAME,...",
        help="check only these properties; list: print all",
    )
    add("--no-symmetry", nargs="?", type=names, const=SYMMETRIES, metavar="WHAT,...", help=_RENAME)
    add("--full-keys", action="store_true", help="keep whole names, not 128 bits of them")


def _add_result(group: Any) -> None:
    add = group.add_argument
    add("--json", action="store_true", help="write plain data instead of text")
    add("--write-test", metavar="FILE", help="write a violation as a test that fails")
    add("--write-trace", metavar="FILE", help="write a violation as a text trace")
    add("--list", action="store_true", help="list the named worlds")
    add(
        "--mutants",
        action="store_true",
        help="hunt the seeded bugs (`make mutants`: also the twin's)",
    )


AT_LEAST_ONE = (
    *(*OF_WORLD, "prompt", "letters", "block_size", "moves_per_batch", "workers"),
    *("hash_block_size", "depth", "limit", "outputs"),
)
_RENAME = "do not treat states as equal after renaming requests, blocks or tokens (all of them)"


def profile_of(options: argparse.Namespace) -> Profile | None:
    """Return the requested named world, or the default; None for a world described by options.

    Raises BadOptions.
    """
    zeros = [name for name in AT_LEAST_ONE if getattr(options, name) == 0]
    if zeros:
        raise BadOptions(f"{option(zeros[0])} must be at least 1")
    given = given_of_world(options)
    if options.profile is None and given:
        return None
    name = options.profile or USUAL
    if given[1:]:
        raise BadOptions(f"--profile names a whole world: omit {option(given[1])}")
    if name not in PROFILES:
        raise BadOptions(f"there is no profile {name!r}; there are {', '.join(PROFILES)}")
    return PROFILES[name]


def world_of(options: argparse.Namespace) -> World:
    """Return the world that the options describe. Raises BadOptions, InvalidConfig,
    GroupsDoNotFit.
    """
    missing = [name for name in OF_WORLD if not getattr(options, name)]
    if missing:
        raise BadOptions(f"give {', '.join(map(option, missing))}, or name a --profile")
    world = _made(options)
    _check_world(options, world)
    return world


def backend_of(options: argparse.Namespace, profile: Profile | None) -> str:
    """Return the backend: the requested one, or the named world's."""
    usual = "python" if profile is None else profile.backend
    if options.backend is None and usual == "both" and not _twin.available():
        return "python"
    return str(options.backend or usual)


def given_of_world(options: argparse.Namespace) -> list[str]:
    """Return the given options of a world, with --profile first."""
    return [name for name in ("profile", *WORLD_OPTIONS) if getattr(options, name)]


def symmetry_of(options: argparse.Namespace) -> Symmetry:
    """Return the kinds of names to rename. Raises BadOptions."""
    left_out = options.no_symmetry or ()
    for name in left_out:
        if name not in SYMMETRIES:
            raise BadOptions(f"--no-symmetry {name!r}: only {', '.join(SYMMETRIES)} are renamed")
    return Symmetry(**{name: name not in left_out for name in SYMMETRIES})


def check_hunt(options: argparse.Namespace, *others: str) -> None:
    """Raise BadOptions if a hunt of the seeded bugs is combined with a world or other options."""
    given = [*given_of_world(options), *(name for name in others if getattr(options, name))]
    given += [] if options.backend in (None, "python") else ["backend"]
    if given:
        words = f"leave {option(given[0])} out"
        raise BadOptions(f"--mutants has a world for each seeded bug: {words}")


def check_options(options: argparse.Namespace) -> None:
    """Raise BadOptions if the search does not support the requested options."""
    for name in ("write_test", "write_trace"):
        path = getattr(options, name)
        if path and not Path(path).resolve().parent.is_dir():
            raise BadOptions(f"{option(name)} {path}: there is no such folder")
    if "POLICY" in (options.properties or ()):
        raise BadOptions(
            "POLICY checks a policy of your own: see kvcore.check.extend.policies in Python"
        )
    if (options.write_test or options.write_trace) and options.json:
        raise BadOptions("--json prints a violation's calls: omit --write-test and --write-trace")


def _made(options: argparse.Namespace) -> World:
    kinds = groups_of(options)
    given = {field: value for name, field in FIELDS.items() if (value := getattr(options, name))}
    sizes = (options.blocks, options.requests, options.tokens, options.prompt or options.tokens)
    more = (*(options.calls or ()), *(SWAPS if options.host_blocks else ()))
    return world(*sizes, *more, without=options.without or (), groups=kinds, **given)


def _check_world(options: argparse.Namespace, world: World) -> None:
    known = {*BASIC_CALLS, *MORE_CALLS}
    for name in options.calls or ():
        if name not in known:
            raise BadOptions(f"there is no call {name!r} to try; there are {', '.join(MORE_CALLS)}")
    for name in options.without or ():
        if name not in known:
            tried = ", ".join(sorted(world.calls))
            raise BadOptions(f"there is no call {name!r} to leave out; there are {tried}")
    _check_loads(world)
    if world.num_requests > 10:
        raise BadOptions("a world has at most 10 requests")
    if world.num_prompt > world.num_tokens:
        raise BadOptions(f"a prompt of {world.num_prompt} tokens is longer than a request may be")
    if world.num_drafts >= world.num_tokens:
        raise BadOptions(f"{world.num_drafts} drafts leave no space for a token before them")
    if world.num_drafts and world.num_output_placeholders:
        raise BadOptions("a request has known drafts or positions to come: use --drafts or --ahead")
    if options.outputs and not world.num_output_placeholders:
        raise BadOptions("no output is to come: use --ahead")
    flies = world.config.max_in_flight or world.num_output_placeholders
    if world.forgets_overwritten and not flies:
        raise BadOptions("no batch is to come: use --max-in-flight or --ahead")
    if not world.config.num_host_blocks and {"swap_out", "swap_in"} & world.calls:
        raise BadOptions("swapping needs a host tier: use --host-blocks")
    if world.loads_fail and not (world.num_external or "load" in world.calls):
        raise BadOptions("no load can fail: use --external or --calls load")
    if world.loads_fail and world.num_output_placeholders and not world.config.max_in_flight:
        raise BadOptions(
            "a load is confirmed when the next batch is taken: --loads-fail with --ahead needs "
            "--max-in-flight"
        )
    if world.loads_fail and world.config.max_in_flight and not world.num_external:
        raise BadOptions("in flight, operations already end either way: omit --loads-fail")
    if world.moves == "engine" and world.num_external:
        raise BadOptions("an engine's moves have no external tokens: use --moves calls")
    if world.marks and (world.moves == "engine" or not world.config.has_states):
        raise BadOptions("single calls mark states: use --moves calls, and state in --groups")
    if options.pins and "pin" not in world.calls:
        raise BadOptions("nothing is pinned: use --calls pin,unpin")


def _check_loads(world: World) -> None:
    """Raise BadOptions if loads are requested but no request could ever be loaded."""
    if "load" not in world.calls:
        return
    least = world.config.block_alignment + 1
    if world.num_tokens < least:
        raise BadOptions(
            f"nothing uses load: it brings whole blocks and leaves a token, so say --tokens {least}"
        )
    if world.moves == "engine" and not world.calls >= {"free", "allocate_slots"}:
        raise BadOptions("nothing uses load: an engine loads for a request that it preempted")
    if world.moves == "calls" and "allocate_slots" not in world.calls:
        raise BadOptions("nothing uses load: it is tried where allocate_slots is")


def groups_of(options: argparse.Namespace) -> tuple[Group, ...]:
    """Return the groups of the world. Raises BadOptions, InvalidConfig."""
    size, drafts = options.block_size or 2, options.drafts or 0
    return tuple(_group(word, size, drafts) for word in options.groups or ("full",))


def _group(word: str, size: int, num_drafts: int) -> Group:
    """Return the group that a word describes: kind, window, size; its states follow drafts."""
    rest, _, own = word.partition("@")
    kind, _, window = rest.partition(":")
    has_none = kind in ("full", "state")
    if kind not in KIND_WORDS or not (own or "1").isdigit() or has_none != (not window):
        raise BadOptions(
            f"no group is {word!r}: say full, window:2, chunk:2 or state, with @1 for its size"
        )
    if window and not window.isdigit():
        raise BadOptions(f"the window of {word!r} is no number of tokens")
    made: dict[str, Any] = {"kind": KIND_WORDS[kind], "window": int(window) if window else None}
    made["draft_states"] = num_drafts if kind == "state" else 0
    return Group(int(own or size), **made)


def option(name: str) -> str:
    """Return the spelling of an option."""
    return "--" + name.replace("_", "-")


def names(text: str) -> tuple[str, ...]:
    """Join names with commas."""
    return tuple(each.strip() for each in text.split(",") if each.strip())


FIELDS = {
    **{name: f"num_{name}" for name in ("letters", "drafts", "lookahead", "external", "pins")},
    "outputs": "num_outputs",
    "ahead": "num_output_placeholders",
    **{name: name for name in ("loads_fail", "forgets_overwritten", "marks", "moves")},
    "moves_per_batch": "moves_per_batch",
    "host_blocks": "num_host_blocks",
    **{name: name for name in ("max_in_flight", "publish", "duplicates", "eviction")},
    "hash_block_size": "hash_block_size",
    "watermark": "watermark_blocks",
    "events": "enable_events",
}
"""The field of a world or its config that an option gives."""
SIZES_AND_CALLS = ("blocks", "requests", "tokens", "prompt", "calls", "without")
WORLD_OPTIONS = (*SIZES_AND_CALLS, "block_size", "groups", *FIELDS)
