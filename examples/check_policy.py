# SPDX-License-Identifier: Apache-2.0
"""A wrong eviction policy: a freed block joins at the front, so the last one freed leaves first.

Nothing breaks; it only costs hits. A request frees its tail first, so its head is evicted before
the blocks that are found through it.

    $ python examples/check_policy.py
    LRU: complete
    Stack: violation after 18 states
    EVICT-ORDER (quality) does not hold after 3 calls
      a free cached block is evicted before at least one copy of its parent
      block 2 stays longer than every copy of its parent

    config num_blocks=4 block_size=2
    a slot reads as the tokens of the prefix that it holds; ? undefined, ~ rubbish, ! a load that
      failed; held by request[place in its table]
         block  held by  key  queue   slots hold
         1      -        -    free 1  -
         2      -        -    free 2  -
         3      -        -    free 3  -

     1 add_request r0 0,0,0,0
         = row 0
         request  tokens   computed  blocks
         r0       0,0,0,0  0         -
         (no block changes)

     2 allocate_slots r0 4
         = blocks 1 2
         ! Allocate 1 2
         ! SetTable row 0: 0=1 1=2
         request  tokens   computed  blocks
       * r0       0,0,0,0  0 > 4     - > 1 2
         block  held by    key            queue            slots hold
       * 1      - > r0[0]  - > (0,0)      free 1 > -       -
       * 2      - > r0[1]  - > (0,0,0,0)  free 2 > -       -
       * 3      -          -              free 3 > free 1  -

       take_batch
         = batch 1: 4 commands, 1 segments
         block  held by  key        queue   slots hold
       * 1      r0[0]    (0,0)      -       - > 0 | 0,0
       * 2      r0[1]    (0,0,0,0)  -       - > 0,0,0 | 0,0,0,0
         3      -        -          free 1  -

     3 free r0
         ! Free cached 2 1
         ! CutTable row 0: 0
         request  tokens   computed  blocks
       * r0       0,0,0,0  4 > 0     1 2 > -
         block  held by    key        queue            slots hold
       * 1      r0[0] > -  (0,0)      - > free 1       0 | 0,0
       * 2      r0[1] > -  (0,0,0,0)  - > free 2       0,0,0 | 0,0,0,0
       * 3      -          -          free 1 > free 3  -
"""

from collections.abc import Sequence

from kvcore import Config
from kvcore.check.extend.policies import LRU, FreeBlock, check_policy
from kvcore.check.stories.story import render
from kvcore.check.world.world import World


class Stack:
    """Freed last, evicted first."""

    def join(self, _queue: Sequence[FreeBlock], _block: FreeBlock) -> int:
        return 0

    def leave(self, _queue: Sequence[FreeBlock]) -> int:
        return 0


world = World(config=Config(4, 2), num_requests=1, num_tokens=4, num_prompt=4)
print(f"LRU: {check_policy(LRU(), world).verdict}")
report = check_policy(Stack(), world)
print(f"Stack: {report.verdict} after {report.num_states} states")
if report.violation is not None:
    print(render(report.violation, world, colour=False, width=96), end="")
