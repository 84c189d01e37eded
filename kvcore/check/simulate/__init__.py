# SPDX-License-Identifier: Apache-2.0
"""Deep random runs: a whole engine at real sizes, made from one number."""
