# SPDX-License-Identifier: Apache-2.0
"""Managers of other projects with the method names that the checker calls, one per file."""
