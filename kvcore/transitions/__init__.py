# SPDX-License-Identifier: Apache-2.0
"""What an engine can ask of the core: each call takes a state and returns the next."""
