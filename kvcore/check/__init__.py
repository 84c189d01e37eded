# SPDX-License-Identifier: Apache-2.0
"""The checker: every state of a small world, over the production transitions."""
