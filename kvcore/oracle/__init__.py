# SPDX-License-Identifier: Apache-2.0
"""The contents of every slot, derived from the commands and the forward passes alone."""
