# SPDX-License-Identifier: Apache-2.0
"""A far tier below the replayed pool: which blocks it holds, and loads from there."""
