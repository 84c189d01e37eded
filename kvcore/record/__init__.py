# SPDX-License-Identifier: Apache-2.0
"""The flight recorder: writes every call of a manager to files that survive the process."""
