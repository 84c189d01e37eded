# SPDX-License-Identifier: Apache-2.0
"""With hide_salts, events tell a digest of a salt and never the salt; keys do not change."""

from __future__ import annotations

import hashlib
from typing import Any

import pytest

from kvcore import BlockStored, Config, KVCacheManager, Request
from kvcore.codec.event_msgpack import encode_events
from kvcore.types.errors import DamagedState
from kvcore.types.extra_inputs import CACHE_SALT, NO_EXTRA_KEYS, ExtraKeys
from kvcore.types.keys import HASHINGS, Hashing
from tests.conftest import Backend
from tests.helpers.hand_hashes import root_of

SALT = "tenant-secret"
SECTION = bytes([3, 1, 0, 0, 0, 1])


def publish(backend: Backend, **options: Any) -> KVCacheManager:
    """Publish two blocks of four tokens, of a request with a salt."""
    config = Config(9, 4, enable_events=True, hash_seed=b"seed", **options)
    manager = KVCacheManager(config, backend)
    manager.add_request(Request("a", range(8), cache_salt=SALT))
    manager.allocate_slots("a", 8)
    return manager


def digest(backend: Backend, hashing: Hashing = "sha256") -> bytes:
    """Return the digest that stands for the salt, computed independently."""
    message = b"kvcore salt\0" + root_of(backend, b"seed", hashing) + SALT.encode()
    return hashlib.sha256(message).hexdigest().encode()


@pytest.mark.parametrize("hashing", HASHINGS)
def test_events_have_a_digest_in_the_place_of_the_salt(hashing: Hashing, backend: Backend) -> None:
    manager = publish(backend, hide_salts=True, hashing=hashing)
    open_one = publish(backend, hashing=hashing)
    assert manager.get_block_keys("a") == open_one.get_block_keys("a")
    (hidden,), (reported,) = manager.take_events(), open_one.take_events()
    assert isinstance(hidden, BlockStored)
    assert isinstance(reported, BlockStored)
    assert reported.extra_keys == (((CACHE_SALT, SALT.encode()),), ())
    assert hidden.extra_keys == (((CACHE_SALT, digest(backend, hashing)),), ())
    for form in ("map", "array"):
        wire = encode_events([hidden], 0.0, form=form)
        assert SALT.encode() not in wire
        assert digest(backend, hashing) in wire


def test_a_merged_block_is_announced_with_the_digest_too(backend: Backend) -> None:
    # The older block of the content is evicted before the merge is decided, so the newer one is
    # announced when its batch is taken.
    manager = publish(backend, hide_salts=True, duplicates="merge")
    manager.take_batch()
    again = Request("b", range(8), cache_salt=SALT, skip_reading_prefix_cache=True)
    manager.add_request(again)
    manager.allocate_slots("b", 8)
    manager.evict_blocks([1, 2])
    manager.take_events()
    manager.take_batch()
    events = [each for each in manager.take_events() if isinstance(each, BlockStored)]
    assert [each.extra_keys[:1] for each in events if each.parent_hash is None] == [
        (((CACHE_SALT, digest(backend)),),)
    ]
    assert SALT.encode() not in encode_events(events, 0.0)


def test_the_option_is_part_of_the_canonical_bytes(backend: Backend) -> None:
    manager, other = publish(backend, hide_salts=True), KVCacheManager(Config(2, 4), backend)
    data = manager.encode()
    assert data.endswith(SECTION)
    other.restore(data)
    assert other.config == manager.config
    assert other.encode() == data
    assert other.take_events()[0] == manager.take_events()[0]
    without = publish(backend)
    without.take_events()
    manager = publish(backend, hide_salts=True)
    manager.take_events()
    assert manager.encode() == without.encode() + SECTION
    before = other.encode()
    with pytest.raises(DamagedState, match="options are not in canonical form"):
        other.restore(data[:-1] + b"\0")
    assert other.encode() == before


def test_no_salt_is_not_hidden() -> None:
    assert NO_EXTRA_KEYS.hide_salt(bytes(32)) is NO_EXTRA_KEYS
    salted = ExtraKeys(cache_salt="a")
    digests = {salted.hide_salt(bytes(31) + bytes([last])).cache_salt for last in range(3)}
    digests.add(ExtraKeys(cache_salt="b").hide_salt(bytes(32)).cache_salt)
    assert len(digests) == 4
