# SPDX-License-Identifier: Apache-2.0
"""Invariants: properties that hold in every state."""
