# SPDX-License-Identifier: Apache-2.0
"""The torch side of kvcore: cache tensors, attention from blocks, a model and an example engine."""
