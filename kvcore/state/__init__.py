# SPDX-License-Identifier: Apache-2.0
"""The core's state, and the transaction in which a transition changes it."""
