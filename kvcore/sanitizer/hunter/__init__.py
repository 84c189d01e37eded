# SPDX-License-Identifier: Apache-2.0
"""Hunts for bugs: drives an engine's own scheduler with a fake model and checks its reads."""
