"""``python -m tightfit``: the command line."""

import sys

from tightfit.cli import main

sys.exit(main())
