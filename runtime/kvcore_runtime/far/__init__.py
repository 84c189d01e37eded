# SPDX-License-Identifier: Apache-2.0
"""Far tiers: pages shared with other processes and machines, fetched first and loaded later."""
