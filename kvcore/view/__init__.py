# SPDX-License-Identifier: Apache-2.0
"""Time travel: a record as one page that shows the pool at any step."""
