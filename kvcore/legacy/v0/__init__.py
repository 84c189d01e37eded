# SPDX-License-Identifier: Apache-2.0
"""The block managers of vLLM's V0 engine."""
