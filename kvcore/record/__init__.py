# SPDX-License-Identifier: Apache-2.0
"""The flight recorder: every call of a manager in files that survive the process."""
