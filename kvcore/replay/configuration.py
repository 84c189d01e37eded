# SPDX-License-Identifier: Apache-2.0
"""The configuration of a replay's manager: blocks of tokens, or those of a model's layers."""

from __future__ import annotations

from pathlib import Path

from kvcore.replay.errors import InvalidReplayOption
from kvcore.replay.results import Options
from kvcore.sizing import group_layers, make_layer_specs, read_model
from kvcore.types.arguments import read_count
from kvcore.types.config import Config
from kvcore.types.groups import Group


def read_groups(path: str | Path, block_size: int) -> tuple[Group, ...]:
    """Read a model's config.json; return the groups of its layers, in blocks of equal size.

    block_size: of attention; with states, the least multiple of it whose keys and values fill a
    block. Raises what `read_model`, `make_layer_specs` and `group_layers` raise.
    """
    specs = make_layer_specs(read_model(path), block_size=block_size)
    kept = [each.spec for each in group_layers(specs)]
    return tuple(Group(each.block_size, kind=each.kind, window=each.window) for each in kept)


def make_config(options: Options) -> Config:
    """Return the configuration of the manager for these options.

    Raises InvalidConfig, InvalidCount, InvalidReplayOption.
    """
    for name in ("max_running", "token_budget"):
        read_count(name, getattr(options, name), 1)
    for name in ("num_requests", "far_blocks"):
        if getattr(options, name) is not None:
            read_count(name, getattr(options, name), 1)
    for name in ("base_seconds", "seconds_per_prefill_token", "seconds_per_decode"):
        value = getattr(options, name)
        if not 0 <= value < float("inf"):
            raise InvalidReplayOption(
                name=name, value=value, reason="must be at least 0, and finite"
            )
    num_host_blocks = 0
    if options.preempt == "swap":
        given = options.num_host_blocks
        num_host_blocks = options.num_blocks if given is None else given
    elif options.preempt != "recompute":
        reason = "must be one of recompute, swap"
        raise InvalidReplayOption(name="preempt", value=options.preempt, reason=reason)
    return Config(
        options.num_blocks,
        options.groups[0].block_size if options.groups else options.block_size,
        groups=options.groups,
        max_num_batched_tokens=options.token_budget if options.groups else None,
        hash_block_size=options.hash_block_size,
        num_host_blocks=num_host_blocks,
        eviction=options.policy,
        hashing=options.hashing,
        hash_seed=b"kvcore replay",
    )
