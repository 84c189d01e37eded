# SPDX-License-Identifier: Apache-2.0
"""The commands `kvcore check` and `kvcore simulate`, and their options."""
