# SPDX-License-Identifier: Apache-2.0
"""Replay the list's operations on SGLang 0.5.23's Rust tree core.

The bench calls the compiled tree through its bindings, in the order of SGLang's radix cache: match
and lock, insert after each chunk and at the end, free duplicates, move the lock. SGLang's own code
around the tree is left out, in its favour: pages come from a plain list, and a page's slots are
written when it is taken, so that a decoded token costs an append until its page is full.
"""

from __future__ import annotations

import array
from typing import Any

import torch

from benches.peers.replay import Maker
from benches.peers.sglang_core import bindings
from benches.peers.work import Decode, Work

FULL = 0  # the component of full attention


class Known:
    """A request: its tokens and slots, how many are used, and its lock in the tree."""

    __slots__ = ("computed", "filled", "lock", "protected", "slots", "tokens")

    def __init__(self, tokens: array.array[int], slots: torch.Tensor) -> None:
        self.tokens = tokens
        self.slots = slots
        self.filled = self.computed = self.protected = 0
        self.lock: Any = None


class Tree:
    """The tree and a pool of pages."""

    def __init__(self, work: Work) -> None:
        parameters = bindings.TreeCoreInitParamsBinding(
            eviction_policy="lru", page_size=work.block_size, device="cpu"
        )
        self.tree = bindings.RustUnifiedTreeCoreBinding(parameters, [FULL])
        self.page_size = work.block_size
        self.pages = list(range(work.num_blocks - 1, 0, -1))
        self.within = torch.arange(self.page_size)
        self.num_tokens_max = work.num_tokens_max
        self.requests: dict[int, Known] = {}
        self.hits: list[int] = []

    def add(self, request: int, prompt: Any) -> None:
        slots = torch.empty(self.num_tokens_max + self.page_size, dtype=torch.int64)
        self.requests[request] = Known(array.array("q", prompt), slots)

    def prefill(self, request: int, end: int) -> None:
        known = self.requests[request]
        if known.computed >= end:
            return
        if known.computed == 0:
            key = known.tokens[: len(known.tokens) - 1]
            match = self.tree.match_prefix(bindings.MatchParamsBinding(key=key))
            self.collect(match.cache_actions)
            num_hit = match.device_prefix_len
            self.hits.append(num_hit)
            self.adopt(known, match.last_device_node_id, num_hit)
            known.filled = num_hit
            end = max(end, num_hit + 1)
        self.grow(known, end)
        self.insert(known)

    def grow(self, known: Known, end: int) -> None:
        """Take slots up to `end`."""
        count = -(-(end - known.filled) // self.page_size)
        if count > 0:
            if count > len(self.pages):
                self.evict(count - len(self.pages))
            taken = self.pages[-count:]
            del self.pages[-count:]
            slots = (torch.tensor(taken)[:, None] * self.page_size + self.within).flatten()
            known.slots[known.filled : known.filled + len(slots)] = slots
            known.filled += len(slots)
        known.computed = end

    def evict(self, num_pages: int) -> None:
        """Make room for this many pages, least recently used leaves first."""
        tree, wanted = self.tree, len(self.pages) + num_pages
        tree.evict_device_start(FULL, num_pages * self.page_size)
        tracker = {FULL: 0}
        while len(self.pages) < wanted:
            step = tree.evict_device_next_node(FULL, tracker)
            self.settle(step, tracker)
            if step.node_id is None:
                if not step.made_progress:
                    raise RuntimeError("the pool has no room")
                continue
            self.settle(tree.evict_device_leaf(step.node_id), tracker)
        tree.evict_device_end(FULL)

    def settle(self, step: Any, tracker: dict[int, int]) -> None:
        """Take back what a step of eviction freed."""
        for component, count in step.tracker.items():
            tracker[component] += count
        for slots in step.new_device_frees.get(FULL, ()):
            self.give_back(slots)
        self.collect(step.cache_actions)

    def insert(self, known: Known) -> None:
        """Publish the full pages, free the doubles, and lock the path."""
        tree = self.tree
        length = known.computed // self.page_size * self.page_size
        if length <= known.protected:
            return
        parameters = bindings.InsertParamsBinding(
            key=known.tokens[:length],
            value=known.slots[:length].clone(),
            prev_prefix_len=known.protected,
            inserted_len=known.protected,
        )
        step = tree.begin_insert(parameters)
        self.collect(step.actions)
        while step.result is None:
            step = tree.resume_insert()
            self.collect(step.actions)
        self.collect(tree.end_insert())
        self.adopt(known, step.result.last_device_node, length)

    def adopt(self, known: Known, node: Any, length: int) -> None:
        """Use the tree's own slots up to `length` and move the lock onto its node."""
        tree = self.tree
        if length > known.protected:
            kept = tree.collect_full_device_indices(node, tree.root_node_handle())
            known.slots[known.protected : length] = kept[known.protected :]
        lock = tree.inc_lock_ref(node, [])
        self.unlock(known)
        known.lock, known.protected = lock, length

    def unlock(self, known: Known) -> None:
        """Give up the lock, if there is one."""
        lock = known.lock
        if lock is not None:
            receipt = bindings.DecLockRefParamsBinding(
                node_id=lock.node_id,
                skipped_lock_components=lock.skipped_lock_components,
                component_lock_uuids=lock.component_lock_uuids,
                component_host_lock_uuids=lock.component_host_lock_uuids,
            )
            self.tree.dec_lock_ref(lock.node_id, receipt, False)
            known.lock = None

    def collect(self, actions: Any) -> None:
        """Take back the slots that an action of the tree frees."""
        for action in actions:
            if action[0] in ("free_device_kv", "free_device_kv_full_only"):
                for slots in action[1]:
                    self.give_back(slots)

    def give_back(self, slots: torch.Tensor) -> None:
        """Free slots, which form whole pages."""
        self.pages.extend((slots[:: self.page_size] // self.page_size).tolist())

    def decode(self, decode: Decode) -> None:
        requests = self.requests
        for request, token in zip(decode.requests, decode.tokens, strict=True):
            known = requests[request]
            known.tokens.append(token)
            if known.computed == known.filled:
                self.grow(known, known.computed + 1)
            else:
                known.computed += 1

    def preempt(self, request: int) -> None:
        known = self.requests[request]
        self.insert(known)
        self.give_back(known.slots[known.protected : known.filled])
        self.unlock(known)
        known.filled = known.computed = known.protected = 0

    def finish(self, request: int) -> None:
        self.preempt(request)
        del self.requests[request]

    def end_step(self) -> None:
        pass


MAKERS = {"sglang": Maker(Tree)}
