# SPDX-License-Identifier: Apache-2.0
"""Replays with an observer and sums up its explanations: the command `kvcore explain`."""
