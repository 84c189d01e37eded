# SPDX-License-Identifier: Apache-2.0
"""The adapter for SGLang 0.5.23: its compiled prefix tree, and the events that it publishes.

The tree is in the loop of `sglang_loop.py`. With a window, each page has a peer in a second pool,
found through a map as in its allocator.
"""

import array
import importlib
from typing import Any, ClassVar

from kvcore.sanitizer.chunks import CacheGroup
from kvcore.sanitizer.engines.sglang_loop import Loop, LoopAdapter, Request, tree_core

torch: Any = importlib.import_module("torch")
FULL, SWA = 0, 1  # its components: all layers, and those with a sliding window


class Engine(Loop):
    """The loop around the tree."""

    def __init__(self, world: Any) -> None:
        super().__init__(world)
        its, axes = tree_core(), world.axes
        self.its = its
        self.window = self.size * axes["window_pages"]
        self.tree = its.RustUnifiedTreeCoreBinding(
            its.TreeCoreInitParamsBinding(
                eviction_policy=axes["eviction_policy"], page_size=self.size, device="cpu",
                enable_kv_cache_events=True, swa_sliding_window_size=self.window or None,
            ),
            [FULL, SWA] if self.window else [FULL],
        )  # fmt: skip
        self.pages = list(range(world.num_blocks))
        self.peers = list(range(world.num_blocks))
        self.ends: dict[int, tuple[int, ...]] = {}
        self.reported: list[tuple[str, int, Any]] = []

    def step(self) -> None:
        super().step()
        if self.window and 2 * len(self.peers) < self.world.num_blocks:
            self.evict(SWA)

    def match(self, request: Request) -> bool:
        key = request.tokens[: len(request.tokens) - 1]
        found = self.tree.match_prefix(
            self.its.MatchParamsBinding(key=key, **self.named(request.tenant))
        )
        self.collect(found.cache_actions)
        request.computed = found.device_prefix_len
        self.adopt(request, found.last_device_node_id, request.computed)
        return True

    def grow(self, request: Request, length: int, batch: Any) -> bool:
        """Allocate slots up to a length; if necessary evict, then retract the newest request
        outside the batch.
        """
        while len(request.slots) < length:
            if not self.pages and not self.evict():
                if not self.make_room(request, batch):
                    return False
            elif self.pages:
                first = self.pages.pop() * self.size
                if self.window:
                    self.peer_of[first // self.size] = self.peers.pop()
                request.slots.extend(range(first, first + self.size))
        return True

    def evict(self, component: int = FULL) -> bool:
        """Free the least recently used leaves, or windows, at least one page."""
        tree, tracker, before = self.tree, {FULL: 0, SWA: 0}, len(self.pages)
        tree.evict_device_start(component, self.size)
        while tracker[component] < self.size:
            step = tree.evict_device_next_node(component, tracker)
            self.take_back(step, tracker)
            if step.node_id is None and not step.made_progress:
                break
            if step.node_id is not None:
                self.take_back(tree.evict_device_leaf(step.node_id), tracker)
        tree.evict_device_end(component)
        return len(self.pages) > before

    def take_back(self, step: Any, tracker: dict[int, int]) -> None:
        for component, count in step.tracker.items():
            tracker[component] += count
        for component, freed in step.new_device_frees.items():
            self.free_of(component, freed)
        self.collect(step.cache_actions)

    def free_of(self, component: int, freed: Any) -> None:
        """Take back the pages of these slots, or their peers alone."""
        for slots in freed:
            pages = [each // self.size for each in slots.tolist()[:: self.size]]
            if component == FULL:
                self.pages += pages
            else:
                self.peers += [self.peer_of.pop(each) for each in pages if each in self.peer_of]

    def insert(self, request: Request) -> None:
        """Publish the full pages, free the duplicates, and lock the path."""
        self.take_events(None)
        length = request.computed // self.size * self.size
        if length <= request.protected:
            return
        step = self.tree.begin_insert(
            self.its.InsertParamsBinding(
                key=request.tokens[:length], value=torch.tensor(request.slots[:length]),
                prev_prefix_len=request.protected, inserted_len=request.protected,
                **self.named(request.tenant),
            )
        )  # fmt: skip
        self.collect(step.actions)
        while step.result is None:
            step = self.tree.resume_insert()
            self.collect(step.actions)
        self.collect(self.tree.end_insert())
        self.take_events(request.tenant)
        self.adopt(request, step.result.last_device_node, length)

    def adopt(self, request: Request, node: Any, length: int) -> None:
        """Use the tree's own slots up to a length, and move the lock to its node."""
        if length > request.protected:
            kept = self.tree.collect_full_device_indices(node, self.tree.root_node_handle())
            request.slots[:length] = kept.tolist()
            self.gives(request)
        lock = self.tree.inc_lock_ref(node, [])
        self.unlock(request)
        request.lock, request.protected = lock, length

    def unlock(self, request: Request) -> None:
        lock, request.lock = request.lock, None
        if lock is not None:
            receipt = self.its.DecLockRefParamsBinding(
                node_id=lock.node_id,
                skipped_lock_components=lock.skipped_lock_components,
                component_lock_uuids=lock.component_lock_uuids,
                component_host_lock_uuids=lock.component_host_lock_uuids,
            )
            self.tree.dec_lock_ref(lock.node_id, receipt, False)

    def collect(self, actions: Any) -> None:
        for kind, *what in actions:
            if kind == "free_device_kv":
                self.free_of(SWA, what[0])
                self.free_of(FULL, what[0])
            elif kind == "free_device_kv_full_only":
                self.free_of(FULL, what[0])
            elif kind == "free_component_device_slot":
                self.free_of(int(what[0]), what[1])
            elif kind == "swa_rebuild":
                self.set_window(what[0], what[1], what[1])
            elif kind == "recover_swa_with_locked_full":
                self.set_window(*what)
                self.free_of(FULL, [what[2]])

    def set_window(self, node: Any, kept: Any, source: Any) -> None:
        """Give a node's pages the peers of others, or their own."""
        size, peers = self.size, []
        for page, other in zip(kept.tolist()[::size], source.tolist()[::size], strict=True):
            peers.append(self.peer_of.pop(other // size))
            self.peer_of[page // size] = peers[-1]
        slots = [peer * size + place for peer in peers for place in range(size)]
        self.tree.set_component_device_value(node, SWA, torch.tensor(slots))

    def give_back(self, slots: list[int]) -> None:
        self.free_of(SWA, [torch.tensor(slots)])
        self.free_of(FULL, [torch.tensor(slots)])

    def give_up(self, request: Request, keep: bool) -> None:
        """Publish and give up what a request holds."""
        del keep
        self.insert(request)
        self.give_back(request.slots[request.protected :])
        self.unlock(request)

    def events(self) -> list[tuple[str, int, Any]]:
        self.take_events(None)
        reported, self.reported = self.reported, []
        return reported

    def take_events(self, tenant: int | None) -> None:
        """Return each hash that was removed, or stored by a tenant, with all tokens up to
        its end.
        """
        for kind, hashes, *rest in self.tree.take_events():
            if kind == "block_stored":
                for place, each in enumerate(hashes):
                    first = self.ends.get(rest[0] if not place else hashes[place - 1], ())
                    tokens = rest[1][place * self.size : (place + 1) * self.size]
                    self.ends[each] = (*first, *tokens)
                    self.reported.append(("stored", each, (tenant, self.ends[each])))
            elif kind == "block_removed":
                self.reported += [("removed", each, None) for each in hashes]

    def hits(self, tenant: int, tokens: tuple[int, ...]) -> int:
        key = array.array("q", tokens)
        found = self.tree.match_full_device_prefix(
            self.its.MatchParamsBinding(key=key, **self.named(tenant))
        )
        return int(found[0])

    def free(self) -> int:
        free = len(self.pages) + int(self.tree.full_evictable_size()) // int(self.size)
        if self.window:
            kept = int(self.tree.component_evictable_size(SWA)) // int(self.size)
            free = min(free, len(self.peers) + kept)
        return free


class Adapter(LoopAdapter):
    NAME = "sglang 0.5.23"
    AXES: ClassVar[dict[str, tuple[Any, ...]]] = {
        "block_size": (1, 4, 2),
        "eviction_policy": ("lru", "lfu", "fifo", "mru", "filo"),
        "namespace": ("extra_key", "cache_salt"),
        "window_pages": (0, 1, 2),
    }
    MOVES = frozenset({"abort", "tenants"})
    Engine = Engine

    @classmethod
    def version(cls) -> str:
        found = super().version()
        tree_core()
        return found

    @staticmethod
    def groups(engine: Any) -> list[CacheGroup]:
        found = [CacheGroup(block_size=engine.size)]
        if engine.window:
            windowed = {"window": engine.window, "num_null": 1, "pool": 1}
            found.append(CacheGroup(block_size=engine.size, **windowed))
        return found
