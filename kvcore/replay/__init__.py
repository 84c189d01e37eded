# SPDX-License-Identifier: Apache-2.0
"""A recorded workload, replayed through a continuous-batching loop on the real manager."""
