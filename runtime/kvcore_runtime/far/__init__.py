# SPDX-License-Identifier: Apache-2.0
"""Far tiers: pages of other processes and machines, fetched first and loaded later."""
