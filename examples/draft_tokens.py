# SPDX-License-Identifier: Apache-2.0
"""Speculative decoding: guessed tokens get slots, and what the model rejects is never cached.

The model says the alphabet. The drafter does too, but writes every vowel in capitals.

    $ python examples/draft_tokens.py
    abcd: guessed Efg, accepted none
    abcde: guessed fgh, accepted fgh
    abcdefghi: guessed jkl, accepted jkl
    abcdefghijklm: guessed nOp, accepted n
    abcdefghijklmno: guessed pqr, accepted pqr
    19 tokens in 6 steps, 4 full blocks cached
"""

from kvcore import Config, KVCacheManager, Request

NUM_DRAFTS, LENGTH = 3, 19


def model(token: int) -> int:
    """Return the token that follows."""
    return token + 1


def guess(token: int) -> list[int]:
    """Return the drafter's guess of what follows."""
    letters = [chr(token + place) for place in range(1, NUM_DRAFTS + 1)]
    return [ord(each.upper() if each in "aeiou" else each) for each in letters]


manager = KVCacheManager(Config(num_blocks=9, block_size=4))
tokens = [ord(letter) for letter in "abc"]
manager.add_request(Request("r", tokens))
manager.allocate_slots("r", len(tokens))
manager.take_batch()  # ... apply it, run the forward pass ...
sampled, steps = model(tokens[-1]), 1

while len(tokens) + 1 < LENGTH:
    tokens.append(sampled)
    drafts = guess(sampled)
    manager.add_tokens("r", [sampled])
    manager.add_drafts("r", drafts)
    if not manager.allocate_slots("r", 1 + len(drafts)):
        raise SystemExit("the pool is full")
    manager.take_batch()  # one forward pass over the sampled token and the drafts behind it
    answers = [model(token) for token in (sampled, *drafts)]
    right = [draft == answer for draft, answer in zip(drafts, answers, strict=False)]
    num_accepted = right.index(False) if False in right else len(drafts)
    manager.accept("r", num_accepted)
    said, guessed = (bytes(each).decode() for each in (tokens, drafts))
    print(f"{said}: guessed {guessed}, accepted {guessed[:num_accepted] or 'none'}")
    tokens += drafts[:num_accepted]
    sampled, steps = answers[num_accepted], steps + 1

manager.append(["r"], [sampled])
num_cached = sum(manager.has_key(block) for block in manager.get_block_ids("r")[0])
print(f"{manager.num_tokens('r')} tokens in {steps} steps, {num_cached} full blocks cached")
