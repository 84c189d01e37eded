# SPDX-License-Identifier: Apache-2.0
"""A small manager with a wrong prefix cache: a reused block keeps its old entry in the index.

So a prompt hits what another request has written there since. The manager has the names of
`KVCacheManager`'s methods, so the checker drives it as an engine would, follows what memory really
holds, and shows the shortest run in which a query reads another prefix.

    $ python examples/check_manager.py
    violation after 4006 states
    KV-READ (wrong KV) does not hold after 9 calls
      what a query sees is read from slots that hold its own prefix, in every group
      r1 reads block 0 slot 0: it holds 0-1,0, not 0

    config num_blocks=2 block_size=2 null_block=no
    a slot reads as the tokens of the prefix that it holds; ? undefined, ~ rubbish, ! a load that
      failed; held by request[place in its table]
         block  held by  slots hold
         0      -        -
         1      -        -

     1 add_request r0 0,0
         request  tokens  computed  blocks
         r0       0,0     0         -
         (no block changes)

     2 allocate_slots r0 2
         = [0]
         request  tokens  computed  blocks
       * r0       0,0     0 > 2     - > 0
         block  held by    slots hold
       * 0      - > r0[0]  -
         1      -          -

       take_batch
         block  held by  slots hold
       * 0      r0[0]    - > 0 | 0,0
         1      -        -

     3 free r0
         request  tokens  computed  blocks
       * r0       0,0     2 > 0     0 > -
         block  held by    slots hold
       * 0      r0[0] > -  0 | 0,0
         1      -          -

     4 add_request r1 0-1,0
         request  tokens  computed  blocks
         r0       0,0     0         -
       * r1       0-1,0   0         -
         (no block changes)

     5 allocate_slots r1 3
         = [1, 0]
         request  tokens  computed  blocks
         r0       0,0     0         -
       * r1       0-1,0   0 > 3     - > 1 0
         block  held by    slots hold
       * 0      - > r1[1]  0 | 0,0
       * 1      - > r1[0]  -

       take_batch
         block  held by  slots hold
       * 0      r1[1]    0 | 0,0 > 0-1,0 | 0,0
       * 1      r1[0]    - > 0 | 0-1

     6 free r1
         request  tokens  computed  blocks
         r0       0,0     0         -
       * r1       0-1,0   3 > 0     1 0 > -
         block  held by    slots hold
       * 0      r1[1] > -  0-1,0 | 0,0
       * 1      r1[0] > -  0 | 0-1

     7 remove_request r1
         request  tokens  computed  blocks
         r0       0,0     0         -
       * r1       (gone)
         (no block changes)

     8 add_request r1 0,0,0
         request  tokens  computed  blocks
         r0       0,0     0         -
       * r1       0,0,0   0         -
         (no block changes)

       get_computed_blocks r1
         = hit 0, 2 tokens
     9 allocate_slots r1 1 hit
         = [0, 1]
         request  tokens  computed  blocks
         r0       0,0     0         -
       * r1       0,0,0   0 > 3     - > 0 1
         block  held by    slots hold
       * 0      - > r1[0]  0-1,0 | 0,0
       * 1      - > r1[1]  0 | 0-1

       take_batch
         block  held by  slots hold
         0      r1[0]    0-1,0 | 0,0
       * 1      r1[1]    0 | 0-1 > 0,0,0 | 0-1
"""

from typing import Any

from kvcore import Config, Hit, KVCacheBlocks, Request
from kvcore.check.extend.manager_model import ManagerModel
from kvcore.check.search.search import check
from kvcore.check.stories.story import render

NUM_BLOCKS, SIZE = 2, 2


class SmallManager:
    """One list of free blocks, reference counts, and a dictionary from prefix to block."""

    def __init__(self) -> None:
        self.free_blocks = list(range(NUM_BLOCKS))
        self.owners = [0] * NUM_BLOCKS
        self.found: dict[tuple[int, ...], int] = {}
        self.tokens: dict[str, list[int]] = {}
        self.tables: dict[str, list[int]] = {}

    @property
    def num_free_blocks(self) -> int:
        return len(self.free_blocks)

    def add_request(self, request: Request) -> None:
        self.tokens[request.request_id] = list(request.tokens)
        self.tables[request.request_id] = []

    def remove_request(self, request_id: str) -> None:
        del self.tokens[request_id], self.tables[request_id]

    def get_computed_blocks(self, request_id: str) -> Hit:
        tokens, blocks = self.tokens[request_id], []
        for end in range(SIZE, len(tokens), SIZE):
            if tuple(tokens[:end]) not in self.found:
                break
            blocks.append(self.found[tuple(tokens[:end])])
        return Hit(KVCacheBlocks((tuple(blocks),)), SIZE * len(blocks))

    def allocate_slots(self, request_id: str, count: int, hit: Hit | None = None) -> Any:
        hits = hit.blocks.blocks[0] if hit else ()
        needed = -(-count // SIZE)
        if needed + sum(self.owners[block] == 0 for block in hits) > len(self.free_blocks):
            return None
        self.tables[request_id] = [self.own(block) for block in hits]
        return self.grow(request_id, needed)

    def append(self, request_ids: list[str], tokens: list[int]) -> Any:
        (request_id,), table = request_ids, self.tables[request_ids[0]]
        grown = len(self.tokens[request_id]) == SIZE * len(table)
        if grown and not self.free_blocks:
            return None
        self.tokens[request_id] += tokens
        return self.grow(request_id, int(grown))

    def grow(self, request_id: str, count: int) -> list[int]:
        tokens, table = self.tokens[request_id], self.tables[request_id]
        table += [self.own(self.free_blocks[0]) for _ in range(count)]
        for position in range(len(tokens) // SIZE):
            self.found.setdefault(tuple(tokens[: SIZE * (position + 1)]), table[position])
        return table

    def own(self, block: int) -> int:
        if self.owners[block] == 0:
            self.free_blocks.remove(block)  # its old entry in self.found should go, too
        self.owners[block] += 1
        return block

    def free(self, request_id: str) -> None:
        for block in reversed(self.tables[request_id]):
            self.owners[block] -= 1
            if self.owners[block] == 0:
                self.free_blocks.append(block)
        self.tables[request_id] = []

    def get_block_ids(self, request_id: str) -> tuple[list[int]]:
        return (self.tables[request_id],)

    def take_batch(self) -> list[Any]:
        return []


config = Config(NUM_BLOCKS, SIZE, null_block=False)
model = ManagerModel(SmallManager, config, num_requests=2, num_tokens=3)
report = check(model, max_depth=6)
print(f"{report.verdict} after {report.num_states} states")
if report.violation is not None:
    print(render(report.violation, model, colour=False, width=96), end="")
