# SPDX-License-Identifier: Apache-2.0
"""The managers that came before, as facades over the core's pool, for engines written for them.

A facade translates calls; owners, keys and free queues are the core's. It has the names, arguments,
results and kinds of errors of its original, and hands out commands for a runtime (`take_batch`).
"""
