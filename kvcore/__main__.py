# SPDX-License-Identifier: Apache-2.0
"""`python -m kvcore`: the command `kvcore`."""

import sys

from kvcore.cli.main import main

sys.exit(main())
