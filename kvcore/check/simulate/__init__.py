# SPDX-License-Identifier: Apache-2.0
"""Deep random runs of a whole engine at real sizes, each determined by one seed."""
