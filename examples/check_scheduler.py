# SPDX-License-Identifier: Apache-2.0
"""A scheduler that is wrong: it admits a prompt chunk by chunk, as long as a block is free.

Two half-admitted prompts then hold the whole pool, and it preempts none: none of its moves ever
produces a token. The checker tries every order of its moves and shows the shortest way there.

    $ python examples/check_scheduler.py
    violation after 14 states
    DEADLOCK-FREE (progress) does not hold after 4 calls
      while the pool can hold some unfinished request, a call gives one of them a token, if need be
        after others were preempted
      no move of the scheduler ever produces a token, in a state with 1 free blocks and 'a' running,
        2 of 4 tokens; 'b' running, 2 of 4 tokens

    config num_blocks=4 block_size=2
    a slot reads as the tokens of the prefix that it holds; ? undefined, ~ rubbish, ! a load that
      failed; held by request[place in its table]
         block  held by  key  queue   slots hold
         1      -        -    free 1  -
         2      -        -    free 2  -
         3      -        -    free 3  -

     1 add_request a 1-4
         = row 0
         request  tokens  computed  blocks
         a        1-4     0         -
         (no block changes)

     2 add_request b 5-8
         = row 1
         request  tokens  computed  blocks
         a        1-4     0         -
       * b        5-8     0         -
         (no block changes)

     3 allocate_slots a 2
         = blocks 1
         ! Allocate 1
         ! SetTable row 0: 0=1
         request  tokens  computed  blocks
       * a        1-4     0 > 2     - > 1
         b        5-8     0         -
         block  held by   key        queue            slots hold
       * 1      - > a[0]  - > (1-2)  free 1 > -       -
       * 2      -         -          free 2 > free 1  -
       * 3      -         -          free 3 > free 2  -

       take_batch
         = batch 2: 2 commands, 1 segments
         block  held by  key    queue   slots hold
       * 1      a[0]     (1-2)  -       - > 1 | 1-2
         2      -        -      free 1  -
         3      -        -      free 2  -

     4 allocate_slots b 2
         = blocks 2
         ! Allocate 2
         ! SetTable row 1: 0=2
         request  tokens  computed  blocks
         a        1-4     2         1
       * b        5-8     0 > 2     - > 2
         block  held by   key        queue            slots hold
         1      a[0]      (1-2)      -                1 | 1-2
       * 2      - > b[0]  - > (5-6)  free 1 > -       -
       * 3      -         -          free 2 > free 1  -

       take_batch
         = batch 3: 2 commands, 1 segments
         block  held by  key    queue   slots hold
         1      a[0]     (1-2)  -       1 | 1-2
       * 2      b[0]     (5-6)  -       - > 5 | 5-6
         3      -        -      free 1  -
"""

from collections.abc import Iterator

from kvcore import Config, Request, State
from kvcore.check.extend.policies import check_scheduler
from kvcore.check.stories.story import render
from kvcore.check.world.world import World
from kvcore.trace.calls import Call

CHUNK, LENGTH = 2, 5
PROMPTS = {"a": [1, 2, 3, 4], "b": [5, 6, 7, 8]}


def moves(_: World, state: State) -> Iterator[Call]:
    """Return what may happen next: an arrival, a chunk, a token, or the end of a request."""
    for name, prompt in PROMPTS.items():
        if name not in state.requests:
            yield Call("add_request", (Request(name, prompt),))
    for name, request in sorted(state.requests.items()):
        left = len(request.tokens) - request.num_computed
        if left:
            yield Call("allocate_slots", (name, min(CHUNK, left)))
        elif len(request.tokens) < LENGTH:
            yield Call("append", ([name], [9]))
        else:
            yield Call("free", (name,))
        if not request.num_computed and len(request.tokens) == LENGTH:
            yield Call("remove_request", (name,))


world = World(config=Config(4, 2), num_requests=2, num_tokens=LENGTH, num_prompt=4, moves=moves)
report = check_scheduler(moves, world)
print(f"{report.verdict} after {report.num_states} states")
if report.violation is not None:
    print(render(report.violation, world, colour=False, width=96), end="")
