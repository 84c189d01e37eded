# SPDX-License-Identifier: Apache-2.0
"""The checker for a user's own parts: a policy, a scheduler or a manager."""
