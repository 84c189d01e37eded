# SPDX-License-Identifier: Apache-2.0
"""Demonstrations with several processes: `make demo-ranks`, `demo-apart` and `demo-cluster`."""
