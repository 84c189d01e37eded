# SPDX-License-Identifier: Apache-2.0
"""Five stories through five managers: vLLM's of 0.3, of V0, V1 at first and in 0.8.5, and kvcore's.

Each class below drives one manager by its own calls, as its engines did; `main` tells the stories.
Blocks have 4 tokens, and each pool has 8 besides the null block; the host's blocks have an h.
docs/generations.md explains what they show.

    $ python examples/generations.py
    fork: a has 6 tokens and a child b; each of them gets a token, b first
      0.3       b recomputes 0, copies 6>5; a 7 6; b 7 5; 5 free
      V0        b recomputes 0, copies 1>2; a 0 1; b 0 2; 5 free
      early V1  b recomputes 2, copies nothing; a 0 1; b 0 2; 5 free
      V1 0.8.5  b recomputes 2, copies nothing; a 1 2; b 1 3; 5 free
      kvcore    b recomputes 0, copies 2>3; a 1 2; b 1 3; 5 free
    swap: a's 6 tokens give way to a prompt of all blocks, and come back
      0.3       out: copies 7>h7 6>h6; back: recomputes 0, copies h7>6 h6>7; a 6 7; 6 free
      V0        out: copies 0>h0 1>h1; back: recomputes 0, copies h0>0 h1>7; a 0 7; 6 free
      early V1  out: copies nothing; back: recomputes 6, copies nothing; a 0 1; 6 free
      V1 0.8.5  out: copies nothing; back: recomputes 6, copies nothing; a 1 2; 6 free
      kvcore    out: copies 1>h0 2>h1; back: recomputes 0, copies h0>1 h1>2; a 1 2; 6 free
    window: a sees 8 tokens and is 21 tokens long
      0.3       holds 2; a 7 6 7 6 7 6; 6 free
      V0        holds 6; a 2 1 3 4 5 0; 2 free
      early V1  holds 6; a 0 1 2 3 4 5; 2 free
      V1 0.8.5  holds 3; a 0 0 0 4 5 6; 5 free
      kvcore    holds 3; a 0 0 0 4 5 6; 5 free
    prefix: a and b begin with the same 8 tokens
      0.3       b computes 1 of 9; a 7 6 5; b 7 6 4; 4 free
      V0        b computes 1 of 9; a 0 1 2; b 0 1 3; 4 free
      early V1  b computes 1 of 9; a 0 1 2; b 0 1 3; 4 free
      V1 0.8.5  b computes 1 of 9; a 1 2 3; b 1 2 4; 4 free
      kvcore    b computes 1 of 9; a 1 2 3; b 1 2 4; 4 free
    again: a and b are freed, then c comes, which is these 8 tokens
      0.3       6 free before; c computes 0 of 8; c 7 6; 6 free
      V0        8 free before; c computes 0 of 8; c 0 1; 6 free
      early V1  8 free before; c computes 4 of 8; c 0 4; 6 free
      V1 0.8.5  8 free before; c computes 4 of 8; c 1 5; 6 free
      kvcore    8 free before; c computes 4 of 8; c 1 5; 6 free
"""

from types import SimpleNamespace
from typing import Any

from kvcore import Config, Group, KVCacheManager, Request
from kvcore.legacy.v0 import block_manager, sequences
from kvcore.legacy.v0_3 import block_space_manager
from kvcore.legacy.v1_0_8 import kv_cache_interface as sizes
from kvcore.legacy.v1_0_8 import kv_cache_manager
from kvcore.legacy.v1_first import kv_cache_manager as early_v1
from kvcore.types.commands import Batch, CopyOnWrite, SwapIn, SwapOut

SIZE, NUM_BLOCKS, WINDOW = 4, 8, 8
BACKEND: Any = KVCacheManager(Config(num_blocks=2)).backend  # the twin if it is compiled
Tokens = list[int]


class Driven:
    """A manager whose commands are taken at the end of each step."""

    manager: Any

    def end_step(self) -> Batch:
        return self.manager.take_batch()


