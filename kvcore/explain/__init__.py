# SPDX-License-Identifier: Apache-2.0
"""Why tokens were computed that a cache without limit would have had: an observer of a manager."""
