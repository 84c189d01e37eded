# SPDX-License-Identifier: Apache-2.0
"""Managers of other projects under the names that the checker calls, each in a file of its own."""
