# SPDX-License-Identifier: Apache-2.0
"""A model of full-attention and sliding-window layers, as two groups over one pool.

The window's group holds only what the next query sees, so a long answer costs it nothing; a block
that it gave back can still be hit until it is taken for other content. A prompt resumes where both
groups have what its next token needs.

    $ python examples/hybrid_groups.py
    tokens   full  window   free
         8      2       2     18
        16      4       2     16
        32      8       2     12
        64     16       2      4
    sharing 64 tokens: resumes at 64
    sharing 48 tokens: resumes at 48
    sharing 32 tokens: resumes at 0
"""

from kvcore import Config, Group, KVCacheManager, Request

BLOCK_SIZE, WINDOW, LENGTH = 4, 8, 64
SHOWN = (8, 16, 32, 64)

manager = KVCacheManager(
    Config(
        num_blocks=23,  # block 0 is the null block
        groups=(Group(BLOCK_SIZE), Group(BLOCK_SIZE, kind="sliding_window", window=WINDOW)),
        max_model_len=LENGTH + BLOCK_SIZE,
        max_num_batched_tokens=8,  # so a request never holds more than 5 of the window's blocks
    )
)


def show() -> None:
    """Print one line of the table: blocks per group, without null blocks."""
    full, window = (sum(block != 0 for block in ids) for ids in manager.get_block_ids("long"))
    print(f"{manager.num_tokens('long'):6} {full:6} {window:7} {manager.num_free_blocks:6}")


print("tokens   full  window   free")
manager.add_request(Request("long", range(8)))
if not manager.allocate_slots("long", 8, full_sequence_must_fit=True):
    raise SystemExit("the prompt does not fit")
show()
for token in range(8, LENGTH):
    manager.take_batch()
    manager.append(["long"], [token])
    if token + 1 in SHOWN:
        show()
manager.take_batch()

for shared in (64, 48, 32):
    name = f"sharing {shared} tokens"
    manager.add_request(Request(name, [*range(shared), 999]))
    print(f"{name}: resumes at {manager.get_computed_blocks(name).num_tokens}")
