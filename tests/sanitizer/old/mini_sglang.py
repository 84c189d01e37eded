# SPDX-License-Identifier: Apache-2.0
"""The adapter of mini-sglang for its older commits, from the checkout named by KVCORE_MINI_SGLANG.

There are two layouts. In the first, of 2025, a page is one token, pages are allocated by number,
and nothing can be aborted. In the second, pages are allocated by request.
"""

from __future__ import annotations

import importlib
import sys
import types
from typing import Any, ClassVar

from kvcore.sanitizer.engines import mini_sglang
from kvcore.sanitizer.hunter.driven import Silent
from tests.sanitizer.old.versions import head

PAGED = head("mini-sglang") in ("fa1e139", "dae78f6")


class Engine(mini_sglang.Engine):
    """The Scheduler of those commits, with the methods by which the newer one is followed."""

    def __init__(self, world: Any) -> None:
        tokenizer = types.SimpleNamespace(from_pretrained=Silent)
        tokenizers: Any = types.SimpleNamespace(AutoTokenizer=tokenizer)
        sys.modules.setdefault("transformers", tokenizers)
        super().__init__(world)
        self.target.engine.dummy_page = 0
        if not PAGED:
            self.rename()

    def rename(self) -> None:
        """Call the newer Scheduler's methods where the older one has no methods."""
        it, rows = self.target, dict[int, Any]()
        prepare, free = it._prepare_batch, it.table_manager.free

        def prepared(batch: Any) -> Any:
            inputs = prepare(batch)
            rows.update((req.table_idx, req) for req in batch.reqs)
            it.cache_manager.allocate_paged(batch.reqs)
            return inputs

        def freed(row: int) -> None:
            free(row)
            it._free_req_resources(rows.pop(row))

        it.cache_manager.page_size, it.cache_manager.allocate_paged = 1, lambda _: None
        it._free_req_resources = lambda _: None
        it._prepare_batch, it.table_manager.free = prepared, freed
        requests: Any = importlib.import_module("minisgl.core").Req
        if not hasattr(requests, "__dataclass_fields__"):
            requests.input_ids = property(lambda req: req.host_ids)

    def reply(self, replies: Any) -> None:
        super().reply(getattr(replies, "data", replies))


class Adapter(mini_sglang.Adapter):
    NAME = f"mini-sglang {head('mini-sglang')}"
    AXES: ClassVar[dict[str, tuple[Any, ...]]] = {
        **mini_sglang.Adapter.AXES,
        "block_size": mini_sglang.Adapter.AXES["block_size"] if PAGED else (1,),
    }
    MOVES = frozenset({"abort"} if PAGED else ())
    Engine = Engine

    @staticmethod
    def version() -> str:
        return head("mini-sglang")
