# SPDX-License-Identifier: Apache-2.0
"""The client of a far tier: what it asks for, believes and loads. No thread, no tensor."""
