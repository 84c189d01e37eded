# SPDX-License-Identifier: Apache-2.0
"""Parts that a user brings to the checker: a policy, a scheduler or a manager of their own."""
