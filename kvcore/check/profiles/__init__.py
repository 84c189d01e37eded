# SPDX-License-Identifier: Apache-2.0
"""The named worlds."""
