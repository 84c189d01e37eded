# SPDX-License-Identifier: Apache-2.0
"""Text traces: calls and their outcomes, line by line."""
