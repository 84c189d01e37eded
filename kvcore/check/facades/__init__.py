# SPDX-License-Identifier: Apache-2.0
"""The older managers, explored in small worlds: `kvcore check --facade v0` and `--facade v0.3`."""
