# SPDX-License-Identifier: Apache-2.0
"""Replays a recorded workload through a continuous-batching loop on the real manager."""
