# SPDX-License-Identifier: Apache-2.0
"""One name for each state of a world, whatever its requests and blocks are called."""
