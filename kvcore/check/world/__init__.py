# SPDX-License-Identifier: Apache-2.0
"""Small worlds, and what a model of one can do."""
