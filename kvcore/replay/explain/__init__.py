# SPDX-License-Identifier: Apache-2.0
"""A replay with an observer, and what its explanations come to: the command `kvcore explain`."""
