# SPDX-License-Identifier: Apache-2.0
"""vLLM: schedulers that are followed while they serve, and the same under the hunter."""
