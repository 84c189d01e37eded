# SPDX-License-Identifier: Apache-2.0
"""Values shared by all rooms: configuration, groups, commands, events, errors."""
