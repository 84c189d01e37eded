# SPDX-License-Identifier: Apache-2.0
"""Cache tensors and block tables, and the application of batches to them."""
