# SPDX-License-Identifier: Apache-2.0
"""The properties that are checked on every edge of a search."""
