# SPDX-License-Identifier: Apache-2.0
"""A recorded workload on many replicas behind a router, in virtual time."""
