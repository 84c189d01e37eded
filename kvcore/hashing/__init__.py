# SPDX-License-Identifier: Apache-2.0
"""Keys of blocks: hashes of their tokens, of the prefix before them and of extra keys."""
