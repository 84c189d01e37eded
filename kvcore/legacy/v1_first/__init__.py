# SPDX-License-Identifier: Apache-2.0
"""The first block manager of vLLM's V1 engine."""
