# SPDX-License-Identifier: Apache-2.0
"""Canonical names: one for all states of a world that differ only in names of requests, blocks or
tokens.
"""
