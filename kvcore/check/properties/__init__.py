# SPDX-License-Identifier: Apache-2.0
"""What is checked on every edge of a search."""
