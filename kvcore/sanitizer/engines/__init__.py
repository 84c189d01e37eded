# SPDX-License-Identifier: Apache-2.0
"""The engines that the sanitizer follows and the hunter drives: one adapter each."""
