# SPDX-License-Identifier: Apache-2.0
"""The block manager of vLLM 0.3."""
