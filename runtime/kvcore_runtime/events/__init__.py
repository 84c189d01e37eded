# SPDX-License-Identifier: Apache-2.0
"""KV events over ZMQ in the frames of vLLM's publisher: one sends, the other keeps an index."""
