# SPDX-License-Identifier: Apache-2.0
"""The most that a cache can hit: one without limit, and the best policy in a pool of this size."""
