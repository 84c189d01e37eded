# SPDX-License-Identifier: Apache-2.0
"""Small worlds, and the interface of a model."""
