# SPDX-License-Identifier: Apache-2.0
"""Traces of other forms than Mooncake's and Bailian's: how they are known, and read."""
