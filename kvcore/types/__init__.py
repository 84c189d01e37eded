# SPDX-License-Identifier: Apache-2.0
"""Values that every room shares: configuration, groups, commands, events, errors."""
