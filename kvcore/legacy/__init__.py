# SPDX-License-Identifier: Apache-2.0
"""The managers that came before, as facades over the core's pool: for those who port from them.

Rules: a facade translates calls; owners, keys and free queues are the core's. It has the names,
arguments, results and kinds of errors of its original, and hands out the commands of a runtime
(`take_batch`).
"""
