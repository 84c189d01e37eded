# SPDX-License-Identifier: Apache-2.0
"""The far tier of a world: an adversary below `Store` and `Load`, and the client above it."""
