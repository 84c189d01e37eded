# SPDX-License-Identifier: Apache-2.0
"""A router that learns from events alone which engine has most of a prompt cached.

Engines and router share a hash seed, so one prompt has the same hashes everywhere. The last prompt
was served before, but the long one has taken its blocks since.

    $ python examples/events_to_router.py
    a system prompt and a question: engine 0 has 0 of 3 blocks
    another prompt: engine 1 has 0 of 3 blocks
    the system prompt and another question: engine 0 has 2 of 3 blocks
    a long prompt: engine 1 has 0 of 6 blocks
    the other prompt again: engine 0 has 0 of 3 blocks
"""

from itertools import takewhile

from kvcore import BlockRemoved, BlockStored, Config, KVCacheManager, Request
from kvcore.hashing.block_hash import hash_blocks, root_hash

SEED, BLOCK_SIZE = b"one for all", 4
PROMPTS = {
    "a system prompt and a question": [*range(8), 50, 51, 52, 53],
    "another prompt": [*range(100, 112)],
    "the system prompt and another question": [*range(8), 60, 61, 62, 63],
    "a long prompt": [*range(200, 224)],
    "the other prompt again": [*range(100, 112)],
}
config = Config(num_blocks=7, block_size=BLOCK_SIZE, enable_events=True, hash_seed=SEED)
engines = [KVCacheManager(config), KVCacheManager(config)]
served = [0 for _ in engines]
known: list[set[bytes]] = [set() for _ in engines]  # what the router believes of each


def serve(engine: int, tokens: list[int]) -> None:
    """Compute a prompt and free it; the router reads the events."""
    manager = engines[engine]
    manager.add_request(Request("r", tokens))
    hit = manager.get_computed_blocks("r")
    if not manager.allocate_slots("r", len(tokens) - hit.num_tokens, hit):
        raise SystemExit("the prompt does not fit")
    manager.take_batch()  # ... apply it, run the forward pass ...
    manager.free("r")
    manager.remove_request("r")
    served[engine] += 1
    for event in manager.take_events():
        if isinstance(event, BlockStored):
            known[engine].update(event.block_hashes)
        elif isinstance(event, BlockRemoved):
            known[engine].remove(event.block_hash)


for name, tokens in PROMPTS.items():
    hashes = list(hash_blocks(root_hash(SEED), tokens, BLOCK_SIZE))
    found = [sum(1 for _ in takewhile(has.__contains__, hashes)) for has in known]
    chosen = max(range(len(engines)), key=lambda engine: (found[engine], -served[engine]))
    print(f"{name}: engine {chosen} has {found[chosen]} of {len(hashes)} blocks")
    serve(chosen, tokens)
