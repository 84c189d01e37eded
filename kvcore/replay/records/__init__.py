# SPDX-License-Identifier: Apache-2.0
"""Records of a manager, made again."""
