# SPDX-License-Identifier: Apache-2.0
"""Facades of earlier vLLM block managers over the core's pool, for engines written for them.

A facade only translates calls: the core keeps owners, keys and free queues. It has the names,
arguments, results and kinds of errors of its original, and hands out commands for a runtime
(`take_batch`).
"""
