# SPDX-License-Identifier: Apache-2.0
"""Blocks, their owners, their keys and the order of eviction."""
