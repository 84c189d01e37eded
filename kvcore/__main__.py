# SPDX-License-Identifier: Apache-2.0
"""`python -m kvcore`: the command `kvcore`."""

import sys

from kvcore_command import main

sys.exit(main())
