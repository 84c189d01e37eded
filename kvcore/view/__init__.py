# SPDX-License-Identifier: Apache-2.0
"""Time travel: renders a record as one page that shows the pool at any step."""
