# SPDX-License-Identifier: Apache-2.0
"""The search itself: models, their moves, workers and the report."""
