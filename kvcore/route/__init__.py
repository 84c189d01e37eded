# SPDX-License-Identifier: Apache-2.0
"""Replays a recorded workload on many replicas behind a router, in virtual time."""
