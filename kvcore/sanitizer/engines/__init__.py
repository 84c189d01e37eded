# SPDX-License-Identifier: Apache-2.0
"""One adapter per engine that the sanitizer follows and the hunter drives."""
