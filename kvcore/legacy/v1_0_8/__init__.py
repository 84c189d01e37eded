# SPDX-License-Identifier: Apache-2.0
"""The block manager of 0.8.5's V1."""
