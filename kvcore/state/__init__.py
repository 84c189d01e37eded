# SPDX-License-Identifier: Apache-2.0
"""What the core knows, and the transaction in which a transition changes it."""
