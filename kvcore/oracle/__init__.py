# SPDX-License-Identifier: Apache-2.0
"""Derives the contents of every slot from the commands and forward passes alone."""