class V03(Driven):
    """`BlockSpaceManager` of 0.3. A shared prefix is an object that the engine makes."""

    name = "0.3"

    def __init__(self, window: int | None) -> None:
        self.kinds: Any = block_space_manager
        self.manager: Any = block_space_manager.BlockSpaceManager(
            *(SIZE, NUM_BLOCKS, NUM_BLOCKS, 0.0, window), backend=BACKEND
        )
        self.prefixes = block_space_manager.PrefixPool(SIZE)
        self.groups: dict[str, Any] = {}
        self.seqs: dict[str, Any] = {}

    def admit(self, name: str, tokens: Tokens, num_shared: int = 0) -> int:
        """Give a prompt blocks and compute it; returns the number of tokens found in the cache."""
        prefix = self.prefixes.add_or_get_prefix(tokens[:num_shared])
        seq = self.kinds.Sequence(len(self.seqs), "", tokens, SIZE)
        self.seqs[name] = seq
        self.groups[name] = self.kinds.SequenceGroup(name, [seq], prefix=prefix)
        known = prefix.get_length() if prefix and prefix.computed else 0
        self.manager.allocate(self.groups[name])
        seq.status = self.kinds.SequenceStatus.RUNNING
        if prefix:
            prefix.computed = True
        return known

    def append(self, name: str, token: int) -> None:
        self.seqs[name].append_token_id(token)
        self.manager.append_slot(self.seqs[name])

    def fork(self, name: str, child: str) -> int:
        """Let a child continue from here; returns the number of tokens that it need not compute."""
        self.seqs[child] = self.seqs[name].fork(len(self.seqs))
        self.manager.fork(self.seqs[name], self.seqs[child])
        return len(self.seqs[child].get_token_ids())

    def leave(self, name: str) -> None:
        """Preempt a request."""
        self.manager.swap_out(self.groups[name])
        self.seqs[name].status = self.kinds.SequenceStatus.SWAPPED

    def back(self, name: str) -> int:
        """Resume a request; returns the number of tokens that need not be computed again."""
        self.manager.swap_in(self.groups[name])
        self.seqs[name].status = self.kinds.SequenceStatus.RUNNING
        return len(self.seqs[name].get_token_ids())

    def free(self, name: str) -> None:
        self.manager.free(self.seqs[name])

    def table(self, name: str) -> Tokens:
        return list(self.manager.get_block_table(self.seqs[name]))

    def num_free(self) -> int:
        return int(self.manager.get_num_free_gpu_blocks())


class V0(V03):
    """V0's manager with prefix caching. A block is hit once the engine marked it as computed."""

    name = "V0"

    def __init__(self, window: int | None) -> None:
        self.kinds = sequences
        self.manager = block_manager.SelfAttnBlockSpaceManager(
            *(SIZE, NUM_BLOCKS, NUM_BLOCKS, 0.0, window, window is None), backend=BACKEND
        )
        self.groups, self.seqs = {}, {}

    def admit(self, name: str, tokens: Tokens, _num_shared: int = 0) -> int:
        seq = self.kinds.Sequence(len(self.seqs), tokens)
        self.seqs[name], self.groups[name] = seq, self.kinds.SequenceGroup(name, [seq])
        known = self.manager.get_num_cached_tokens(seq)
        self.manager.allocate(self.groups[name])
        seq.status = self.kinds.SequenceStatus.RUNNING
        seq.data.num_computed_tokens = len(tokens)
        return int(known)

    def append(self, name: str, token: int) -> None:
        self.seqs[name].append_token_id(token)
        self.manager.append_slots(self.seqs[name], 0)
        self.seqs[name].data.num_computed_tokens += 1

    def end_step(self) -> Batch:
        for group in self.groups.values():
            self.manager.mark_blocks_as_computed(group, 0)
        return super().end_step()


