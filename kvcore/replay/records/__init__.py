# SPDX-License-Identifier: Apache-2.0
"""Makes the calls of a manager's record again."""
