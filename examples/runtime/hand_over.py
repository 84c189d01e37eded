# SPDX-License-Identifier: Apache-2.0
"""One engine computes a prompt, others answer it: handed over in a process, or kept in files.

A `Sender` puts a prompt's blocks into a channel, a `Receiver` loads them. A `FarExchange` keeps
them for later engines; pages have the model's name, so another model (stranger) finds none.

    $ python examples/runtime/hand_over.py
    alone    computes 67 tokens
    prefill  computes 60 tokens
    decode   computes  8 tokens
    keeper   computes 67 tokens
    later    computes 19 tokens
    stranger computes 67 tokens
"""

from functools import partial
from tempfile import TemporaryDirectory

from kvcore_runtime.engine.connector import Channel, Receiver, Sender
from kvcore_runtime.engine.engine import Engine
from kvcore_runtime.engine.sequence import GenerationRequest
from kvcore_runtime.far.directory import DirectoryStore
from kvcore_runtime.far.exchange import FarExchange
from kvcore_runtime.far.threaded import ThreadedTier
from kvcore_runtime.model.identity import identify
from kvcore_runtime.model.model import tiny_model
from kvcore_runtime.model.sampling import Sampling

from kvcore import Config, Group
from kvcore.far.options import FarOptions

GROUPS, FAR = (Group(block_size=16),), FarOptions(min_fetch_tokens=16, fetch_timeout_s=10)
PROMPT = tuple(b"Sixty bytes are a prompt of sixty tokens: 3 blocks and a bit")
model, stranger = tiny_model(seed=0, invariant=True), tiny_model(seed=1, invariant=True)


def answer(name, exchange=None, model=model, max_tokens=8):
    """Return the tokens of an answer, from an engine of its own."""
    config = Config(20, groups=GROUPS, hash_seed=identify(model, GROUPS).encode())
    engine = Engine(model, config, exchange=exchange)
    how = Sampling(temperature=0.0, max_tokens=max_tokens)
    engine.add_request(GenerationRequest(request_id="r", prompt=PROMPT, sampling=how))
    (done,) = engine.run()
    engine.exchange.flush(timeout_s=10)  # files are written beside the engine
    print(f"{name:8} computes {engine.metrics.num_computed_tokens:2} tokens")
    return done.tokens


def kept(engine, path):
    return FarExchange(engine, ThreadedTier(DirectoryStore(path)), FAR)


expected, channel = answer("alone"), Channel()
answer("prefill", partial(Sender, channel=channel), max_tokens=1)
assert answer("decode", partial(Receiver, channel=channel)) == expected
with TemporaryDirectory() as path:
    keep = partial(kept, path=path)
    assert answer("keeper", keep) == expected
    assert answer("later", keep) == expected
    assert answer("stranger", keep, stranger) != expected
