# SPDX-License-Identifier: Apache-2.0
"""Recognises and reads traces in forms other than Mooncake's and Bailian's."""
