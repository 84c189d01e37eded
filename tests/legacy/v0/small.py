# SPDX-License-Identifier: Apache-2.0
"""V0's allocators and managers for tests: small ones, and all that one of them holds as bytes."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from collections.abc import Set as AbstractSet
from types import FunctionType, MethodType
from typing import Any

from kvcore.legacy.blocks.blocks import Backing
from kvcore.legacy.v0.block_manager import BlockSpaceManager
from kvcore.legacy.v0.cpu_gpu_block_allocator import CpuGpuBlockAllocator
from kvcore.legacy.v0.prefix_caching_block import Block, PrefixCachingBlockAllocator
from kvcore.legacy.v0.sequences import Sequence, SequenceGroup, SequenceStatus
from tests.conftest import Backend

SIZE = 2


def allocator(backend: Backend, num_blocks: int = 4, **options: Any) -> PrefixCachingBlockAllocator:
    """Return a prefix-caching allocator of blocks of two tokens."""
    return PrefixCachingBlockAllocator(num_blocks, SIZE, backend=backend, **options)


def two_tiers(
    backend: Backend, num_gpu: int = 4, num_cpu: int = 4, kind: str = "prefix_caching"
) -> CpuGpuBlockAllocator:
    """Return an allocator of both tiers."""
    return CpuGpuBlockAllocator.create(kind, num_gpu, num_cpu, SIZE, backend=backend)


def manager(
    backend: Backend, num_gpu: int = 8, num_cpu: int = 8, **options: Any
) -> BlockSpaceManager:
    """Return a manager of blocks of two tokens, without watermark."""
    return BlockSpaceManager(
        SIZE, num_gpu, num_cpu, **{"watermark": 0.0, **options}, backend=backend
    )


def admit(manager: BlockSpaceManager, *seqs: Sequence) -> SequenceGroup:
    """Return a group that was allocated and runs."""
    group = SequenceGroup(f"request {seqs[0].seq_id}", seqs)
    manager.allocate(group)
    for seq in seqs:
        seq.status = SequenceStatus.RUNNING
    return group


def full(*numbers: int) -> list[list[int]]:
    """Make tokens of full blocks, each of one number."""
    return [[number] * SIZE for number in numbers]


def ids(blocks: list[Block]) -> list[int | None]:
    """Return the ids of blocks."""
    return [block.block_id for block in blocks]


def use_up(allocator: PrefixCachingBlockAllocator) -> list[int | None]:
    """Take every free block as a mutable one: their ids, in the order in which they left."""
    count = allocator.get_num_free_blocks()
    return [allocator.allocate_mutable_block(None).block_id for _ in range(count)]


def snapshot(*roots: object) -> bytes:
    """Return everything that objects and their blocks hold, as bytes that differ if they do."""
    seen: dict[int, int] = {}
    kept: list[object] = []  # so that no id comes twice

    def tell(value: object) -> str:
        if value is None or isinstance(value, int | float | str | bytes | enum.Enum):
            return repr(value)
        if isinstance(value, Backing):
            return repr(value.state())
        if isinstance(value, FunctionType | MethodType | type):
            return "code"
        if id(value) in seen:
            return f"<{seen[id(value)]}>"
        seen[id(value)] = len(seen)
        kept.append(value)
        if isinstance(value, Mapping):
            return "{" + ", ".join(f"{tell(key)}: {tell(its)}" for key, its in value.items()) + "}"
        if isinstance(value, AbstractSet):
            return "{" + ", ".join(sorted(tell(each) for each in value)) + "}"
        if isinstance(value, list | tuple | range):
            return "[" + ", ".join(tell(each) for each in value) + "]"
        return f"{type(value).__name__}({tell(_fields(value))})"

    return "\n".join(tell(root) for root in roots).encode()


def _fields(value: object) -> dict[str, object]:
    slots = [name for kind in type(value).__mro__ for name in getattr(kind, "__slots__", ())]
    named = {name: getattr(value, name) for name in slots if hasattr(value, name)}
    return {**named, **getattr(value, "__dict__", {})}


def unchanged(
    call: Callable[..., object], *roots: object, given: tuple[Any, ...] = ()
) -> BaseException:
    """Return the error that a call raises, having left all these as they were, byte for byte.

    given: what it is called with.
    """
    before = snapshot(*roots)
    try:
        call(*given)
    except Exception as error:
        assert snapshot(*roots) == before
        return error
    raise AssertionError("the call raised nothing")
