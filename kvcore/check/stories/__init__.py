# SPDX-License-Identifier: Apache-2.0
"""Counterexamples, written and drawn call by call."""
