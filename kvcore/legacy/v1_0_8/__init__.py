# SPDX-License-Identifier: Apache-2.0
"""The block manager of the V1 engine in vLLM 0.8.5."""
