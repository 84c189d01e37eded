# SPDX-License-Identifier: Apache-2.0
"""The report on a model's cache in a given memory, for people and for programs.

The report uses the manager's own arithmetic: its groups, its null block, and its limits of a
request. A request that does not fit is a result here, not an error. Sizes are those of one device.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import groupby
from typing import Any

import attrs

from kvcore.sizing.amounts import format_memory
from kvcore.sizing.configs import longest_in_blocks, request_bytes, unify_hybrid_kv_cache_specs
from kvcore.sizing.families import family_note
from kvcore.sizing.grouping import choose_hash_block_size, group_layers
from kvcore.sizing.layout import (
    KVCacheConfig,
    KVCacheGroupSpec,
    block_bytes,
    blocks_per_request,
    make_layout,
    num_cache_tokens,
    usable_blocks,
)
from kvcore.sizing.memory import check_memory
from kvcore.sizing.models import Model, make_layer_specs
from kvcore.sizing.specs import AttentionSpec, LayerSpec, Limits, StateSpec
from kvcore.sizing.weights import Budget


@attrs.frozen(kw_only=True)
class SizeReport:
    """A model's cache in a given memory.

    longest_model_len: the longest request that fits, at most `limits.max_model_len`; 0 if none.
    notes: remarks on the sizing, one sentence each. budget: source of the memory, None if it was
    given.
    """

    model: Model
    config: KVCacheConfig
    limits: Limits
    memory_bytes: int
    tensor_parallel: int
    context_parallel: int
    longest_model_len: int
    notes: tuple[str, ...]
    budget: Budget | None = None

    @property
    def fits(self) -> bool:
        """Whether one request of full length fits."""
        return self.longest_model_len == self.limits.max_model_len

    @property
    def blocks_per_request(self) -> int:
        """The most blocks that one request of full length holds."""
        return blocks_per_request(self.config.groups, self.limits)

    @property
    def hit_alignment(self) -> int:
        """The tokens of which every hit length is a multiple: those of a hash if hits may end
        inside blocks, else those of whole blocks of each group that is not one of states.
        """
        if self.config.hash_block_size is not None:
            return self.config.hash_block_size
        specs = (group.spec for group in self.config.groups)
        return math.lcm(*(spec.block_size for spec in specs if not isinstance(spec, StateSpec)))

    @property
    def num_full_requests(self) -> int:
        """Number of requests of full length that fit at once."""
        return usable_blocks(self.config, self.limits) // self.blocks_per_request

    @property
    def token_bytes(self) -> int:
        """Bytes of one token in all layers, on a rank that has it."""
        return sum(len(each.layer_names) * each.spec.token_bytes for each in self.config.groups)

    @property
    def lasting_token_bytes(self) -> int:
        """Bytes of one token in the layers that keep it after it has left every window."""
        return sum(
            len(each.layer_names) * each.spec.token_bytes
            for each in self.config.groups
            if each.spec.keeps_all
        )


def size_model(
    model: Model,
    memory_bytes: int,
    limits: Limits,
    *,
    block_size: int = 16,
    dtype: str | None = None,
    tensor_parallel: int = 1,
    context_parallel: int = 1,
    windows: bool = True,
    checkpoint_interval: int | None = None,
    hash_block_size: int | None = None,
) -> SizeReport:
    """Make the report for a model.

    memory_bytes: for the cache, on each device. limits.num_blocks replaces the number of blocks
    that fit; a request must fit into both. windows: False to keep windows and chunks as full
    attention in a model that has both. checkpoint_interval: see `group_layers`. hash_block_size:
    see `choose_hash_block_size`. Raises WrongArgument, NoCacheMemory, InvalidMemory above a PiB,
    and what `make_layer_specs`, `group_layers` and `choose_hash_block_size` raise.
    """
    check_memory("memory_bytes", memory_bytes)
    specs = make_layer_specs(
        model,
        block_size=block_size,
        dtype=dtype,
        tensor_parallel=tensor_parallel,
        context_parallel=context_parallel,
    )
    specs = specs if windows else unify_hybrid_kv_cache_specs(specs)
    groups = group_layers(specs, checkpoint_interval)
    in_memory = memory_bytes // block_bytes(groups)
    config = make_layout(groups, in_memory if limits.num_blocks is None else limits.num_blocks)
    unit = choose_hash_block_size(groups, block_size, hash_block_size)
    config = attrs.evolve(config, hash_block_size=unit)
    return SizeReport(
        model=model,
        config=config,
        limits=limits,
        memory_bytes=memory_bytes,
        tensor_parallel=tensor_parallel,
        context_parallel=context_parallel,
        longest_model_len=longest_in_blocks(groups, min(config.num_blocks, in_memory), limits),
        notes=tuple(_notes(model, limits, dtype)),
    )


def to_json(report: SizeReport) -> dict[str, Any]:
    """Return the report as plain data."""
    config, limits = report.config, report.limits
    return {
        "file": report.model.file,
        "model_type": report.model.model_type,
        "num_layers": len(report.model.layers),
        "dtype": config.groups[0].spec.dtype,
        "tensor_parallel": report.tensor_parallel,
        "context_parallel": report.context_parallel,
        "groups": [
            {
                "kind": group.spec.kind,
                "window": group.spec.window,
                "num_layers": len(group.layer_names),
                "num_empty_slots": config.num_slots - len(group.layer_names),
                "block_size": group.spec.block_size,
                "layer_names": list(group.layer_names),
                **_state_json(group.spec),
            }
            for group in config.groups
        ],
        "token_bytes": report.token_bytes,
        "lasting_token_bytes": report.lasting_token_bytes,
        "block_bytes": config.block_bytes,
        "memory_bytes": report.memory_bytes,
        "num_blocks": config.num_blocks,
        "num_usable_blocks": usable_blocks(config, limits),
        "num_tokens": num_cache_tokens(config, limits),
        "max_model_len": limits.max_model_len,
        "max_num_batched_tokens": limits.max_num_batched_tokens,
        "blocks_per_request": report.blocks_per_request,
        "hash_block_size": config.hash_block_size,
        "hit_alignment": report.hit_alignment,
        "request_bytes": request_bytes(config.groups, limits),
        "num_full_requests": report.num_full_requests,
        "fits": report.fits,
        "longest_model_len": report.longest_model_len,
        "notes": list(report.notes),
        "budget": None if report.budget is None else _budget_json(report.budget),
    }


def _state_json(spec: LayerSpec) -> dict[str, Any]:
    if not isinstance(spec, StateSpec):
        return {}
    return {"state_bytes": spec.state_bytes, "padding_bytes": spec.page_bytes - spec.state_bytes}


def to_text(report: SizeReport) -> str:
    """Format the report as lines for people."""
    lines = [("model", _model_line(report))]
    if report.tensor_parallel > 1:
        lines.append(("devices", _devices_line(report)))
    if report.context_parallel > 1:
        lines.append(("ranks", _ranks_line(report)))
    lines += _group_lines(report.config)
    if report.budget is not None:
        lines.append(("device", _budget_line(report.budget, report.model)))
    lines += _size_lines(report)
    return "\n".join(f"{name:<11}{text}" for name, text in lines)


def _notes(model: Model, limits: Limits, dtype: str | None) -> Iterator[str]:
    if model.remark is not None:
        yield model.remark
    family = family_note(model.model_type)
    if family is not None:
        yield family
    if dtype is None and model.dtype == "float32":
        yield "the cache is in the weights' float32; engines serve those in bfloat16 (--dtype)"
    own_length = model.max_position_embeddings
    if own_length is not None and own_length < limits.max_model_len:
        yield f"the model itself was made for {_count(own_length, 'token')}"


def _model_line(report: SizeReport) -> str:
    dtype = report.config.groups[0].spec.dtype
    layers = {".".join(name.split(".")[:2]) for name in report.model.names}
    keep = " that keep something" if report.model.layer_names else ""
    kept = f"{_count(len(layers), 'layer')}{keep}, cache in {dtype}"
    return f"{report.model.model_type}: {kept} ({report.model.file})"


def _devices_line(report: SizeReport) -> str:
    specs = (group.spec for group in report.config.groups)
    spec = next((each for each in specs if isinstance(each, AttentionSpec)), None)
    layer = report.model.attention
    if spec is None or layer is None:
        part = "its part of the states"
    elif spec.use_mla:
        part = "the whole latent vector"
    else:
        part = f"{spec.num_kv_heads} of {_count(layer.num_kv_heads, 'key-value head')}"
    return f"{report.tensor_parallel}, each with {part}; sizes below are of one device"


def _ranks_line(report: SizeReport) -> str:
    split = [group.spec for group in report.config.groups if group.spec.keeps_all]
    if not split:
        return f"{report.context_parallel}, all with the same: no layer keeps all tokens"
    local = _count(split[0].block_size // report.context_parallel, "token")
    text = f"{report.context_parallel}, each with {local} of a block of full attention"
    text += "" if len(split) == len(report.config.groups) else ", all with the same of the others"
    return f"{text}; sizes below are of one rank"


def _budget_json(budget: Budget) -> dict[str, Any]:
    return {
        "gpu_bytes": budget.gpu_bytes,
        "utilization": float(budget.utilization),
        "weights_bytes": budget.weights_bytes,
        "num_parameters": budget.num_parameters,
    }


def _budget_line(budget: Budget, model: Model) -> str:
    whole, usable = format_memory(budget.gpu_bytes), format_memory(budget.usable_bytes)
    text = f"{budget.utilization} of {whole} is {usable}, less weights of "
    text += format_memory(budget.weights_bytes)
    if budget.num_parameters is not None:
        text += f" ({budget.num_parameters:,} parameters in {model.dtype})"
    return text


def _group_lines(config: KVCacheConfig) -> list[tuple[str, str]]:
    lines = []
    for spec, alike in groupby(config.groups, key=lambda group: group.spec):
        groups: list[KVCacheGroupSpec] = list(alike)
        num_layers = sum(len(group.layer_names) for group in groups)
        num_empty = len(groups) * config.num_slots - num_layers
        window = "" if spec.window is None else f" of {_count(spec.window, 'token')}"
        text = f"{spec.kind}{window}: {_count(num_layers, 'layer')}"
        if num_empty:
            text += f", {_count(num_empty, 'slot')} left empty"
        if isinstance(spec, StateSpec):
            share = 1 - spec.state_bytes / spec.page_bytes
            text += (
                f", {spec.state_bytes:,} bytes per state, {share:.1%} of its block lost to padding"
            )
            text += f", kept every {_count(spec.block_size, 'token')}"
        else:
            text += f", blocks of {_count(spec.block_size, 'token')}"
        lines.append((_count(len(groups), "group"), text))
    return lines


def _size_lines(report: SizeReport) -> list[tuple[str, str]]:
    config, limits = report.config, report.limits
    token = _count(report.token_bytes, "byte")
    if report.lasting_token_bytes != report.token_bytes:
        token += f", {report.lasting_token_bytes:,} once every window has passed it"
    if report.context_parallel > 1:
        token += ", on a rank that keeps all of it"
    page = config.groups[0].spec.page_bytes
    slots = _count(config.num_slots, "layer")
    blocks = _count(config.num_blocks, "block")
    if limits.null_block:
        blocks += (
            f", of which {usable_blocks(config, limits):,} hold tokens (one is the null block)"
        )
    length = _count(limits.max_model_len, "token")
    num_held = report.blocks_per_request
    held = f"{_count(num_held, 'block')}, {format_memory(num_held * config.block_bytes)}"
    lines = [
        ("a token", token),
        ("a block", f"{_count(config.block_bytes, 'byte')}: {slots} of {page:,}"),
        ("memory", f"{format_memory(report.memory_bytes)}: {blocks}"),
        *_token_lines(report),
        ("a request", f"{held}, for {length}{_steps(report)}"),
        *_hit_lines(report),
    ]
    lines += [("note", note) for note in report.notes]
    if report.fits:
        return [*lines, ("fits", f"{_count(report.num_full_requests, 'request')} of {length}")]
    needed = format_memory(request_bytes(config.groups, limits))
    longest = "not even one token would"
    if report.longest_model_len:
        longest = f"the longest that would has {_count(report.longest_model_len, 'token')}"
    return [*lines, ("too small", f"a request of {length} needs {needed}; {longest}")]


def _hit_lines(report: SizeReport) -> list[tuple[str, str]]:
    """Format the part of a request's blocks that holds its states, which does not depend on its
    length, and where hits end, if that is not simply a whole block.
    """
    config, limits = report.config, report.limits
    states = [group.spec for group in config.groups if isinstance(group.spec, StateSpec)]
    hits = f"end at multiples of {_count(report.hit_alignment, 'token')}"
    if config.hash_block_size is not None:
        hits += f", inside blocks too (hash_block_size={config.hash_block_size})"
    if not states:
        return [("hits", hits)] if config.hash_block_size is not None else []
    num_blocks = sum(spec.max_blocks(limits) for spec in states)
    held = f"{num_blocks:,} of these blocks, {format_memory(num_blocks * config.block_bytes)}"
    return [("its states", held), ("hits", f"{hits}, where a state was kept")]


def _token_lines(report: SizeReport) -> list[tuple[str, str]]:
    """Format how many tokens the pool holds; with windows, in requests of full length, if one
    fits.
    """
    num_tokens = num_cache_tokens(report.config, report.limits)
    groups = report.config.groups
    if len(groups) == 1 and groups[0].spec.keeps_all:
        return [("tokens", f"{num_tokens:,} in all blocks, which the requests share")]
    if not report.fits:
        return []
    length = _count(report.limits.max_model_len, "token")
    blocks = "all blocks" if len(groups) == 1 else "the blocks of all groups"
    return [("tokens", f"{num_tokens:,} if requests of {length} share {blocks}")]


def _steps(report: SizeReport) -> str:
    batched = report.limits.max_num_batched_tokens
    if batched is None or all(group.spec.window is None for group in report.config.groups):
        return ""
    return f", at most {batched:,} of them computed in one step"


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"
