# SPDX-License-Identifier: Apache-2.0
"""The reference engine: it schedules, runs the model over blocks and samples."""
