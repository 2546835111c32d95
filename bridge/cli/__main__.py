"""`python -m bridge.cli`: the command line."""

import sys

from bridge.cli import main

sys.exit(main())
