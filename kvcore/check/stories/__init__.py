# SPDX-License-Identifier: Apache-2.0
"""Counterexamples, told call by call and drawn."""
