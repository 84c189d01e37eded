# SPDX-License-Identifier: Apache-2.0
"""The adapters for vLLM: for serving schedulers, and for schedulers under the hunter."""
