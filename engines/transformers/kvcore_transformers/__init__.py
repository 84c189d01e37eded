# SPDX-License-Identifier: Apache-2.0
"""kvcore in place of the cache manager of transformers' continuous batching.

    with kvcore_transformers.installed() as statistics:
        model.generate_batch(prompts)

transformers keeps the tensor, the scheduler and the forward pass; kvcore decides about the blocks.
A cache that is made while it is installed stays kvcore's until it is dropped, even if a persistent
manager keeps it after `uninstall`. Decisions of transformers 5.23.0 that end or block a generation
are replaced too: some of its scheduler (`schedulers`), some of its offloading (`offloading`).
"""

from kvcore_transformers.install import install, installed, uninstall, weights_changed
from kvcore_transformers.pinned import NotServed
from kvcore_transformers.statistics import Statistics

__all__ = ["NotServed", "Statistics", "install", "installed", "uninstall", "weights_changed"]
