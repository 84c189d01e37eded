# SPDX-License-Identifier: Apache-2.0
"""A counterexample, told call by call and drawn."""