class EarlyV1(Driven):
    """V1 at first, without forks and swaps: content that returns is found or computed again."""

    name = "early V1"

    def __init__(self, window: int | None) -> None:
        self.requests: dict[str, Any] = {}
        self.manager: Any = early_v1.KVCacheManager(
            SIZE, NUM_BLOCKS, window, num_preallocate_tokens=0, backend=BACKEND
        )

    def admit(self, name: str, tokens: Tokens, _num_shared: int = 0) -> int:
        self.requests[name] = request = SimpleNamespace(
            request_id=name,
            all_token_ids=list(tokens),
            num_tokens=len(tokens),
            num_computed_tokens=0,
            mm_positions=[],
            lora_request=None,
        )
        hits = self.look_up(request)
        known = len(hits) * SIZE
        self.manager.allocate_slots(request, len(tokens) - known, hits)
        request.num_computed_tokens = len(tokens)
        return known

    def look_up(self, request: Any) -> list[Any]:
        hits = self.manager.get_computed_blocks(request)
        return hits[: (request.num_tokens - 1) // SIZE]  # a token must be left to compute

    def append(self, name: str, token: int) -> None:
        request = self.requests[name]
        request.all_token_ids.append(token)
        request.num_tokens += 1
        self.give_slot(request)
        request.num_computed_tokens += 1

    def give_slot(self, request: Any) -> None:
        self.manager.append_slots(request, 1)

    def fork(self, name: str, child: str) -> int:
        return self.admit(child, self.requests[name].all_token_ids)

    def leave(self, name: str) -> None:
        self.manager.free(self.requests[name])

    def back(self, name: str) -> int:
        return self.admit(name, self.requests[name].all_token_ids)

    def free(self, name: str) -> None:
        self.manager.free(self.requests[name])

    def table(self, name: str) -> Tokens:
        return [block.block_id for block in self.manager.req_to_blocks[name]]

    def num_free(self) -> int:
        return int(self.manager.free_block_queue.num_free_blocks)


class V1(EarlyV1):
    """V1 of 0.8.5: one call for all slots, and a null block for what a window has passed."""

    name = "V1 0.8.5"

    def __init__(self, window: int | None) -> None:
        self.requests = {}
        shape = (SIZE, 1, 64, "float16")
        spec: Any = sizes.FullAttentionSpec(*shape)
        if window is not None:
            spec = sizes.SlidingWindowSpec(*shape, sliding_window=window)
        groups = [sizes.KVCacheGroupSpec(["layer"], spec)]
        config = sizes.KVCacheConfig(1 + NUM_BLOCKS, {}, groups)
        self.manager = kv_cache_manager.KVCacheManager(config, max_model_len=32, backend=BACKEND)

    def look_up(self, request: Any) -> list[Any]:
        return self.manager.get_computed_blocks(request)[0]

    def give_slot(self, request: Any) -> None:
        self.manager.allocate_slots(request, 1)

    def num_free(self) -> int:
        return int(self.manager.block_pool.get_num_free_blocks())


class Kvcore(Driven):
    """kvcore: V1's look-ups and windows, and the forks and swaps of the managers before it."""

    name = "kvcore"

    def __init__(self, window: int | None) -> None:
        group = Group(
            SIZE, kind="full_attention" if window is None else "sliding_window", window=window
        )
        self.manager = KVCacheManager(
            Config(1 + NUM_BLOCKS, groups=(group,), num_host_blocks=NUM_BLOCKS, max_model_len=32)
        )

    def admit(self, name: str, tokens: Tokens, _num_shared: int = 0) -> int:
        self.manager.add_request(Request(name, tokens))
        hit = self.manager.get_computed_blocks(name)
        self.manager.allocate_slots(name, len(tokens) - hit.num_tokens, hit)
        return hit.num_tokens

    def append(self, name: str, token: int) -> None:
        self.manager.append([name], [token])

    def fork(self, name: str, child: str) -> int:
        self.manager.fork(name, child)
        return self.manager.num_computed_tokens(child)

    def leave(self, name: str) -> None:
        self.manager.swap_out([name])

    def back(self, name: str) -> int:
        self.manager.swap_in([name])
        return self.manager.num_computed_tokens(name)

    def free(self, name: str) -> None:
        self.manager.free(name)

    def table(self, name: str) -> Tokens:
        return self.manager.get_block_ids(name)[0]

    def num_free(self) -> int:
        return self.manager.num_free_blocks


def copies(batch: Batch) -> str:
    """Return the copies in a batch as text."""
    found = []
    for command in batch:
        match command:
            case CopyOnWrite(source=source, target=target):
                found.append(f"{source}>{target}")
            case SwapOut(block=block, host_block=host_block):
                found.append(f"{block}>h{host_block}")
            case SwapIn(host_block=host_block, block=block):
                found.append(f"h{host_block}>{block}")
    return f"copies {' '.join(found)}" if found else "copies nothing"


def show(manager: Any, said: str, names: str) -> None:
    """Print what was said, the tables of some requests, and the free blocks."""
    tables = [f"{name} {' '.join(map(str, manager.table(name)))}" for name in names]
    print(f"  {manager.name:9}", "; ".join([said, *tables, f"{manager.num_free()} free"]))


def fork(manager: Any) -> None:
    manager.admit("a", [*range(6)])
    manager.end_step()
    known = manager.fork("a", "b")
    manager.append("b", 60)
    manager.append("a", 61)
    show(manager, f"b recomputes {6 - known}, {copies(manager.end_step())}", "ab")


def swap(manager: Any) -> None:
    manager.admit("a", [*range(6)])
    manager.end_step()
    manager.leave("a")
    out = copies(manager.end_step())
    manager.admit("c", [*range(100, 132)])  # takes all blocks
    manager.end_step()
    manager.free("c")
    known = manager.back("a")
    back = f"recomputes {6 - known}, {copies(manager.end_step())}"
    show(manager, f"out: {out}; back: {back}", "a")


def window(manager: Any) -> None:
    manager.admit("a", [*range(8)])
    manager.end_step()
    for token in range(8, 21):
        manager.append("a", token)
        manager.end_step()
    show(manager, f"holds {NUM_BLOCKS - manager.num_free()}", "a")


def prefix(manager: Any) -> None:
    manager.admit("a", [*range(8), 80], 8)
    manager.end_step()
    known = manager.admit("b", [*range(8), 90], 8)
    manager.end_step()
    show(manager, f"b computes {9 - known} of 9", "ab")


def again(manager: Any) -> None:
    for name in "ab":
        manager.admit(name, [*range(8), ord(name)], 8)
        manager.end_step()
    for name in "ab":
        manager.free(name)
    left = manager.num_free()
    known = manager.admit("c", [*range(8)], 8)
    show(manager, f"{left} free before; c computes {8 - known} of 8", "c")


STORIES = (
    (fork, None, "a has 6 tokens and a child b; each of them gets a token, b first"),
    (swap, None, "a's 6 tokens give way to a prompt of all blocks, and come back"),
    (window, WINDOW, "a sees 8 tokens and is 21 tokens long"),
    (prefix, None, "a and b begin with the same 8 tokens"),
    (again, None, "a and b are freed, then c comes, which is these 8 tokens"),
)


def main() -> None:
    for story, size, title in STORIES:
        print(f"{story.__name__}: {title}")
        for kind in (V03, V0, EarlyV1, V1, Kvcore):
            story(kind(size))


if __name__ == "__main__":
    main()
