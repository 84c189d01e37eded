# SPDX-License-Identifier: Apache-2.0
"""The model, its weights, its tokenizer and its samplers."""
