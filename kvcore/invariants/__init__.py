# SPDX-License-Identifier: Apache-2.0
"""What holds in every state."""
