# SPDX-License-Identifier: Apache-2.0
"""Canonical bytes of states, batches and events."""
